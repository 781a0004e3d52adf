"""Measure how many examples of a client its Fisher information needs: accuracy over their number.

    python -m experiments.knee --dataset mnist --epochs 10 --out runs/knee_mnist
    python -m experiments.knee --dataset mnist --reference ../shared/reference/FILE.npz

Clients are trained once, or read from a file, and merged by each method with each kind of Fisher
information of so many examples a client, drawn several times. results.csv: every accuracy;
knee.png: a dot is a draw, a line their mean; summary.md: the table. An interrupted run continues
when the same command is given again.
"""

import csv
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, config, figures, one_round, records, reference, tables
from experiments.harness import tasks as prepared
from experiments.harness.config import Data, Group, Merging, OneShot, Training
from experiments.harness.progress import bar
from fisherjax.algorithms import Algorithm, Update
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Array, Params

PROGRAM = "experiments.knee"
_COLOURS = {"true": "#0b4f8a", "sampled": "#d98200", "empirical": "#4d7a1f", "-": "#1a1a1a"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Which clients, how they are merged, and of how many of their examples."""

    data: Group[Data] = dataclasses.field(default=Data())
    training: Group[Training] = dataclasses.field(default=Training())
    epochs: int = 30
    """Passes of every client over its own data."""
    partition_seed: int = 0
    """Of the split."""
    seed: int = 0
    """Of the initial model and of training."""
    reference: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of trained clients, see `experiments.reference_clients`; otherwise they are trained."""
    algorithms: tuple[str, ...] = ("fedfisher_kfac", "fedfisher_diag", "fedlpa", "regmean")
    """Methods that take a number of examples."""
    kinds: tuple[Literal["true", "sampled", "empirical"], ...] = ("true", "sampled", "empirical")
    """Of Fisher information."""
    counts: tuple[int, ...] = (125, 250, 500, 1000, 2000, 4000)
    """Examples of a client, at most; all that it has are measured too, once."""
    draws: int = 5
    """Of the examples."""
    out: commands.Folder = Path("runs/knee")
    """Folder for the results; an unfinished run there continues."""


Unit = tuple[str, str, int]
"""Algorithm, kind and draw."""


class Point(NamedTuple):
    """One accuracy on the test data, a fraction; a line of results.csv. Of 0 examples: of all."""

    algorithm: str
    kind: str
    examples: int
    draw: int
    accuracy: float


@commands.command(PROGRAM)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, _default)
    _check(asked)
    path = asked.out / records.RESULTS
    with records.folder(asked.out):
        points = _read(path)
        if points:
            records.check_config(asked.out, asked, _default(asked.data.dataset))
        done = {(point.algorithm, point.kind, point.draw) for point in points}
        missing = [unit for unit in _units(asked) if unit not in done]
        if missing:
            records.write_config(asked.out, asked, PROGRAM)
            for found in _measured(asked, missing, console):
                points += found
                _write(path, points)
        _report(asked, points, console)


def _default(dataset: str | None = None) -> Config:
    """Return what is run if nothing else is asked: clients as those of `experiments.one_shot`."""
    usual = config.one_shot(dataset)
    return Config(usual.data, usual.training, usual.epochs, usual.partition_seeds[0])


def _check(asked: Config) -> None:
    commands.check_list(asked, "algorithms", "kinds", "counts")
    known = [name for name in fj.algorithms.TABLE if "max_examples" in fj.algorithms.options(name)]
    for name in asked.algorithms:
        commands.check_name("algorithms", name, known)
    for option in ("counts", "draws", "epochs"):
        commands.check(asked, option, "1 or more", lambda number: number >= 1)


def _units(asked: Config) -> list[Unit]:
    """List what is computed, and written, as a whole."""
    return [
        (name, kind, draw)
        for name in asked.algorithms
        for kind in (asked.kinds if "kind" in fj.algorithms.options(name) else ("-",))
        for draw in range(asked.draws)
    ]


def _measured(asked: Config, missing: Sequence[Unit], console: Console) -> Iterator[list[Point]]:
    """Train the clients, or read them, and merge them in the ways that are missing."""
    task, start, trained = _clients(asked, console)
    (federation,) = task.federations.values()
    with bar(console) as shown:
        watched = shown.add_task("", total=len(missing), speed="")
        for name, kind, draw in missing:
            shown.update(watched, description=f"{name}, {kind}, draw {draw}")
            chosen = {} if kind == "-" else {"kind": getattr(fj.fisher, kind)}
            method = fj.algorithms.make(name, task.model, **chosen)
            # The first draw goes on to all examples.
            counts = sorted(asked.counts) + ([0] if draw == 0 else [])
            found = []
            for count, sent in _growing(method, trained, federation, counts, draw):
                # Weights are of all that a client has, however many its Fisher is of.
                merged, *_ = fj.merging.merge(method, start, sent, federation.weights)
                accuracy = round(float(task.accuracy(merged, task.test)), 6)
                found.append(Point(name, kind, count, draw, accuracy))
            shown.advance(watched)
            yield found


