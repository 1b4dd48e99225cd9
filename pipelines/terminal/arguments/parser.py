"""The whole command line: its parser, what it reads, and the line that asks for the same."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import weightbeam
from weightbeam.model_mappings.meant import did_you_mean
from weightbeam.pipelines.terminal.arguments import texts
from weightbeam.pipelines.terminal.arguments.commands import COMMANDS, SHELL
from weightbeam.pipelines.terminal.errors import Refused
from weightbeam.transforms.cutting.mesh import mesh_axes
from weightbeam.transforms.planning.options import OUTPUT, Option
from weightbeam.transforms.planning.values import BOOLEANS, OTHER_BOOLEANS, boolean

MOST_NAMED = 2  # commands that have an option
IN_PYTHON = ("load", "open")  # functions that are no commands


class _Parser(argparse.ArgumentParser):
    """A parser whose mistakes are told together, each in a line or two, with what may have been meant.

    Attributes:
      mistakes: what was wrong with the words until now.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.mistakes: list[str] = []

    def check(self) -> None:
        """Ends the process where there were mistakes."""
        if self.mistakes:
            self.error(self.mistakes.pop())

    def error(self, message: str) -> NoReturn:
        if wrong := re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            commands = re.findall("'(.*?)'", wrong[2])
            python = f"; in Python there is weightbeam.{wrong[1]}" if wrong[1] in IN_PYTHON else ""
            message = f"no command {wrong[1]!r}{did_you_mean(wrong[1], commands)}{python}; weightbeam --help lists them"
        if missing := re.match(r"the following arguments are required: (.*)", message):
            message = f"missing: {missing[1]}; {self.prog} --help says what it takes"
        told = [f"{self.prog}: {each}\n" for each in (*self.mistakes, message)]
        self.exit(2, self.format_usage() + "".join(told))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """A value, or None where the option can't have it, which is told with the other mistakes."""
        if action.nargs == argparse.PARSER:
            return super()._get_values(action, arg_strings)
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as e:
            self.mistakes.append(str(e))
            return None


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


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, _Parser]:
    (commands,) = (action.choices for action in parser._actions if action.dest == "command")
    return cast("Mapping[str, _Parser]", commands)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads a command line: what is ours, and what is left for Beam.

    Hyphens in the names of options are underscores. Words without an option are the command's places, in order. An
    option that is true or false is true by its name alone, false as `--no_NAME`, and takes the word behind it only where
    that is `true` or `false`. An option that isn't ours takes the word behind it along, unless that begins with a
    hyphen: Beam's options aren't known here.
    """
    parser = make_parser()
    commands = commands_of(parser)
    given = _command_first(list(arguments), commands)
    if not given or given[0] not in commands:
        return parser.parse_args(given), []
    name, *words = given
    read = _Words(commands[name], words)
    while read.left:
        read.sort_next()
    has_places = COMMANDS[name].places and not COMMANDS[name].words
    args = read.parser.parse_args(read.ours if has_places else [*read.ours, *read.places])
    args.command = name
    if has_places:
        _place(read.parser, args, read.places, read.bare)
    mistakes = read.parser.mistakes
    if mistakes and read.rest and not COMMANDS[name].beam:  # else `refuse_unknown` tells it
        mistakes.append(_unknown(read.rest, name))
    if empty := [
        name for name, value in vars(args).items() if value == "" or (isinstance(value, list) and "" in value)
    ]:
        named = [each.upper() if each in COMMANDS[name].places else f"--{each}" for each in empty]
        mistakes.append(f"{', '.join(named)}: says nothing; leave it out, or say what it is")
    read.parser.check()
    return args, read.rest


def _command_first(given: list[str], commands: Collection[str]) -> list[str]:
    """A command line without `plan` before another command: `plan COMMAND …` is `COMMAND … --dry_run`."""
    if given[:1] == ["plan"] and given[1:2] and given[1] in {*commands} - {"help", "completion"}:
        return [*given[1:], "--dry_run"]
    return given


@dataclasses.dataclass
class _Words:
    """The words behind a command, which are sorted from the first to the last.

    Attributes:
      parser: the command's.
      left: the words that aren't sorted yet.
      ours: the command's options, with their values.
      places: the words without an option.
      rest: the options that aren't ours, with their values.
      bare: the options that are true or false and have no `=`, by the words behind them.
    """

    parser: _Parser
    left: list[str]
    ours: list[str] = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)
    rest: list[str] = dataclasses.field(default_factory=list)
    bare: dict[str, str] = dataclasses.field(default_factory=dict)

    def sort_next(self) -> None:
        """Sorts a word, together with its value where that is the word behind it."""
        word, known = self.left.pop(0), self.parser._option_string_actions
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            option = "--" + option[2:].replace("-", "_")
        if not equals and (no := self._find_negated(option)):
            self.ours.append(f"{no.option_strings[-1]}=false")
        elif option in known and is_boolean(known[option]):
            value = value if equals else self._take_boolean(option)
            self.ours.append(f"{known[option].option_strings[-1]}={value}")
        elif option in known:
            self._sort_ours(option, equals, value)
        elif word.startswith("-") and len(word) > 1:
            self._sort_rest(option, equals, value)
        elif equals and f"--{option}" in known:
            self.parser.mistakes.append(f"unexpected: {word}; did you mean --{word}?")
        else:
            self.places.append(word)

    def _find_negated(self, option: str) -> argparse.Action | None:
        """The option that is true or false of a `--no_NAME`; None for other words."""
        named = self.parser._option_string_actions.get(f"--{option.removeprefix('--no_')}")
        return named if option.startswith("--no_") and named and is_boolean(named) else None

    def _take_boolean(self, option: str) -> str:
        """The value of an option that is true or false: the word behind it, if it is one."""
        behind = self.left[0] if self.left else ""
        if behind.lower() in OTHER_BOOLEANS:
            self.left.pop(0)
            self.parser.mistakes.append(f"{option} {behind}: say true or false; a folder of that name is ./{behind}")
            return "true"
        self.bare[behind] = option
        return self.left.pop(0) if behind.lower() in BOOLEANS else "true"

    def _sort_ours(self, option: str, equals: str, value: str) -> None:
        """Sorts an option of the command that isn't true or false."""
        self.ours.append(option + equals + value)
        if not equals and self.parser._option_string_actions[option].nargs is None and self.left:
            self.ours.append(self.left.pop(0))
        if option == "--mesh" and self.left and (more := _axis(self.left[0])):
            one = f"{value or self.ours[-1]},{self.left.pop(0)}"
            self.parser.mistakes.append(
                f"unexpected: {more}; the axes of a mesh have commas between them: --mesh {one}"
            )

    def _sort_rest(self, option: str, equals: str, value: str) -> None:
        """Sorts an option that isn't ours."""
        self.rest.append(option + equals + value)
        if not equals and self.left and (self.left[0] == "-" or not self.left[0].startswith("-")):
            self.rest.append(self.left.pop(0))


