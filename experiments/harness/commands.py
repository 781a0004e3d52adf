"""Read the options of a command, write them again, check them and refuse what cannot be run."""

import argparse
import contextlib
import dataclasses
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.harness import choices, hosts, option_groups, program_cache
from fisherjax import devices
from fisherjax._core import checks

_FEW = 12  # a refusal lists at most so many names

Folder = Annotated[Path, tyro.conf.arg(metavar="DIR")]
FolderOrNone = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
_CACHE = "compilation_cache"
_Cache = Annotated[
    bool,
    tyro.conf.arg(help="Keep compiled programs and decoded data in a folder for later runs."),
]
_MORE = """Methods have options too, such as --fedprox.mu. To see those of some methods, name them:

    python -m {program} --algorithms fedprox fedfisher_kfac --help
"""
Options = tuple[tuple[str, Any], ...]
"""Options of methods that differ from the defaults: pairs such as ("fedprox.mu", 0.1)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Imports:
    """Files with one's own methods, networks and data sets."""

    imports: Annotated[tuple[str, ...], tyro.conf.arg(name="import", metavar="FILES")] = ()
    """Python files that define METHODS, NETWORKS or DATASETS, which options then take by name."""


def names(known: Collection[str]) -> Any:
    """Return the annotation of an option whose values are known names; --help lists them."""
    return tyro.conf.arg(metavar="{" + ",".join(known) + "}")


def read(
    arguments: Sequence[str],
    program: str,
    description: str,
    defaults: Callable[..., Any],
    check: Callable[[Any], Any] = lambda _: None,
    chooser: str = "dataset",
) -> Any:
    """Read and check a command line.

    The defaults are the dataclass of the configuration, or a function that returns the default
    configuration for the value of the option `chooser`, or for None. A field that is a dataclass is
    a group of options. With a group `merging`, every merge of the registry is a group too.

    Raises:
        SystemExit: For `--help` and for options that do not exist.
        ValueError: If `check` refuses the options.
    """
    asked, _ = _read(arguments, program, description, defaults, check, chooser)
    return asked


def _read(
    arguments: Sequence[str],
    program: str,
    description: str,
    defaults: Callable[..., Any],
    check: Callable[[Any], Any],
    chooser: str,
    cached: bool = True,
    distributed: bool = False,
) -> tuple[Any, bool]:
    """Read a command line as `read`; return also whether compiled programs are kept."""
    # Errors in the other options are reported when all of them are read.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--import", nargs="*", default=(), dest="imports")
    first.add_argument(f"--{chooser}", nargs="?")
    first.add_argument("--algorithms", nargs="*", default=())
    first.add_argument("-h", "--help", action="store_true")
    early, _ = first.parse_known_args(arguments)
    # What files define is a choice of the options.
    choices.add(early.imports)
    default = defaults() if isinstance(defaults, type) else defaults(getattr(early, chooser))
    groups = option_groups.of_methods() if hasattr(default, "merging") else {}
    if groups and early.help:
        # All groups together are four hundred lines.
        groups = option_groups.only(groups, early.algorithms)
        description = f"{description}\n{_MORE.format(program=program)}"
    # The command line has its own class, because the configuration names no method.
    fields: list[Any] = [(_CACHE, _Cache, cached)]
    fields += [(hosts.OPTION, hosts.Option, None)] * distributed
    fields += [(name, kind, dataclasses.field(default=kind())) for name, kind in groups.items()]
    command = dataclasses.make_dataclass("Command", fields, bases=(type(default),), frozen=True)
    parsed = tyro.cli(
        command,
        prog=f"python -m {program}",
        args=list(arguments),
        description=description,
        default=command(**vars(default)),
    )
    values = {name: getattr(parsed, name) for name in vars(default)}
    options = tuple(
        (f"{name}.{option}", value)
        for name in groups
        for option, value in vars(getattr(parsed, name)).items()
        if value != getattr(groups[name](), option)
    )
    if options:
        values["merging"] = dataclasses.replace(values["merging"], options=options)
    asked = type(default)(**values)
    choices.add((), contents(asked).get("algorithms", ()))
    check(asked)
    return asked, getattr(parsed, _CACHE)


def contents(config: Any) -> dict[str, Any]:
    """Return the options of a configuration by name, without groups, as JSON values."""
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


