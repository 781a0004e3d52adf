"""Tables and figures of methods that make a model for each client."""

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.harness import figures, records, tables
from experiments.personalized import settings
from experiments.personalized.runs import World
from experiments.personalized.settings import Config, Point


def label(name: str, temperature: float | None) -> str:
    """Say what a method is called, with its temperature if it has one."""
    told = settings.methods()[name].label
    return told if temperature is None else f"{told}, tau {temperature:g}"


def _methods(points: Sequence[Point], split: str, asked: Config) -> list[tuple]:
    """List what was judged, (name, temperature), in the order of the command."""
    own = {
        (p.algorithm, p.temperature)
        for p in points
        if p.split == split and not p.held and _is_main(p, asked)
    }
    order = asked.algorithms.index
    return sorted(own, key=lambda one: (order(one[0]), -(one[1] or 0)))


def _is_main(point: Point, asked: Config) -> bool:
    return (point.epochs, point.rounds) == (asked.epochs, asked.rounds)


def _values(points: Sequence[Point], split: str, one: tuple, asked: Config) -> list[Point]:
    return [
        p
        for p in points
        if (p.split, p.algorithm, p.temperature) == (split, *one)
        and not p.held
        and _is_main(p, asked)
    ]


def table(asked: Config, points: Sequence[Point], split: str, names: Sequence[str]) -> tables.Table:
    """Lay out accuracies at the end in %, mean and deviation over seeds; of few clients each."""
    each = names if len(names) <= 8 else []
    lines, means = [], []
    for one in _methods(points, split, asked):
        own = [p for p in _values(points, split, one, asked) if p.round == asked.rounds]
        found = [[100 * p.accuracy for p in own if p.client == place] for place in range(len(each))]
        whole = [100 * p.accuracy for p in own if p.client is None]
        # The worst served client matters as much as the mean.
        worst = [
            100 * min(p.accuracy for p in own if p.seed == seed and p.client is not None)
            for seed in sorted({p.seed for p in own})
        ]
        means.append(statistics.fmean(whole))
        cells = [tables.spread(values) for values in (*found, whole, worst)]
        lines.append((label(*one), *cells))
    title = f"{asked.table}, {split}: accuracy in % after {asked.rounds} rounds, own test data"
    headings = ("method", *each, "mean", "worst client")
    return tables.Table(title, headings, lines, best=int(np.argmax(means)) if means else None)


def epochs_table(asked: Config, points: Sequence[Point]) -> tables.Table:
    """Lay out federated averaging with more local epochs, over rounds: table 3."""
    own = [p for p in points if p.rounds == asked.table3_rounds and p.algorithm == "fedavg"]
    own = [p for p in own if p.epochs in asked.table3 and p.client is None and not p.held]
    rounds = sorted({p.round for p in own})
    lines = [
        (
            str(epochs),
            *(
                tables.spread([100 * p.accuracy for p in own if (p.epochs, p.round) == (epochs, r)])
                for r in rounds
            ),
        )
        for epochs in asked.table3
    ]
    title = f"{asked.table}: FedAvg with more local epochs, accuracy in % after so many rounds"
    return tables.Table(title, ("local epochs", *map(str, rounds)), lines)


def draw_accuracies(asked: Config, points: Sequence[Point], path: Path) -> None:
    """Draw accuracy over rounds, and every client's at the end as a dot."""
    rows = len(asked.splits)
    figure, axes = figures.canvas(11, 4.2 * rows, 2, rows, squeeze=False)
    colours = _colours(asked)
    for split, (over, dots) in zip(asked.splits, axes, strict=True):
        found = _methods(points, split, asked)
        for place, one in enumerate(found):
            own = _values(points, split, one, asked)
            rounds = sorted({p.round for p in own})
            mean = [
                100 * statistics.fmean(p.accuracy for p in own if p.round == r and p.client is None)
                for r in rounds
            ]
            # The same colour for one method, the paper's temperature dotted.
            look = {"color": colours[one[0]], "linestyle": ":" if one[1] == 1 else "-"}
            over.plot(rounds, mean, label=label(*one), **look)
            ends = [100 * p.accuracy for p in own if p.client is not None]
            spread = place + np.linspace(-0.25, 0.25, len(ends)) if ends else []
            dots.plot(ends, spread, ".", color=look["color"], markersize=4)
            if ends:
                dots.plot([statistics.fmean(ends)] * 2, [place - 0.4, place + 0.4], color="black")
        over.set(xlabel="round", ylabel="accuracy, %, mean over clients", title=split)
        over.grid(color=figures.GRID, linewidth=0.8)
        dots.set_yticks(range(len(found)), [label(*one) for one in found])
        dots.set(xlabel="accuracy of a client, %", title="at the end: dots are clients and seeds")
        dots.invert_yaxis()
        dots.grid(axis="x", color=figures.GRID, linewidth=0.8)
    figures.legend(figure, axes[:, 0], columns=3, fontsize="small")
    figures.save(figure, path)