def _axis(word: str) -> str:
    """A word if it is an axis of a mesh with its size, such as `tensor=4`; else nothing."""
    return word if word.partition("=")[0] in mesh_axes() and "=" in word else ""


def refuse_unknown(args: argparse.Namespace, rest: Sequence[str], more: str = "") -> None:
    """Refuses the options that a command doesn't know, where it has no use for Beam's.

    Raises:
      Refused: there are any.
    """
    if rest:
        raise Refused(_unknown(rest, args.command, more))


def _unknown(rest: Sequence[str], command: str, more: str = "") -> str:
    more = more or f"weightbeam {command} --help lists all"
    return f"unknown options: {' '.join(rest)}{meant(rest[0], command)}; {more}"


def meant(option: str, command: str, beams: Iterable[str] = ()) -> str:
    """`; did you mean …?` of an option that a command doesn't know: one of its own first, then another command that
    has it, then one of Beam's.
    """
    commands, (option, *_) = commands_of(make_parser()), option.partition("=")
    if option == "--" or not option.startswith("--"):
        return "; a folder whose name begins so is ./-NAME"
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


def _place(parser: _Parser, args: argparse.Namespace, words: Sequence[str], bare: Mapping[str, str]) -> None:
    """Gives the words without an option to the places that no option named."""
    said = [name for name in COMMANDS[args.command].places if getattr(args, name) is not None]
    names = [name for name in COMMANDS[args.command].places if name not in said]
    if args.command == "verify" and len(words) == 1:  # a checkpoint knows its source
        names = [name for name in ("checkpoint", "source") if name in names]
    if len(words) > len(names):
        more = words[len(names) :]
        taken = "".join(f"; {bare[word]} takes true or false" for word in more if word in bare)
        by_option = f"; {' and '.join(f'--{name}' for name in said)} said what stands in front" if said else ""
        parser.mistakes.append(f"unexpected: {' '.join(more)}{taken}{by_option}")
    for name, word in zip(names, words, strict=False):
        if (option := bare.get(word)) and _is_value(parser, option, word, args.command, name):
            parser.mistakes.append(f"{option} {word}: say true or false; a folder of that name is ./{word}")
        setattr(args, name, word)


def _is_value(parser: argparse.ArgumentParser, option: str, word: str, command: str, place: str) -> bool:
    """Whether a word behind an option that is true or false is meant as its value, and not as the command's place: one
    that is no path, where nothing needs that place, or where the option alone says no more than its default.
    """
    if "/" in word or word in (".", "..") or not option.startswith("--"):
        return False
    return (command, place) == ("plan", OUTPUT) or parser._option_string_actions[option].default is not False
