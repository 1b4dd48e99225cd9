"""The Flex Template's metadata, made of the options of `weightbeam convert`. `python -m deploy.metadata` writes it
anew.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions

from deploy.launch import conversion_options, may_repeat
from weightbeam.pipelines.terminal.arguments.texts import CONVERT
from weightbeam.transforms.planning.values import boolean, natural, positive, ranges, secret, size

FILE = Path(__file__).with_name("metadata.json")
NAME = "Weightbeam"
LEFT_OUT = {
    "link": "buckets have no links",
    "sharding_rules": "a file of the machine that gives the command; the launcher has none",
}
# the rest of Beam's are in the launch request's environment
FROM_BEAM = ("sdk_container_image", "number_of_worker_harness_threads")
PLACES = {
    "source": {"paramType": "TEXT", "regexes": ["^(gs|hf)://.+$"]},
    "output": {"paramType": "GCS_WRITE_FOLDER", "regexes": ["^gs://.+$"]},
}
TRUE_OR_FALSE = {"paramType": "BOOLEAN", "regexes": ["^(true|false)$"]}
WHOLE = {"paramType": "NUMBER", "regexes": ["^[0-9]+$"]}
TYPES: dict[Any, dict[str, Any]] = {  # argparse's types as the API's; the command line checks them again
    boolean: TRUE_OR_FALSE,
    natural: WHOLE,
    positive: {"paramType": "NUMBER", "regexes": ["^[1-9][0-9]*$"]},
    int: WHOLE,
    ranges: {"paramType": "TEXT", "regexes": ["^[0-9]+(:[0-9]+)?(,[0-9]+(:[0-9]+)?)*$"]},
    size: {"paramType": "TEXT", "regexes": ["^[1-9][0-9]* *([KkMmGgTt]?[Ii]?[Bb]|[KkMmGgTt])?$"]},
    secret: {
        "paramType": "TEXT",
        "regexes": [r"^projects/[^/\s]+/secrets/[^/\s]+/versions/[^/\s]+$"],
    },  # a token that was given by mistake would stay in the job's record
    None: {"paramType": "TEXT"},
}


def metadata() -> dict[str, Any]:
    """What `gcloud dataflow flex-template build --metadata-file` takes (Dataflow API v1b3, TemplateMetadata)."""
    options = [option for name, option in conversion_options().items() if name not in LEFT_OUT]
    return {
        "name": NAME,
        "description": " ".join(CONVERT.partition("\n\n")[0].split()),
        "parameters": [_parameter(option) for option in options + _beam_options()],
    }


def _parameter(option: argparse.Action) -> dict[str, Any]:
    """An option as a parameter (ParameterMetadata)."""
    several = "; several with spaces between them" if may_repeat(option) else ""
    made: dict[str, Any] = {
        "name": option.dest,
        "label": f"--{option.dest}",
        "helpText": " ".join(str(option.help).split()) + several,
    }
    if option.choices:
        made |= {"paramType": "ENUM", "enumOptions": [{"value": choice, "label": choice} for choice in option.choices]}
    else:
        made |= PLACES.get(option.dest) or TYPES[option.type]
    if option.dest not in PLACES:
        made["isOptional"] = True
    if option.default is not None:
        made["defaultValue"] = str(option.default).lower() if isinstance(option.default, bool) else str(option.default)
    return made


def _beam_options() -> list[argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    for options in PipelineOptions.__subclasses__():
        if options.__module__ == PipelineOptions.__module__:
            options._add_argparse_args(parser)
    known = {action.dest: action for action in parser._actions}
    return [known[name] for name in FROM_BEAM]


def text() -> str:
    """The metadata as the file holds it."""
    return json.dumps(metadata(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