def _colours(asked: Config) -> dict[str, str]:
    palette = ("#8a8a8a", "#1a1a1a", "#d98200", "#2b78ad", "#57b894", "#8b1e6b")
    palette += ("#c4501b", "#b89400", "#4d7a1f", "#7fc8e8")
    order = list(settings.methods())
    return {name: palette[order.index(name) % len(palette)] for name in asked.algorithms}


def draw_temperatures(points: Sequence[Point], path: Path) -> None:
    """Draw accuracy on training data held aside over the temperature, by which it is chosen."""
    ends = [p for p in points if p.held and p.client is None and p.round == p.rounds]
    figure, panel = figures.canvas(6, 3.6)
    for name in dict.fromkeys(p.algorithm for p in ends):
        own = sorted((p.temperature or 0, 100 * p.accuracy) for p in ends if p.algorithm == name)
        panel.plot(*zip(*own, strict=True), marker="o", label=settings.methods()[name].label)
    panel.set(xscale="log", xlabel="temperature", ylabel="accuracy, %, held aside")
    panel.grid(color=figures.GRID, linewidth=0.8)
    figures.legend(figure, [panel], columns=2, fontsize="small")
    figures.save(figure, path)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Read the weights of each run, [M, M]."""
    found: dict[str, list[list[float]]] = {}
    if path.exists():
        with open(path, newline="") as file:
            _, *lines = csv.reader(file)
        for run, _, *row in lines:
            found.setdefault(run, []).append([float(x) for x in row if x])
    return {run: np.array(rows) for run, rows in found.items()}


def keep_weights(path: Path, name: str, weights: np.ndarray) -> None:
    """Add the weights of a run to the file."""
    lines = read_weights(path) | {name: weights}
    rows = [
        (one, i, *(f"{x:.4g}" for x in row))
        for one, matrix in lines.items()
        for i, row in enumerate(matrix)
    ]
    columns = ("run", "client", *map(str, range(max(map(len, rows)) - 2)))
    records.write_text(path, tables.csv_text(columns, rows))


def draw_weights(asked: Config, worlds: dict[tuple[str, bool], World], out: Path) -> bool:
    """Draw how clients are mixed, beside how alike their classes are; say whether there is any."""
    weights = read_weights(out / "weights.csv")
    if not weights:
        return False
    splits = [s for s in asked.splits if any(run.startswith(f"{s}, ") for run in weights)]
    most = 1 + max(sum(run.startswith(f"{s}, ") for run in weights) for s in splits)
    figure, axes = figures.canvas(2.6 * most, 3.1 * len(splits), most, len(splits), squeeze=False)
    for split, panels in zip(splits, axes, strict=True):
        of = worlds[split, False]
        unit = of.shares / np.linalg.norm(of.shares, axis=1, keepdims=True)
        own = {run: x for run, x in weights.items() if run.startswith(f"{split}, ")}
        shown = {f"{split}: classes in common": unit @ unit.T} | own
        for panel in panels:
            panel.set_visible(False)
        for panel, (run, matrix) in zip(panels, shown.items(), strict=False):
            panel.set_visible(True)
            image = panel.imshow(matrix, cmap="Blues", vmin=0, vmax=matrix.max())
            title = run.removeprefix(f"{split}, ")
            for place in (", ", ": ", " (", " + "):
                title = title.replace(place, f"{place[:1].strip()}\n{place[1:].lstrip()}")
            panel.set_title(title, fontsize="x-small")
            figure.colorbar(image, ax=panel, shrink=0.7)
            if len(of.names) <= 8:
                panel.set_xticks(range(len(of.names)), of.names, rotation=45, fontsize="small")
                panel.set_yticks(range(len(of.names)), of.names, fontsize="small")
    figures.save(figure, out / "weights.png")
    return True
