"""Continue in a folder: compare its config.json with what is asked for, and write it.

A folder belongs to one experiment, which may grow: a command may ask for more values of the options
`GROWS` than the folder has. The run is then of both, what the folder has and what is asked for.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import fisherjax as fj
from experiments.harness import choices, commands, names, records
from experiments.harness.records import CONFIG, RESULTS, write_text

WHERE_AND_HOW = (
    *("data_dir", "folder", "out", "clients_per_chunk", "checkpoint_seconds"),
    *("keep_models", "keep_clients", "client_folder", "tracker"),
    *("superlink", "keys", "insecure", "app", "timeout", "connect"),
)
"""Options that change results only by rounding, so that a run may continue with other values."""
GROWS = (
    *("algorithms", "seeds", "partition_seeds", "calibrate", "imports"),
    *("local_epochs", "server_learning_rate", "local_learning_rate"),
    *("splits", "temperatures", "table3"),
    *("kinds", "counts", "codecs", "sizes", "noise_multipliers", "views", "clients"),
    *("datasets", "alphas", "betas", "classes", "num_clients", "cases", "starts"),
    *("central", "rounds", "total_epochs", "then_rounds", "exchanges", "draws"),
    *("ranks", "merged", "keep_clients", "orders"),
)
"""Options of which a folder may get more: further values of a list, or a greater number."""
_ONLY_LISTS = ("classes", "num_clients")
_MOVED = {
    "algorithm": ("algorithms",),
    "mu": ("fedprox.mu",),
    "damping": ("fedfisher_diag.damping", "fedfisher_kfac.damping", "fedfisher_full.damping"),
    "fedlpa_damping": ("fedlpa.damping", "fedlpa_ea.damping", "fedlpa_gd.damping"),
    "fedlpa_balanced": ("fedlpa.balanced", "fedlpa_ea.balanced", "fedlpa_gd.balanced"),
    "seeds_together": (),
}
"""Current names of options of version 0.1, and of those of 0.2 that are gone."""
_MARKED = "rows_have_checksums"
"""The entry of config.json that 0.2 did not write; rows of its folders may have no checksums."""


def resume(
    asked: Any,
    default: Any,
    columns: Sequence[str] = records.ONE_SHOT,
    kind: Callable[..., Any] = records.Row,
) -> tuple[Any, list[Any]]:
    """Return the configuration of both what a folder has and what is asked for, and its rows.

    See `grown` and `records.read_rows`; damaged rows are removed from the file, and all rows if the
    configuration says that they have checksums and there are none. A folder without a row takes any
    experiment.
    """
    damage: list[str] = []
    path = asked.out / RESULTS
    rows = records.read_rows(path, columns, kind, damage.append)
    unmarked = rows and not records.has_checksums(path) and (asked.out / CONFIG).exists()
    if unmarked and _document(asked.out)[_MARKED]:
        damage = [records.damaged(path, "the checksums of its rows are gone")]
        rows = []
    asked = grown(asked, default) if rows or damage else asked
    for words in damage:
        print(words)
        records.write_rows(path, rows, columns)
    return asked, rows


def grown(asked: Any, default: Any, found: str = RESULTS) -> Any:
    """Return the configuration of both what a folder has and what is asked for.

    The default configuration of the data set gives the values of options that did not exist yet;
    `found` names the file in the folder.

    Raises:
        ValueError: If options differ that cannot grow; the message has both values of each.
    """
    out = asked.out
    if not (out / CONFIG).exists():
        raise ValueError(
            f"{out} holds a {found} without a {CONFIG}, so its options are unknown: choose "
            "another --out"
        )
    before = commands.contents(default) | _modern(_document(out)["configuration"])
    now, both = commands.contents(asked), {}
    for name in (name for name in GROWS if name in before.keys() & now.keys()):
        was, wanted = before[name], now[name]
        if isinstance(was, list) and isinstance(wanted, list):
            both[name] = was + [value for value in wanted if value not in was]
        elif name not in _ONLY_LISTS and None not in (was, wanted):
            both[name] = max(was, wanted)
    ran, run = (
        {one for name in options.get("algorithms", ()) for one in names.parts(name)}
        for options in (before, now)
    )
    # Methods that are not asked for now keep their options.
    both |= {n: before[n] for n in before if "." in n and n.rpartition(".")[0] in ran - run}

    def counts(name: str) -> bool:  # options of methods count only if the method ran
        method, dot, _ = name.rpartition(".")
        if name == "then_epochs" and not before["then_rounds"]:
            return False
        return name not in (*WHERE_AND_HOW, *both) and (not dot or method in ran)

    if differing := _differences(before, now, counts):
        raise ValueError(
            f"{out} holds results of another experiment: {'; '.join(differing)}. Choose another "
            f"--out, or delete that folder{_variants(before, now, counts)}"
        )
    larger = [n for n in both if both[n] != now.get(n) and n not in WHERE_AND_HOW]
    more = [f"{name} {commands.in_words(both[name])}" for name in larger]
    if more:
        print(f"{out} has more than is asked for; all of it is reported: {'; '.join(more)}.")
    # Methods and files that the folder has and nobody asked for now.
    choices.add(both.get("imports", ()), both.get("algorithms", ()))
    return commands.replaced(asked, both)


def _variants(before: dict, now: dict, counts: Callable[[str], bool]) -> str:
    """Advise how one folder takes a method with two values of an option."""
    changed = [n for n in now if "." in n and counts(n) and now[n] != before.get(n)]
    words = " ".join(f"{n.replace('.', '@')}={now[n]}" for n in changed)
    return f"; for both in one folder, add --algorithms {words} instead" if words else ""


def begin(config: Any, program: str, console: Console, done: str) -> None:
    """Write the configuration of a run, and print what a continued run has done already."""
    if done:
        console.print(f"Continuing {config.out}: {done}.")
        before, now = _document(config.out)["environment"], environment(config)
        for change in _differences(before, now, before.__contains__):
            console.print(f"[yellow]It was started in another environment: {change}.[/]")
    write_config(config.out, config, program, goes_on=bool(done))


def write_config(out: Path, config: Any, program: str, goes_on: bool = False) -> None:
    """Write config.json, which is needed to run an experiment again.

    A run that goes on keeps the environment in which it was started.
    """
    document = {
        "configuration": commands.contents(config),
        "command": commands.write(config, program),
        "environment": environment(config) | (_document(out)["environment"] if goes_on else {}),
        # Rows of version 0.2 are written with checksums when the next unit is done, not yet.
        _MARKED: records.has_checksums(out / RESULTS),
    }
    text = json.dumps(document | {"checksum": _checksum(document)}, indent=2)
    write_text(out / CONFIG, text + "\n")


def write_summary(config: Any, parts: Sequence[str], program: str) -> None:
    """Write summary.md: the results, the command that repeats them, and the environment."""
    environment = _document(config.out)["environment"]
    where = ", ".join(f"{name} {value}" for name, value in environment.items())
    end = ["```", commands.write(config, program), "```", "", f"Run with {where}.", ""]
    write_text(config.out / "summary.md", "\n".join([*parts, *end]))


def environment(config: Any = None) -> dict[str, Any]:
    """Return what results depend on besides options: versions, the device and imported files."""
    packages, devices = ("jax", "jaxlib", "flax", "optax", "kfac-jax", "numpy"), jax.devices()
    return {
        "python": platform.python_version(),
        "fisherjax": fj.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "backend": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        **choices.hashes(getattr(config, "imports", ())),
    }


def _document(out: Path) -> dict[str, Any]:
    """Read config.json; version 0.2 wrote it without a checksum."""
    try:
        document = json.loads((out / CONFIG).read_text())
        found = {name: dict(document[name]) for name in ("configuration", "environment")}
        found[_MARKED] = document.get(_MARKED, False)
        if not document.keys() <= {*found, "command", "checksum"}:
            raise ValueError("it has other parts")
        if "checksum" in document and document.pop("checksum") != _checksum(document):
            raise ValueError("its checksum is another")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{out / CONFIG} is not a configuration that was written here ({error!r}): delete that "
            "folder, or choose another --out"
        ) from error
    return found


def _checksum(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def _modern(configuration: dict[str, Any]) -> dict[str, Any]:
    """Rename options of earlier versions; a method's option is kept if it is no default."""
    found = {old: value for old, value in configuration.items() if old not in _MOVED}
    if "fisher_kind" in configuration:
        found.setdefault("max_examples", 0)  # earlier versions took all examples
    for old in configuration.keys() & _MOVED.keys():
        value, names, default = configuration[old], _MOVED[old], "default"
        if old == "damping" and "cohort" in configuration:
            # Experiments in rounds had only K-FAC's damping, with the library's default of 1.
            names, default = ("fedfisher_kfac.damping",), 1
        for name in names:
            method, _, option = name.rpartition(".")
            if not method or value not in (default, fj.algorithms.options(method)[option]):
                found[name] = value
    if found.get("partition") == "fedfisher":
        found["partition"] = "dirichlet_of_client"
    return found


def _differences(
    before: dict[str, Any], now: dict[str, Any], counts: Callable[[str], Any] = bool
) -> list[str]:
    return [
        f"{name} was {before.get(name, 'the default')}, is {now.get(name, 'the default')}"
        for name in sorted(filter(counts, before.keys() | now.keys()))
        if before.get(name) != now.get(name)
    ]
