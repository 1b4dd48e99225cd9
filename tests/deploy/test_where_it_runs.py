"""The files of docs/howto/where_it_runs.md: a JobSet, the actions and the job around `watch --once`."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lazily import lazily
from processes import run

from weightbeam.formats.release.files import role_of
from weightbeam.pipelines.terminal.arguments.parser import parse

kubernetes_validate = lazily("kubernetes_validate")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
ACTIONS = sorted((DEPLOY / "actions").glob("*.yml"))
SAYS = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(os.environ['SAID'], 'w'))"


@pytest.fixture(scope="module")
def jobset() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kubernetes" / "jobset.yaml").read_text())


def test_the_jobs_of_a_jobset(jobset: dict[str, Any]) -> None:
    """Each is a Job as Kubernetes takes it; the second waits for the first, and reads what that writes."""
    weights, train = jobset["spec"]["replicatedJobs"]
    version = kubernetes_validate.latest_version()
    for each in (weights, train):
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": each["name"]},
            "spec": each["template"]["spec"],
        }
        kubernetes_validate.validate(job, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(job | {"speck": {}}, version, strict=True)
    assert train["dependsOn"] == [{"name": weights["name"], "status": "Complete"}]
    (container,) = weights["template"]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    verify, convert = (parse(each.split()[1:]) for each in script.split("||"))
    assert (verify[0].command, convert[0].command, convert[0].resume) == ("verify", "convert", True)
    assert verify[1] == convert[1] == []
    assert convert[0].output == verify[0].checkpoint
    (trainer,) = train["template"]["spec"]["template"]["spec"]["containers"]
    assert f"load_parameters_path={convert[0].output}/0/items" in trainer["args"]


def test_its_account_is_there(jobset: dict[str, Any]) -> None:
    made = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "follow.yaml").read_text()))
    account = next(each["metadata"] for each in made if each["kind"] == "ServiceAccount")
    assert jobset["metadata"]["namespace"] == account["namespace"]
    for each in jobset["spec"]["replicatedJobs"]:
        pod = each["template"]["spec"]["template"]["spec"]
        assert pod["serviceAccountName"] == account["name"]
        mounted = {mount["name"] for made in pod["containers"] for mount in made.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}


@pytest.mark.parametrize("path", ACTIONS, ids=lambda path: path.name)
def test_actions(path: Path) -> None:
    """They fit GitHub's schema, end, keep no token, and call a command that there is."""
    tool = str(Path(sys.executable).with_name("check-jsonschema"))
    run(tool, "--builtin-schema", "vendor.github-workflows", str(path), status=0)
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    assert all("timeout-minutes" in job for job in jobs)
    steps = [step for job in jobs for step in job["steps"]]
    assert all(
        step["with"]["persist-credentials"] is False
        for step in steps
        if step.get("uses", "").startswith("actions/checkout")
    )
    for step in steps:
        assert "${{" not in step.get("run", ""), "what is put into a script is run by it"
        if found := re.match(r"weightbeam (.*) \$DRY_RUN$", step.get("run", "")):
            args, rest = parse(found[1].split())
            assert (args.command, args.once, rest) == ("watch", True, [])
    assert any("watch" in step.get("run", "") for step in steps)


def program(folder: Path, name: str, text: str) -> None:
    """A program on the path."""
    (folder / name).write_text(text)
    (folder / name).chmod(stat.S_IRWXU)


@pytest.mark.parametrize("credentials", ["", '{"type": "service_account"}'])
def test_a_job_of_hugging_faces(credentials: str, tmp_path: Path) -> None:
    """What `job.sh` asks of the service, by options that its command line has; and what then runs, with secrets in no argument."""
    tools, said = tmp_path / "bin", tmp_path / "said.json"
    tools.mkdir()
    program(tools, "hf", f'#!/bin/sh\nSAID={said} exec {sys.executable} -c "{SAYS}" "$@"\n')
    (tmp_path / "watch.yaml").write_text("output: gs://bucket/é\n")
    env = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "IMAGE": "image",
        "HF_TOKEN": "hf_secret",
        "GOOGLE_CREDENTIALS": credentials,
    }
    run("sh", str(DEPLOY / "huggingface" / "job.sh"), str(tmp_path / "watch.yaml"), env=env, status=0)
    asked, given = json.loads(said.read_text())
    at = asked.index("image")
    known = run(sys.executable, "-m", "huggingface_hub.cli.hf", "jobs", "run", "--help", status=0).stdout
    assert asked[:2] == ["jobs", "run"]
    assert all(word in known for word in asked[:at] if word.startswith("--"))
    assert "hf_secret" not in " ".join(asked)
    assert given["HF_TOKEN"] == "hf_secret"

    program(tools, "weightbeam", f'#!/bin/sh\nSAID={said} exec {sys.executable} -c "{SAYS}" "$@"\n')
    (watch,) = [word for word in asked if word.startswith("WATCH=")]
    secrets = {name: given[name] for name in ("HF_TOKEN", "GOOGLE_CREDENTIALS")}
    run(*asked[at + 1 :], env={"PATH": env["PATH"], "WATCH": watch.removeprefix("WATCH=")} | secrets, status=0)
    words, seen = json.loads(said.read_text())
    args, rest = parse(words)
    assert (args.command, args.once, rest) == ("watch", True, [])
    assert Path(args.config).read_text() == "output: gs://bucket/é\n"
    assert "GOOGLE_CREDENTIALS" not in seen
    key = seen.get("GOOGLE_APPLICATION_CREDENTIALS")
    assert (key is None) == (not credentials)
    if key:
        assert (Path(key).read_text(), stat.S_IMODE(os.stat(key).st_mode)) == (credentials, 0o600)


def test_a_job_says_what_it_lacks(tmp_path: Path) -> None:
    done = run(
        "sh", str(DEPLOY / "huggingface" / "job.sh"), "watch.yaml", env={"PATH": os.environ["PATH"], "IMAGE": "image"}
    )
    assert done.returncode != 0
    assert "HF_TOKEN" in done.stderr


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_what_model_garden_asks_for_is_exported(name: str) -> None:
    """Beside config.json, safetensors and index, which an export is made of (Vertex AI, "Deploy models with custom weights")."""
    assert role_of(name) in ("tokenizer", "generation")
