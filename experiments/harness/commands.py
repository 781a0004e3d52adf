"""How a command is told what to do: options read, written again, checked and refused."""

import dataclasses
import difflib
import inspect
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from fisherjax import algorithms

Options = tuple[tuple[str, Any], ...]
"""Options of methods that are not the defaults: pairs such as ("fedprox.mu", 0.1)."""


@dataclasses.dataclass(frozen=True)
class _First:
    """What other defaults depend on."""

    dataset: str | None = None


def read(
    arguments: Sequence[str], program: str, description: str, defaults: Callable[..., Any]
) -> Any:
    """Read a command line.

    Args:
        arguments: Without the name of the program.
        program: The module that is run.
        description: What `--help` says first.
        defaults: The dataclass of the configuration, or a function that makes what is run if
            nothing else is asked, of the name of a data set or None. Fields that are dataclasses
            are groups of options. With a group `merging` every method of the table is one too.

    Returns:
        The configuration, unchecked.

    Raises:
        SystemExit: For `--help` and for options that do not exist.
    """
    default = defaults() if isinstance(defaults, type) else defaults(_dataset(arguments))
    groups = _method_groups() if hasattr(default, "merging") else {}
    # A class of its own for the command line: the configuration itself knows no method by name.
    fields = [(name, kind, dataclasses.field(default=kind())) for name, kind in groups.items()]
    command = dataclasses.make_dataclass("Command", fields, bases=(type(default),), frozen=True)
    told = tyro.cli(
        command,
        prog=f"python -m {program}",
        args=list(arguments),
        description=description,
        default=command(**_fields(default)),
    )
    own = {name: getattr(told, name) for name in _fields(default)}
    options = tuple(
        (f"{name}.{option}", value)
        for name in groups
        for option, value in vars(getattr(told, name)).items()
        if value != algorithms.options(name)[option]
    )
    if options:
        own["merging"] = dataclasses.replace(own["merging"], options=options)
    return type(default)(**own)


def contents(config: Any) -> dict[str, Any]:
    """Return the options of a configuration by name, without groups, as JSON holds them."""
    values: dict[str, Any] = {}
    for name, value in _fields(config).items():
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
        elif value is not None:
            words += [
                f"--{method}{dot}{option}",
                *map(str, value if isinstance(value, list) else [value]),
            ]
    return shlex.join(words)


def attempt(
    work: Callable[[Sequence[str]], None],
    program: str,
    arguments: Sequence[str] | None,
    continues: bool = True,
) -> int:
    """Run a command, and say on one line why it stopped if it did.

    Args:
        work: What it does, of the command line.
        program: The module that is run.
        arguments: Of the command line; those of this process if None.
        continues: Whether the same command would go on after an interruption.

    Returns:
        The exit status: 0 when all is done, 1 when something was refused, 130 when interrupted.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        work(arguments)
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


def check_name(option: str, value: str, known: Collection[str]) -> None:
    """Refuse a name that an option does not know.

    Raises:
        ValueError: With the nearest name that it knows.

    Example:
        >>> check_name("partition", "niid-bench", ["fedfisher", "niid_bench"])
        Traceback (most recent call last):
        ValueError: --partition is 'niid-bench', did you mean 'niid_bench'? Known: ...
    """
    if value not in known:
        nearest = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"--{_dashes(option)} is {value!r}, did you mean {nearest!r}? Known: {', '.join(known)}"
        )


def check(config: Any, option: str, expected: str, accept: Callable[[Any], bool]) -> None:
    """Refuse a value that an option cannot have.

    Args:
        config: A configuration or a group of one.
        option: Its field.
        expected: What may be given, in words.
        accept: Whether a value may be given; of each one if there are several.

    Raises:
        ValueError: With the option, what was given and what was expected.

    Example:
        >>> check(_First("x"), "dataset", "a longer name", lambda name: len(name) > 1)
        Traceback (most recent call last):
        ValueError: --dataset is x, expected a longer name
    """
    given = getattr(config, option)
    values = given if isinstance(given, tuple) else (given,)
    if not all(map(accept, values)):
        raise ValueError(f"--{_dashes(option)} is {_shown(given)}, expected {expected}")


def check_list(config: Any, *options: str) -> None:
    """Refuse options of several values that have none, or one of them twice.

    Raises:
        ValueError: With the option and what was given.
    """
    for option in options:
        values = getattr(config, option)
        if not values:
            raise ValueError(f"--{_dashes(option)} is empty, expected at least one")
        if len(set(values)) < len(values):
            given = _shown(values)
            raise ValueError(f"--{_dashes(option)} is {given}, expected each only once")


def _fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def _dataset(arguments: Sequence[str]) -> str | None:
    """Read --dataset and nothing else: what is wrong with the rest is said when all is read."""
    asked = [word for word in arguments if word not in ("-h", "--help")]
    told, _ = tyro.cli(_First, args=asked, return_unknown_args=True)
    return told.dataset


def _method_groups() -> dict[str, type]:
    """Make a dataclass of each method's options that a word can give: numbers and switches."""
    groups = {}
    for name, row in algorithms.TABLE.items():
        factory = getattr(row.factory, "func", row.factory)
        kinds = inspect.get_annotations(inspect.unwrap(factory), eval_str=True)
        fields = [
            (option, kinds[option], default)
            for option, default in algorithms.options(name).items()
            if kinds[option] in (int, float, bool, int | None, float | None)
        ]
        if fields:
            kind = dataclasses.make_dataclass(f"Options_{name}", fields, frozen=True)
            # What --help says of each is what the factory's docstring says.
            _, _, described = (inspect.getdoc(factory) or "").partition("Args:\n")
            kind.__doc__ = f"Of {row.label}.\n\nArgs:\n{described.partition('Returns:')[0]}"
            groups[name] = kind
    return groups


def _dashes(option: str) -> str:
    return option.replace("_", "-")


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
