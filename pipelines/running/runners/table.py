"""Which runner the options name."""

from __future__ import annotations

from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions

from weightbeam.pipelines.running.runners.dataflow import Dataflow
from weightbeam.pipelines.running.runners.local import Local
from weightbeam.pipelines.running.runners.portable import Portable
from weightbeam.pipelines.running.runners.runner import Runner

RUNNERS = {name: runner for runner in (Local(), Portable(), Dataflow()) for name in runner.names}


def runner_of(options: PipelineOptions) -> Runner:
    """The runner of settled options; one that isn't known here is run as Beam does."""
    return RUNNERS.get(options.view_as(StandardOptions).runner or "", Runner())
