#!/bin/sh
# Starts a job of Hugging Face's that looks once: sh job.sh watch.yaml
# IMAGE is deploy/Dockerfile's; HF_TOKEN writes to the hub; GOOGLE_CREDENTIALS, the JSON of a service account's key, is for gs:// only.
# FLAVOR and TIMEOUT may be set. The job resumes what the last one left, and ends with its watcher's status.
set -eu
: "${IMAGE:?the image of deploy/Dockerfile}" "${HF_TOKEN:?a token that may write}"
config=$(base64 < "${1:?a watch.yaml}" | tr -d '\n')
export HF_TOKEN GOOGLE_CREDENTIALS="${GOOGLE_CREDENTIALS:-}"
# shellcheck disable=SC2016 # the job's shell fills these in
exec hf jobs run --detach --flavor "${FLAVOR:-cpu-upgrade}" --timeout "${TIMEOUT:-6h}" \
    --secrets HF_TOKEN --secrets GOOGLE_CREDENTIALS --env "WATCH=$config" "$IMAGE" \
    sh -euc '
        umask 077
        work=$(mktemp -d)
        printf %s "$WATCH" | base64 -d > "$work/watch.yaml"
        if [ -n "${GOOGLE_CREDENTIALS:-}" ]; then
            printf %s "$GOOGLE_CREDENTIALS" > "$work/key.json"
            export GOOGLE_APPLICATION_CREDENTIALS="$work/key.json"
        fi
        unset WATCH GOOGLE_CREDENTIALS
        exec weightbeam watch --config "$work/watch.yaml" --once'