def _growing(
    method: Algorithm, trained: Trained, federation: Federation, counts: Sequence[int], draw: int
) -> Iterator[tuple[int, Update]]:
    """Summarize more and more of the same permutation of every client's examples; 0 is all.

    Updates are means over examples: those of the examples that are new are averaged in.
    """
    sizes, rows = np.asarray(federation.sizes), np.array(federation.indices)
    random = np.random.default_rng(draw)
    for own, size in zip(rows, sizes, strict=True):
        own[:size] = random.permutation(own[:size])
    sent, seen = None, np.zeros_like(sizes)
    for number, count in enumerate(counts):
        upto = np.minimum(sizes, count or sizes.max())
        # Of the same shapes, so that nothing compiles again.
        fresh = np.stack([np.roll(own, -begin) for own, begin in zip(rows, seen, strict=True)])
        own = fj.devices.replicate((jnp.asarray(fresh), jnp.asarray(upto - seen)), federation.mesh)
        some = federation._replace(indices=own[0], sizes=own[1])
        key = jax.random.fold_in(jax.random.key(draw), number)
        new = fj.merging.summarize(method, trained, some, key=key)
        share = jnp.asarray((upto - seen) / upto)
        sent = new if sent is None else jax.tree.map(partial(_mixed, share), sent, new)
        seen = upto
        yield count, sent


def _mixed(share: Array, old: Array, new: Array) -> Array:
    return old + share.reshape(-1, *(1,) * (old.ndim - 1)) * (new - old)


def _clients(asked: Config, console: Console) -> tuple[prepared.OneRound, Params, Trained]:
    merging = Merging(asked.algorithms)
    how = {"partition_seeds": (asked.partition_seed,), "seeds": (asked.seed,), "central": False}
    whole = OneShot(asked.data, asked.training, merging, asked.epochs, **how)
    config.check_one_shot(whole)
    if asked.reference is not None:
        found = reference.load(asked.reference)
        data = fj.datasets.load(asked.data.dataset, asked.data.data_dir)
        task = prepared.split_up(prepared.shared(whole, *data), {0: found.partition})
        first = jax.tree.map(lambda leaf: leaf[0], found.params)
        return task, first, Trained(found.params)
    task = prepared.one_round(whole)
    params, key = one_round.start(task, asked.seed)
    (federation,) = task.federations.values()
    options = one_round.training_options(task, federation)
    with bar(console) as shown:
        watched = shown.add_task("training", total=asked.epochs, speed="")
        options["progress"] = lambda *_: shown.advance(watched)
        how = {"key": key, "optimizer": task.optimizer, **options}
        return task, params, fj.training.train(task.model, params, federation, **how)


def _read(path: Path) -> list[Point]:
    if not path.exists():
        return []
    with open(path, newline="") as file:
        _, *lines = csv.reader(file)
    return [Point(a, k, int(n), int(draw), float(value)) for a, k, n, draw, value in lines]


def _write(path: Path, points: Sequence[Point]) -> None:
    records.write_text(path, tables.csv_text(Point._fields, points))


def _report(asked: Config, points: Sequence[Point], console: Console) -> None:
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for point in points:
        own = found.setdefault((point.algorithm, point.kind), {})
        own.setdefault(point.examples, []).append(100 * point.accuracy)
    lines = [
        (figures.label(name), kind, *(tables.spread(own[n]) for n in (*asked.counts, 0)))
        for (name, kind), own in found.items()
    ]
    headings = ("algorithm", "Fisher", *map(str, asked.counts), "all")
    heading = f"{config.title(asked.data)}: accuracy in % over examples a client"
    shown = tables.Table(heading, headings, lines, text=2)
    console.print(tables.terminal(shown))
    _draw_figure(asked, found, heading)
    parts = [tables.markdown(shown), "![accuracy over examples](knee.png)", ""]
    parts += ["```", commands.write(asked, PROGRAM), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))
    console.print(f"In {asked.out}/: config.json, results.csv, knee.png, summary.md")


def _draw_figure(asked: Config, found: dict, heading: str) -> None:
    names = asked.algorithms
    drawn, axes = figures.canvas(2.7 * len(names), 3.4, len(names), sharey=True, squeeze=False)
    for name, panel in zip(names, axes[0], strict=True):
        for kind, colour in _COLOURS.items():
            own = found.get((name, kind), {})
            counts = [n for n in asked.counts if n in own]
            means = [statistics.fmean(own[n]) for n in counts]
            panel.plot(counts, means, color=colour, label=kind if kind != "-" else None)
            for n in counts:
                panel.plot([n] * len(own[n]), own[n], ".", color=colour, markersize=4, alpha=0.5)
            if 0 in own:
                panel.axhline(own[0][0], color=colour, linewidth=0.8, linestyle=":")
        panel.set(xscale="log", title=figures.label(name), xlabel="examples a client")
        panel.set_xticks(asked.counts, map(str, asked.counts), rotation=45)
        panel.minorticks_off()
        panel.grid(color=figures.GRID, linewidth=0.8)
    axes[0][0].set_ylabel("test accuracy, %")
    drawn.suptitle(f"{heading} (dotted: all)", fontsize="medium")
    figures.legend(drawn, axes[0])
    figures.save(drawn, asked.out / "knee.png")


if __name__ == "__main__":
    sys.exit(main())
