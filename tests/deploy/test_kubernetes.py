"""All that is applied fits Kubernetes' own schemas; the CronJob runs a command that there is, as an account that the
Terraform makes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lazily import lazily

from weightbeam.pipelines.terminal.arguments.parser import parse

kubernetes_validate = lazily("kubernetes_validate")

DEPLOY = Path(__file__).parents[2] / "deploy"


def documents() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "follow.yaml").read_text())}


def test_the_cron_job() -> None:
    made = documents()
    pod = made["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args, rest = parse(container["args"])
    assert (container["command"], args.command, args.once, rest) == (["weightbeam"], "watch", True, [])
    assert pod["serviceAccountName"] == made["ServiceAccount"]["metadata"]["name"]
    assert len(made["CronJob"]["spec"]["schedule"].split()) == 5
    account = made["ServiceAccount"]["metadata"]["annotations"]["iam.gke.io/gcp-service-account"].partition("@")[0]
    assert f'account_id   = "{account}"' in (DEPLOY / "terraform" / "identities.tf").read_text()
    secrets = [env["valueFrom"]["secretKeyRef"]["name"] for env in container["env"] if "valueFrom" in env]
    assert secrets == re.findall(r"create secret generic (\S+)", (DEPLOY / "README.md").read_text())
    commands = re.findall(r"^kubectl (\w+)", (DEPLOY / "README.md").read_text(), re.M)
    assert commands.index("apply") < commands.index("create")  # the secret lies in the namespace that is applied
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    "file", ["flink/convert.yaml", "flink/deployment.yaml", "kubernetes/follow.yaml", "spark/deployment.yaml"]
)
def test_kubernetes_takes_it(file: str) -> None:
    """An unknown field is an error here, though Kubernetes only drops it. What the Flink operator defines is checked
    with its own schema, in `tests/engines`.
    """
    version = kubernetes_validate.latest_version()
    ours = [each for each in yaml.safe_load_all((DEPLOY / file).read_text()) if each["kind"] != "FlinkDeployment"]
    assert ours
    for each in ours:
        kubernetes_validate.validate(each, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(each | {"speck": {}}, version, strict=True)