def replaced(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration with other values of options, by name, in any of its groups."""
    changes = {}
    for name, value in vars(config).items():
        if dataclasses.is_dataclass(value):
            changes[name] = replaced(value, values)
        elif name == "options":
            others = ((n, x) for n, x in values.items() if "." in n and n not in dict(value))
            changes[name] = (*value, *others)
        elif name in values:
            new = values[name]
            changes[name] = tuple(new) if isinstance(value, tuple) else new
    return dataclasses.replace(config, **changes)


def write(config: Any, program: str) -> str:
    """Return the command that runs a configuration again, with every option written out."""
    words = ["python", "-m", *program.split()]
    for name, value in contents(config).items():
        method, dot, option = name.replace("_", "-").rpartition(".")
        option = {"imports": "import"}.get(option, option)
        if isinstance(value, bool):
            words.append(f"--{method}{dot}{'' if value else 'no-'}{option}")
        elif name == "imports" and not value:
            continue
        elif value is not None or dot:
            each = value if isinstance(value, list) else [value]
            words += [f"--{method}{dot}{option}", *map(str, each)]
    return shlex.join(words)


def command(
    program: str,
    description: str,
    defaults: Callable[..., Any],
    check: Callable[[Any], Any] = lambda _: None,
    *,
    chooser: str = "dataset",
    continues: bool = True,
    all_cores: Callable[[Sequence[str]], bool] = lambda _: True,
    cached: bool = True,
    distributed: bool = False,
) -> Callable[..., Callable[..., int]]:
    """Make a program of a function of the options and a console.

    The program reads and checks its options, see `read`, and prints why it stopped. Its arguments
    are those of this process if None, and then it keeps what it compiles, see `program_cache`. The
    exit status is 0 when all is done, 1 when something was refused, 130 or 143 when the process was
    interrupted or terminated; `continues` says whether the same command would then go on.
    `all_cores` returns, for the arguments, whether every core becomes a device. A command that
    measures compilation is not `cached`, unless `--compilation-cache` asks for it. One that is
    `distributed` may run in several processes, see `hosts`.
    """

    def decorate(work: Callable[[Any, Console], None]) -> Callable[..., int]:
        def main(arguments: Sequence[str] | None = None) -> int:
            alone = arguments is None
            if arguments is None:
                # This process runs the program, so clients may be spread over its cores.
                arguments = sys.argv[1:]
                devices.disable_faulty_fusion()
                if all_cores(arguments):
                    devices.one_per_core()
                # What a process that is terminated was writing is removed, as by Ctrl-C.
                signal.signal(signal.SIGTERM, _terminate)
                sys.unraisablehook = _interrupt_again
            # A log has no width of its own, and tables are wide.
            width = None if sys.stdout.isatty() else 170
            try:
                with hosts.connected(arguments if alone and distributed else (), _terminate):
                    given = arguments, program, description, defaults, check, chooser
                    asked, keeps = _read(*given, cached, distributed)
                    with hosts.beside(asked) as asked, _compiled_programs(alone, keeps) as note:
                        console = Console(highlight=False, width=width)
                        if note:
                            console.print(note)
                        work(asked, console)
            except (ValueError, OSError) as error:
                Console(stderr=True, highlight=False).print("error:", style="bold red", end=" ")
                print(error, file=sys.stderr)
                return 1
            except KeyboardInterrupt as stop:
                again = shlex.join(["python", "-m", *program.split(), *arguments])
                more = f"; the same command continues it:\n  {again}" if continues else "."
                print(f"Interrupted. What was finished is kept{more}", flush=True)
                status = 143 if stop.args == (signal.SIGTERM,) else 130
                if alone:
                    # Before it exits, Python would wait for what XLA computes, minutes of training.
                    os._exit(status)
                return status
            return 0

        return main

    return decorate


def _terminate(number: int, _: Any) -> None:
    raise KeyboardInterrupt(number)


def _interrupt_again(lost: "sys.UnraisableHookArgs") -> None:
    """Repeat an interruption that Python ignores, as one that comes during a garbage collection."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    (number,) = lost.exc_value.args or (signal.SIGINT,)
    threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


def _compiled_programs(alone: bool, keeps: bool) -> contextlib.AbstractContextManager[str]:
    """Keep compiled programs if this process runs only the command, and is to keep them."""
    if alone and keeps:
        return program_cache.kept()
    if alone:
        program_cache.disable()
    return contextlib.nullcontext("")


def check_names(config: Any, option: str, known: Collection[str]) -> None:
    """Refuse values of an option that are not among the known names; see `check_name`."""
    values = getattr(config, option)
    for value in [values] if isinstance(values, str) else values:
        check_name(option, value, known)


def check_name(option: str, value: str, known: Collection[str]) -> None:
    """Refuse a name that is not known, and suggest the nearest three that are."""
    if value not in known:
        every = ", ".join(known) if len(known) <= _FEW else f"{len(known)}, which --help lists"
        near = checks.nearest(value, known)
        raise ValueError(f"{_assignment(option, repr(value))}, did you mean {near}? Known: {every}")


def check(config: Any, option: str, expected: str, accept: Callable[[Any], bool]) -> None:
    """Refuse an option whose value, or one of several values, is not accepted."""
    given = getattr(config, option)
    if not all(map(accept, given if isinstance(given, tuple | list) else [given])):
        raise ValueError(f"{_assignment(option, given)}, expected {expected}")


def check_list(config: Any, *options: str) -> None:
    """Refuse options of several values that have no value, or the same value twice."""
    for option in options:
        values = getattr(config, option)
        if not values:
            raise ValueError(f"{_assignment(option, 'empty')}, expected at least one")
        if len(set(values)) < len(values):
            raise ValueError(f"{_assignment(option, values)}, expected each only once")


def in_words(value: Any) -> str:
    """Return the value of an option, or its several values, as text."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _assignment(option: str, value: Any) -> str:
    return f"--{option.replace('_', '-')} is {in_words(value)}"
