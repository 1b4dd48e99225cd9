"""The whole command line: its parser, what it reads, and the line that asks for the same."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import weightbeam
from weightbeam.pipelines.arguments import texts
from weightbeam.pipelines.arguments.commands import COMMANDS, SHELL
from weightbeam.pipelines.errors import Refused
from weightbeam.transforms.mesh import mesh_axes
from weightbeam.transforms.options import Option
from weightbeam.transforms.values import BOOLEANS, OTHER_BOOLEANS, boolean, did_you_mean

MOST_NAMED = 2  # commands that have an option


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are told in a line or two, with what may have been meant."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            commands = re.findall("'(.*?)'", wrong[2])
            message = f"no command {wrong[1]!r}{did_you_mean(wrong[1], commands)}; weightbeam --help lists them"
        self.exit(2, f"{self.format_usage()}{self.prog}: {message}\n")


class _Formatter(argparse.HelpFormatter):
    """Fits the texts to the terminal, but for lines that begin with blanks; shows the defaults that say something."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = itertools.groupby(text.splitlines(), key=lambda line: not line or line.startswith(" "))
        lines = [list(block) if as_it_is else textwrap.wrap(" ".join(block), width) for as_it_is, block in blocks]
        return "".join(f"{indent}{line}\n" for line in itertools.chain.from_iterable(lines))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_it = "(default: " in (action.help or "")
        if says_it or action.default in (None, argparse.SUPPRESS) or action.default is False:
            return action.help
        return f"{action.help} (default: {str(action.default).lower() if action.default is True else action.default})"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not is_boolean(action):
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} [{action.metavar}]"


def is_boolean(action: argparse.Action) -> bool:
    """Whether an option is true or false."""
    return action.type is boolean


