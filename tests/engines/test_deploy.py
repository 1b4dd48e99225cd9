"""deploy/flink and deploy/spark: what a user applies fits what is tested, and nobody reaches a worker pool from
outside.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import yaml
from processes import ROOT

from engines.programs import HERE, compose_schema, jars
from weightbeam.transforms.planning.makespan import CLUSTER_SLOTS

ENGINES = ("flink", "spark")
PORT = 50000  # of a worker pool


def documents(engine: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "deploy" / engine / "deployment.yaml").read_text()))


def compose(engine: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy" / engine / "compose.yaml").read_text())["services"]


def versions() -> dict[str, str]:
    """Of the programs that the tests run."""
    properties = ElementTree.parse(HERE / "pom.xml").find("{*}properties")
    assert properties is not None
    return {child.tag.rpartition("}")[2].removesuffix(".version"): child.text or "" for child in properties}


def containers(engine: str) -> list[dict[str, Any]]:
    """Of all pods, the task manager's template among them."""
    found: list[dict[str, Any]] = []

    def look(value: object) -> None:
        if isinstance(value, Mapping):
            found.extend(value.get("containers", []))
            for inner in value.values():
                look(inner)

    for document in documents(engine):
        look(document)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_the_versions_are_those_that_are_tested(engine: str) -> None:
    images = [container["image"] for container in containers(engine) if "image" in container]
    images += [service["image"] for service in compose(engine).values()]
    if engine == "flink":
        images.append(documents("flink")[0]["spec"]["image"])
    tested, told = versions(), set(images)
    assert {image for image in told if "job_server" in image} == {
        f"apache/beam_{'flink1.19' if engine == 'flink' else 'spark3'}_job_server:{tested['beam']}"
    }
    assert {re.split("[:-]", image)[1] for image in told if re.match(rf"(apache/)?{engine}:", image)} == {
        tested[engine]
    }
    assert {container["image"] for container in containers(engine) if container["name"] == "pool"} == {
        "REPOSITORY/weightbeam:TAG"
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_no_pool_is_reachable(engine: str) -> None:
    """Its pod lets others in to named ports only, and its port isn't one of them; on one machine nothing is published
    but a page.
    """
    policies = {
        document["metadata"]["name"]: document["spec"]
        for document in documents(engine)
        if document["kind"] == "NetworkPolicy"
    }
    policy = policies[f"weightbeam-{engine}-workers"]
    component = {"flink": "taskmanager", "spark": "worker"}[engine]
    assert policy["podSelector"]["matchLabels"] == {"app": f"weightbeam-{engine}", "component": component}
    # a rule without ports would open all of them
    ports = [[port["port"] for port in rule["ports"]] for rule in policy["ingress"]]
    assert all(ports)
    assert not any(PORT in named for named in ports)
    services = compose(engine)
    assert services["pool"]["network_mode"] == "service:worker"
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    assert "ports" not in services["worker"]
    assert "ports" not in services["pool"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_settings_on_one_machine(engine: str) -> None:
    """The job servers and Flink are started alike in both files."""
    (server,) = (container for container in containers(engine) if container["name"] == "jobs")
    there = [
        re.sub(r"weightbeam-(flink-rest|spark-master|jobs)", lambda found: {"jobs": "jobs"}.get(found[1], "HOST"), word)
        for word in server["args"]
    ]
    here = [re.sub(r"\b(manager|master)(?=:)", "HOST", word) for word in compose(engine)["jobs"]["command"]]
    assert there == here
    if engine == "flink":
        wanted = {
            key: value
            for key, value in documents("flink")[0]["spec"]["flinkConfiguration"].items()
            if ".port" not in key
        }
        told = yaml.safe_load(compose("flink")["manager"]["environment"]["FLINK_PROPERTIES"])
        assert {key: str(value) for key, value in told.items()} == wanted | {"jobmanager.rpc.address": "manager"}


def test_the_plan_knows_the_slots() -> None:
    assert documents("flink")[0]["spec"]["flinkConfiguration"]["taskmanager.numberOfTaskSlots"] == str(CLUSTER_SLOTS)
    (worker,) = (container for container in containers("spark") if container["name"] == "worker")
    assert worker["args"][:2] == ["--cores", str(CLUSTER_SLOTS)]


def test_the_operator_takes_it() -> None:
    """By the schema of its own definition; an unknown field is an error here, though Kubernetes only drops it."""
    (jar,) = jars("crds").glob("*.jar")
    with zipfile.ZipFile(jar) as opened:
        crd = yaml.load(
            opened.read("META-INF/fabric8/flinkdeployments.flink.apache.org-v1.yml"),
            getattr(yaml, "CSafeLoader", yaml.SafeLoader),
        )
    (version,) = crd["spec"]["versions"]
    assert version["name"] == "v1beta1"
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {}}
    cluster = documents("flink")[0]
    jsonschema.validate(cluster, schema)
    with pytest.raises(jsonschema.ValidationError, match="flinkVersoin"):
        jsonschema.validate(cluster | {"spec": cluster["spec"] | {"flinkVersoin": "v1_19"}}, schema)


@pytest.mark.parametrize("engine", ENGINES)
def test_compose_takes_it(engine: str) -> None:
    """By the schema of its specification."""
    said = yaml.safe_load((ROOT / "deploy" / engine / "compose.yaml").read_text())
    jsonschema.validate(said, compose_schema())
    (name, service), *_ = said["services"].items()
    with pytest.raises(jsonschema.ValidationError, match="imago"):
        jsonschema.validate(said | {"services": {name: service | {"imago": "flink"}}}, compose_schema())


def closed(schema: Any) -> Any:
    """A schema whose objects take no other properties than those that it names; numbers that may be texts may be
    either.
    """
    if not isinstance(schema, Mapping):
        return schema
    made = {
        key: closed(value) if key != "properties" else {name: closed(inner) for name, inner in value.items()}
        for key, value in schema.items()
    }
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
    return made
