"""How a command is told what to do: options read, written again, checked and refused."""

import argparse
import dataclasses
import inspect
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.harness.names import distils, is_vote
from fisherjax import algorithms, devices
from fisherjax._core import checks

_FEW = 12  # names that a refusal lists; more are nobody's to read

Folder = Annotated[Path, tyro.conf.arg(metavar="DIR")]
FolderOrNone = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
Options = tuple[tuple[str, Any], ...]
"""Options of methods that are not the defaults: pairs such as ("fedprox.mu", 0.1)."""


def names(known: Collection[str]) -> Any:
    """Annotate an option whose words are names, for --help."""
    return tyro.conf.arg(metavar="{" + ",".join(known) + "}")


def read(
    arguments: Sequence[str],
    program: str,
    description: str,
    defaults: Callable[..., Any],
    chooser: str = "dataset",
) -> Any:
    """Read a command line, unchecked; SystemExit for `--help` and options that do not exist.

    The defaults are the dataclass of the configuration, or a function that makes what is run if
    nothing else is asked, of the value of the option `chooser` or None. Fields that are dataclasses
    are groups of options. With a group `merging` every merge of the registry is one too.
    """
    if isinstance(defaults, type):
        default = defaults()
    else:  # what is wrong with the other options is said when all are read
        first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        first.add_argument(f"--{chooser}", nargs="?")
        default = defaults(getattr(first.parse_known_args(arguments)[0], chooser))
    groups = _method_groups() if hasattr(default, "merging") else {}
    # A class of its own for the command line: the configuration itself knows no method by name.
    fields = [(name, kind, dataclasses.field(default=kind())) for name, kind in groups.items()]
    command = dataclasses.make_dataclass("Command", fields, bases=(type(default),), frozen=True)
    told = tyro.cli(
        command,
        prog=f"python -m {program}",
        args=list(arguments),
        description=description,
        default=command(**vars(default)),
    )
    own = {name: getattr(told, name) for name in vars(default)}
    options = tuple(
        (f"{name}.{option}", value)
        for name in groups
        for option, value in vars(getattr(told, name)).items()
        if value != getattr(groups[name](), option)
    )
    if options:
        own["merging"] = dataclasses.replace(own["merging"], options=options)
    return type(default)(**own)