def add_options(parser: argparse.ArgumentParser, options: Iterable[Option], words: Collection[str] = ()) -> None:
    """Adds options to a parser, each under its heading; those of the `words` are words without an option."""
    headings: dict[str, argparse._ActionsContainer] = {"": parser}
    for option in options:
        if option.group not in headings:
            headings[option.group] = parser.add_argument_group(option.group)
        if option.name in words:
            parser.add_argument(option.name, help=option.help, metavar=option.metavar)
            continue
        about: dict[str, Any] = {"help": option.help, "metavar": option.metavar, "default": option.default}
        if option.is_boolean:  # by its name alone, with a value, or as `--no_NAME`, which `parse` reads
            about |= {"nargs": "?", "const": True}
        if option.several:
            about |= {"action": "append"}
        about["default"] = None if about["default"] == () else about["default"]
        if option.read is not str:
            about["type"] = option.read
        names = [*([option.short] if option.short else ()), f"--{option.name}"]
        headings[option.group].add_argument(*names, choices=option.choices or None, **about)


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        "weightbeam",
        description=texts.OVERVIEW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"weightbeam {weightbeam.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, command in COMMANDS.items():
        made = commands.add_parser(
            name, help=command.help, description=command.about, usage=f"weightbeam {name} {command.usage}",
            formatter_class=_Formatter, allow_abbrev=False,
        )  # fmt: skip
        add_options(made, command.all_options(), command.places if command.words else ())
    return parser


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    return cast("Mapping[str, argparse.ArgumentParser]", commands)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads a command line: what is ours, and what is left for Beam.

    Hyphens in the names of options are underscores. Words without an option are the command's places, in order. An
    option that is true or false is true by its name alone, false as `--no_NAME`, and takes the word behind it only where
    that is `true` or `false`. An option that isn't ours takes the word behind it along, unless that begins with a
    hyphen: Beam's options aren't known here.
    """
    parser = make_parser()
    commands = commands_of(parser)
    given = list(arguments)
    if given[:1] == ["plan"] and len(given) > 1 and given[1] in commands and given[1] not in ("help", "completion"):
        given = [*given[1:], "--dry_run"]
    if not given or given[0] not in commands:
        return parser.parse_args(given), []
    name, words = given[0], given[1:]
    known, ours, places, rest = commands[name]._option_string_actions, [], [], []
    bare: dict[str, str] = {}  # the booleans by the words behind them
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            option = "--" + option[2:].replace("-", "_")
        no = known.get(f"--{option.removeprefix('--no_')}") if option.startswith("--no_") and not equals else None
        if no and is_boolean(no):
            ours.append(f"{no.option_strings[-1]}=false")
        elif option in known and is_boolean(known[option]):
            if not equals:
                behind = words[0] if words else ""
                if behind.lower() in OTHER_BOOLEANS:
                    commands[name].error(f"{option} {behind}: say true or false; a folder of that name is ./{behind}")
                value = words.pop(0) if behind.lower() in BOOLEANS else "true"
                bare[behind] = option
            ours.append(f"{known[option].option_strings[-1]}={value}")
        elif option in known:
            ours.append(option + equals + value)
            if not equals and known[option].nargs is None and words:
                ours.append(words.pop(0))
            if option == "--mesh" and words and (more := _axis(words[0])):
                one = f"{value or ours[-1]},{more}"
                commands[name].error(f"unexpected: {more}; the axes of a mesh have commas between them: --mesh {one}")
        elif word.startswith("-") and len(word) > 1:
            rest.append(option + equals + value)
            if not equals and words and (words[0] == "-" or not words[0].startswith("-")):
                rest.append(words.pop(0))
        elif equals and f"--{option}" in known:
            commands[name].error(f"unexpected: {word}; did you mean --{word}?")
        else:
            places.append(word)
    has_places = COMMANDS[name].places and not COMMANDS[name].words
    args = commands[name].parse_args(ours if has_places else [*ours, *places])
    args.command = name
    if has_places:
        _place(commands[name], args, places, bare)
    return args, rest


def _axis(word: str) -> str:
    """A word if it is an axis of a mesh with its size, such as `tensor=4`; else nothing."""
    return word if word.partition("=")[0] in mesh_axes() and "=" in word else ""


def refuse_unknown(args: argparse.Namespace, rest: Sequence[str], more: str = "") -> None:
    """Refuses the options that a command doesn't know, where it has no use for Beam's.

    Raises:
      Refused: there are any.
    """
    if rest:
        more = more or f"weightbeam {args.command} --help lists all"
        raise Refused(f"unknown options: {' '.join(rest)}{meant(rest[0], args.command)}; {more}")


def meant(option: str, command: str, beams: Iterable[str] = ()) -> str:
    """`; did you mean …?` of an option that a command doesn't know: one of its own first, then another command that
    has it, then one of Beam's.
    """
    commands, (option, *_) = commands_of(make_parser()), option.partition("=")
    ours = commands[command]._option_string_actions
    if longer := [known for known in ours if known.endswith(option.replace("--", "_", 1))]:
        return f"; did you mean {longer[0]}?"
    if others := [f"weightbeam {name}" for name, made in commands.items() if option in made._option_string_actions]:
        more = " and others" if others[MOST_NAMED:] else ""
        return f"; {option} is an option of {', '.join(others[:MOST_NAMED])}{more}"
    return did_you_mean(option, ours) or did_you_mean(option, beams)


def command_line(
    args: argparse.Namespace, rest: Sequence[str] = (), command: str = "", places: Sequence[str] = ()
) -> str:
    """The command line that `parse` read, quoted for a shell; without what only says what a person sees.

    Args:
      args, rest: what `parse` returned.
      command: another command that takes the same options, as `convert` does those of `plan`.
      places: the words without an option; without them options stand in their place.
    """
    name = command or args.command
    parser = commands_of(make_parser())[name]
    blank = parser.parse_args([])
    words = ["weightbeam", name, *places]
    unsaid = SHELL | {"help"} | (set(COMMANDS[name].places) if places else set())
    for action in parser._actions:
        default = getattr(blank, action.dest, None)
        if action.dest in unsaid or (value := getattr(args, action.dest, default)) == default:
            continue
        for each in value if isinstance(value, list) else [value]:
            words += spelled(action.dest, each)
    return shlex.join([*words, *rest])


def spelled(name: str, value: object) -> list[str]:
    """The words that give an option a value."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else [f"--{name}", "false"]
    return [f"--{name}", str(value)]


def _place(
    parser: argparse.ArgumentParser, args: argparse.Namespace, words: Sequence[str], bare: Mapping[str, str]
) -> None:
    """Gives the words without an option to the places that no option named."""
    names = [name for name in COMMANDS[args.command].places if getattr(args, name) is None]
    if args.command == "verify" and len(words) == 1:  # a checkpoint knows its source
        names = [name for name in ("checkpoint", "source") if name in names]
    if len(words) > len(names):
        more = words[len(names) :]
        taken = "".join(f"; {bare[word]} takes true or false" for word in more if word in bare)
        parser.error(f"unexpected: {' '.join(more)}{taken}")
    for name, word in zip(names, words, strict=False):
        setattr(args, name, word)
