"""Conversions submitted to Dataflow, captured whole: the real command against the test servers of Dataflow and Cloud
Storage.

    make dataflow-dry-run

prints a job for a reader: what is asked of Dataflow, the steps, and what is staged for the workers.
"""

from __future__ import annotations

import base64
import bz2
import dataclasses
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import warm
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2 as proto
from apache_beam.portability.python_urns import PICKLED_DOFN_INFO
from servers.dataflow import FakeDataflow, Job
from servers.gcs import FakeGcs
from support import DEEPSEEK, make_release

from weightbeam.pipelines.terminal.tables import Table, text

ROOT = Path(__file__).parents[1]
PROJECT, REGION = "a-project", "us-central1"
MODELS, STAGED, OUTPUT = "models", "staged", "checkpoints"  # buckets
TIMEOUT = 120  # seconds


@dataclasses.dataclass
class Cloud:
    """Dataflow and Cloud Storage, and what points clients at them."""

    dataflow: FakeDataflow
    gcs: FakeGcs
    environment: Mapping[str, str]

    def upload(self, folder: Path) -> str:
        """Copies a model into a bucket; returns its URL."""
        for file in folder.iterdir():
            self.gcs.put(MODELS, f"{folder.name}/{file.name}", file.read_bytes())
        return f"gs://{MODELS}/{folder.name}"

    def command(self, source: str, output: str, *options: object) -> list[str]:
        """`weightbeam convert` on Dataflow."""
        place = (
            "--project",
            PROJECT,
            "--region",
            REGION,
            "--temp_location",
            f"gs://{STAGED}/temp",
            "--dataflow_endpoint",
            self.dataflow.url,
        )
        command = [
            sys.executable,
            "-m",
            "weightbeam",
            "convert",
            "--runner",
            "DataflowRunner",
            *place,
            "--source",
            source,
            "--output",
            output,
            *options,
        ]
        return [str(part) for part in command]

    @contextmanager
    def start(self, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
        """`command` as a process of its own, which doesn't outlive the block."""
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        command = self.command(*map(str, arguments))
        with subprocess.Popen(
            command, cwd=ROOT, env=self.environment | environment, start_new_session=True, **pipes
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def convert(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs `command` to its end, forked from a warm process."""
        words = self.command(*map(str, arguments))[3:]
        return warm.run(*words, env=self.environment | environment, cwd=ROOT, timeout=TIMEOUT)

    def submission(self) -> Submission:
        """The job that was submitted last, with what is staged for it."""
        job = self.dataflow.jobs[-1]
        made = Submission(job, {})
        folder = made.options["staging_location"].removeprefix(f"gs://{STAGED}/") + "/"
        staged = self.gcs.objects[STAGED].items()
        return dataclasses.replace(
            made, files={name.removeprefix(folder): found.data for name, found in staged if name.startswith(folder)}
        )


@contextmanager
def cloud(folder: Path) -> Iterator[Cloud]:
    """The servers, from `with` to its end; `folder` is for their clients' credentials."""
    with FakeDataflow() as dataflow, FakeGcs(MODELS, STAGED, OUTPUT) as gcs:
        mine = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        yield Cloud(dataflow, gcs, os.environ | gcs.env() | dataflow.env(folder) | mine)


@dataclasses.dataclass
class Submission:
    """A job as Dataflow has it.

    Attributes:
      files: what is staged for it, by name.
    """

    job: Job
    files: Mapping[str, bytes]

    @property
    def name(self) -> str:
        return self.job.request["name"]

    @property
    def environment(self) -> dict[str, Any]:
        return self.job.request["environment"]

    @property
    def options(self) -> dict[str, Any]:
        """The pipeline's options, as the workers get them."""
        return self.environment["sdkPipelineOptions"]["options"]

    @property
    def pool(self) -> dict[str, Any]:
        (pool,) = self.environment["workerPools"]
        return pool

    @property
    def pipeline(self) -> proto.Pipeline:
        """The graph."""
        return proto.Pipeline.FromString(self.files["pipeline.pb"])

    def steps(self) -> dict[str, proto.PTransform]:
        """What Dataflow carries out, by name, in order."""
        components = self.pipeline.components

        def leaves(ids: Any) -> Iterator[proto.PTransform]:
            for step in (components.transforms[name] for name in ids):
                yield from leaves(step.subtransforms) if step.subtransforms else [step]

        return {step.unique_name: step for step in leaves(self.pipeline.root_transform_ids)}

    def hints(self, step: str) -> dict[str, bytes]:
        """The resource hints of the environment that a step runs in."""
        return dict(self.pipeline.components.environments[self.steps()[step].environment_id].resource_hints)

    def pickled(self) -> dict[str, bytes]:
        """What is pickled in the steps that run code, by name."""
        pardos = {
            name: step.spec.payload
            for name, step in self.steps().items()
            if step.spec.urn == common_urns.primitives.PAR_DO.urn
        }
        fns = {name: proto.ParDoPayload.FromString(payload).do_fn for name, payload in pardos.items()}
        return {name: unpacked(fn.payload) for name, fn in fns.items() if fn.urn == PICKLED_DOFN_INFO}

    def packed(self) -> bytes:
        """The files of the package that is staged, one behind another."""
        with tarfile.open(fileobj=io.BytesIO(self.files["workflow.tar.gz"])) as package:
            return b"".join(file.read() for member in package if (file := package.extractfile(member)))


def unpacked(payload: bytes) -> bytes:
    """A pickle, as Beam's pickler packs it."""
    data = base64.b64decode(payload)
    return bz2.decompress(data) if data.startswith(b"BZh") else zlib.decompress(data)


def main() -> None:
    """Submits the conversion of a small model, and prints the job."""
    with tempfile.TemporaryDirectory() as name, cloud(Path(name)) as servers:
        source = servers.upload(make_release(Path(name) / "DeepSeek-Small", DEEPSEEK, files=2))
        done = servers.convert(source, f"gs://{OUTPUT}/deepseek-small", "--no_wait_until_finish", *sys.argv[1:])
        print(done.stdout + done.stderr)
        if done.returncode == 0:
            show(servers.submission())


def show(job: Submission) -> None:
    """Prints a job."""
    pool = job.pool
    hints = {key.split(":")[2]: int(value) for key, value in job.hints("WriteChunks/ParDo(_WriteChunksFn)").items()}
    asked = Table("asked of Dataflow", "")
    for what, value in {
        "job": job.name,
        "machine": f"{pool['machineType']}, {pool['diskSizeGb']} GB of disk, hints {hints}",
        "workers": f"up to {pool['autoscalingSettings']['maxNumWorkers']}, {pool['numThreadsPerWorker']} threads each",
        "image": pool["workerHarnessContainerImage"],
        "experiments": ", ".join(job.environment["experiments"]),
        "staged in": job.options["staging_location"],
    }.items():
        asked.add_row(what, value)
    steps = Table("step", "kind", ">bytes of payload")
    for name, step in job.steps().items():
        steps.add_row(name, step.spec.urn.split(":")[2], f"{len(step.spec.payload):,}")
    sent = Table("sent", ">bytes")
    for name, size in (
        {"the request": len(job.job.sent)} | {name: len(data) for name, data in sorted(job.files.items())}
    ).items():
        sent.add_row(name, f"{size:,}")
    options = Table("option for the workers", "")
    for name, value in sorted(job.options.items()):
        options.add_row(name, str(value))
    for shown in (asked, steps, sent, options):
        print(text([shown, ""], width=120))


if __name__ == "__main__":
    main()
