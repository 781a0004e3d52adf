"""What all commands share: how options are read, written again, and refused."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console


def read(
    arguments: Sequence[str], program: str, description: str, defaults: Callable[[str | None], Any]
) -> Any:
    """Read a command line whose defaults depend on --dataset.

    Args:
        arguments: without the name of the program.
        program: the module that is run.
        description: what `--help` says first.
        defaults: `(name of the data set, None if not given) -> configuration`, a dataclass.

    Returns:
        The configuration, unchecked.

    Raises:
        SystemExit: for `--help` and for options that do not exist.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", nargs="?")
    default = defaults(first.parse_known_args(arguments)[0].dataset)
    return tyro.cli(
        type(default),
        prog=f"python -m {program}",
        args=list(arguments),
        default=default,
        description=description,
    )


def contents(config: Any) -> dict[str, Any]:
    """Return a configuration, any dataclass, as JSON holds it."""
    values = dataclasses.asdict(config)
    return {k: list(v) if isinstance(v, tuple) else _plain(v) for k, v in values.items()}


def write(config: Any, program: str) -> str:
    """Write the command that runs a configuration again, every option spelled out.

    Args:
        config: any dataclass.
        program: the module that is run.

    Returns:
        One line for a shell.
    """
    words = ["python", "-m", program]
    for field, value in contents(config).items():
        option = field.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def refuse(error: Exception) -> int:
    """Say on the terminal what was refused.

    Args:
        error: whose text is shown.

    Returns:
        The exit status of a command that was refused.
    """
    Console(stderr=True, highlight=False).print("error:", style="bold red", end=" ")
    print(error, file=sys.stderr)
    return 1


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