def contents(config: Any) -> dict[str, Any]:
    """Return the options of a configuration by name, without groups, as JSON holds them."""
    values: dict[str, Any] = {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            values |= contents(value)
        elif name == "options":
            values |= dict(value)
        elif isinstance(value, Path):
            values[name] = str(value)
        else:
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


def write(config: Any, program: str) -> str:
    """Write the command that runs a configuration again, every option spelled out."""
    words = ["python", "-m", program]
    for name, value in contents(config).items():
        method, dot, option = name.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{method}{dot}{'' if value else 'no-'}{option}")
        elif value is not None or dot:
            own = value if isinstance(value, list) else [value]
            words += [f"--{method}{dot}{option}", *map(str, own)]
    return shlex.join(words)


def command(
    program: str,
    continues: bool = True,
    all_cores: Callable[[Sequence[str]], bool] = lambda _: True,
) -> Callable[..., Callable[..., int]]:
    """Make a program of a function of its arguments and a console; it says why it stopped.

    Its arguments are those of this process if None. The exit status is 0 when all is done, 1 when
    something was refused, 130 when interrupted; `continues` if the same command would then go on.
    `all_cores` says of the arguments whether every core becomes a device.
    """

    def decorate(work: Callable[[Sequence[str], Console], None]) -> Callable[..., int]:
        def main(arguments: Sequence[str] | None = None) -> int:
            if arguments is None:
                # The program of a process, whose cores clients are spread over.
                arguments = sys.argv[1:]
                devices.disable_faulty_fusion()
                if all_cores(arguments):
                    devices.one_per_core()
            # A log has no width of its own; tables are wide.
            width = None if sys.stdout.isatty() else 170
            try:
                work(arguments, Console(highlight=False, width=width))
            except (ValueError, OSError) as error:
                Console(stderr=True, highlight=False).print("error:", style="bold red", end=" ")
                print(error, file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                again = shlex.join(["python", "-m", program, *arguments])
                more = f"; the same command continues it:\n  {again}" if continues else "."
                print(f"Interrupted. What was finished is kept{more}")
                return 130
            return 0

        return main

    return decorate


def check_name(option: str, value: str, known: Collection[str]) -> None:
    """Refuse a name that an option does not know, with the nearest three that it does."""
    if value not in known:
        every = ", ".join(known) if len(known) <= _FEW else f"{len(known)}, which --help lists"
        near = checks.nearest(value, known)
        raise ValueError(f"{_told(option, repr(value))}, did you mean {near}? Known: {every}")


def check(config: Any, option: str, expected: str, accept: Callable[[Any], bool]) -> None:
    """Refuse an option of a group that has a value, or one of several, that is not accepted."""
    given = getattr(config, option)
    if not all(map(accept, given if isinstance(given, tuple | list) else [given])):
        raise ValueError(f"{_told(option, given)}, expected {expected}")


def check_list(config: Any, *options: str) -> None:
    """Refuse options of several values that have none, or one of them twice."""
    for option in options:
        values = getattr(config, option)
        if not values:
            raise ValueError(f"{_told(option, 'empty')}, expected at least one")
        if len(set(values)) < len(values):
            raise ValueError(f"{_told(option, values)}, expected each only once")


_NUMBERS = (int, float, int | None, float | None)
_OTHERS = {
    "fedov": ("FedOV", (algorithms.open_set, algorithms.voting)),
    "student": ("FedOV's student", (algorithms.distilled,)),
}
"""Groups of options that are no factory's of a method: what they are of, and whose."""


def _method_groups() -> dict[str, type]:
    """Make a dataclass of each method's options that a word can give: numbers and switches."""
    known = {name: row for name, row in algorithms.merges().items() if not is_vote(name)}
    made = {name: (row.label, (row.factory,)) for name, row in known.items()}
    groups = {}
    for name, (label, functions) in (made | _OTHERS).items():
        fields, described = [], ""
        for function in functions:
            own, said = _options(function)
            fields, described = fields + own, described + said
        if fields:
            kind = dataclasses.make_dataclass(f"Options_{name}", fields, frozen=True)
            of = f"{label}; None is what --distillation has" if distils(name) else label
            # What --help says of each is what the docstring of its function says.
            kind.__doc__ = f"Of {of}.\n\nArgs:\n{described}"
            groups[name] = kind
    return groups


def _options(function: Callable[..., Any]) -> tuple[list[tuple[str, Any, Any]], str]:
    """List the options of a function, each with its type and default, and what is said of them.

    Those of the constants that it takes are among them, None for what the constants have.
    """
    plain = getattr(function, "func", function)
    kinds = inspect.get_annotations(inspect.unwrap(plain), eval_str=True)
    # The signature of a `partial` shows what it fixes as defaults.
    parameters = inspect.signature(function).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    fields = [(o, kinds[o], x) for o, x in defaults.items() if kinds[o] in (*_NUMBERS, bool)]
    _, _, described = (inspect.getdoc(plain) or "").partition("Args:\n")
    described = described.partition("\n\n")[0] + "\n"
    for constants in defaults.values():
        if isinstance(constants, algorithms.Distillation):
            own = inspect.get_annotations(type(constants), eval_str=True)
            fields += [(o, kind | None, None) for o, kind in own.items() if kind in _NUMBERS]
            _, _, more = (inspect.getdoc(type(constants)) or "").partition("Attributes:\n")
            described += more
    return fields, described


def _told(option: str, value: Any) -> str:
    words = " ".join(map(str, value)) if isinstance(value, tuple | list) else value
    return f"--{option.replace('_', '-')} is {words}"
