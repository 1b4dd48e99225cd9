"""Other engines, reached through Beam's job services and masters: Flink, Spark, Prism, Beam's own."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    FlinkRunnerOptions,
    PipelineOptions,
    PortableOptions,
    SparkRunnerOptions,
    StandardOptions,
)
from apache_beam.runners.runner import PipelineRunner

from weightbeam.pipelines.running.runners import jobs
from weightbeam.pipelines.running.runners.runner import Job, Runner
from weightbeam.pipelines.running.stopping import stopping

PATIENCE = 10.0  # seconds until an endpoint answers


class Portable(Runner):
    """An engine with a job service, whose workers are elsewhere."""

    names, greets = jobs.RUNNERS, True

    def find_problems(self, options: PipelineOptions, runner: PipelineRunner) -> Iterator[str]:
        name = options.view_as(StandardOptions).runner
        if name == "PortableRunner" and not options.view_as(PortableOptions).job_endpoint:
            yield "--job_endpoint=HOST:PORT is missing: the job service that takes the job"

    def find_unreachable(self, options: PipelineOptions) -> Iterator[str]:
        """What stands against submitting a job there: nobody listens where the options say.

        Asked before anything is staged: Beam itself would wait for ever.
        """
        for option, endpoint in _endpoints(options):
            place = re.sub(r"^\w+://", "", endpoint).partition("/")[0]
            host, _, port = place.rpartition(":")
            if not host or not port.isdecimal():
                yield f"--{option}={endpoint}: expected HOST:PORT"
                continue
            try:
                socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
            except (OSError, OverflowError) as e:
                yield f"--{option}={endpoint}: nobody answers there ({e}); is it started, and its port reachable from this machine?"

    def in_containers(self, options: PipelineOptions) -> bool:
        """Flink's and Spark's workers run in this process unless a cluster is named, says Beam."""
        name, environment = options.view_as(StandardOptions).runner, options.view_as(PortableOptions).environment_type
        if environment:
            return environment in ("DOCKER", "beam:env:docker:v1")
        if name == "FlinkRunner":
            return options.view_as(FlinkRunnerOptions).flink_master not in ("[local]", "[auto]")
        master = options.view_as(SparkRunnerOptions).spark_master_url
        return name != "SparkRunner" or not re.match(r"local(\[.+\])?$", master)

    def run(self, pipeline: beam.Pipeline, job: Job) -> None:
        with stopping(job.staging, job.planned.hash):
            jobs.run(pipeline, job, self.count_written(job))


def _endpoints(options: PipelineOptions) -> Iterator[tuple[str, str]]:
    """The options that name a service which has to be there already, and what they name."""
    name, portable = options.view_as(StandardOptions).runner, options.view_as(PortableOptions)
    if name == "PortableRunner" and portable.job_endpoint and portable.job_endpoint != "embed":
        yield "job_endpoint", portable.job_endpoint
    flink = options.view_as(FlinkRunnerOptions).flink_master
    spark = options.view_as(SparkRunnerOptions).spark_master_url
    if name == "FlinkRunner" and flink and not flink.startswith("["):
        yield "flink_master", flink
    # several masters: any of them may be away
    if name == "SparkRunner" and spark.startswith("spark://") and "," not in spark:
        yield "spark_master_url", spark
