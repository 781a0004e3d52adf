"""Draw tables and figures of methods that train a model for each client."""

import csv
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.harness import figures, records, tables
from experiments.personalized import settings
from experiments.personalized.runs import Population
from experiments.personalized.settings import Config, Measurement


def label(name: str, temperature: float | None) -> str:
    """Return the label of a method, with its temperature if it has one."""
    words = settings.methods()[name].label
    return words if temperature is None else f"{words}, tau {temperature:g}"


def _by_method(
    found: Sequence[Measurement], split: str, asked: Config
) -> dict[tuple[str, float | None], list[Measurement]]:
    """Group tests of a split by method and temperature, in the order of the command."""
    main = split, False, asked.epochs, asked.rounds
    tested = [x for x in found if (x.split, x.held, x.epochs, x.rounds) == main]
    groups = tables.gathered(((x.algorithm, x.temperature), x) for x in tested)
    order = asked.algorithms.index
    return dict(sorted(groups.items(), key=lambda own: (order(own[0][0]), -(own[0][1] or 0))))


def table(
    asked: Config, found: Sequence[Measurement], split: str, names: Sequence[str]
) -> tables.Table:
    """Return final accuracies in %, mean and deviation over seeds; of each client if few."""
    each = range(len(names) if len(names) <= 8 else 0)
    lines, means = [], []
    for method, ones in _by_method(found, split, asked).items():
        last = [x for x in ones if x.round == asked.rounds]
        whole = [100 * x.accuracy for x in last if x.client is None]
        of_clients = [[100 * x.accuracy for x in last if x.client == client] for client in each]
        worst = [
            100 * min(x.accuracy for x in last if x.seed == seed and x.client is not None)
            for seed in sorted({x.seed for x in last})
        ]
        means.append(statistics.fmean(whole))
        cells = [tables.spread(values) for values in (*of_clients, whole, worst)]
        lines.append((label(*method), *cells))
    title = f"{asked.table}, {split}: accuracy in % after {asked.rounds} rounds, own test data"
    headings = ("method", *names[: len(each)], "mean", "worst client")
    best = max(range(len(means)), key=lambda place: tables.rank(means[place]), default=None)
    return tables.Table(title, headings, lines, best=best)


def epochs_table(asked: Config, found: Sequence[Measurement]) -> tables.Table:
    """Return the accuracies of FedAvg over local epochs and rounds: table 3."""
    main = "fedavg", asked.table3_rounds, None, False
    means = [x for x in found if (x.algorithm, x.rounds, x.client, x.held) == main]
    percent = tables.gathered(((x.epochs, x.round), 100 * x.accuracy) for x in means)
    rounds = sorted({number for epochs, number in percent if epochs in asked.table3})
    lines = [
        (str(epochs), *(tables.spread(percent.get((epochs, number), [])) for number in rounds))
        for epochs in asked.table3
    ]
    title = f"{asked.table}: FedAvg with more local epochs, accuracy in % after so many rounds"
    return tables.Table(title, ("local epochs", *map(str, rounds)), lines)


def draw_accuracies(asked: Config, found: Sequence[Measurement], path: Path) -> None:
    """Draw mean accuracy over rounds, and the final accuracy of every client as a dot.

    The names beside the dots are those of the curves too.
    """
    rows = len(asked.splits)
    figure, axes = figures.canvas(8, 8 * rows, 1, 2 * rows, grid="both")
    looks = _looks(asked)
    for split, (over, dots) in zip(asked.splits, axes.reshape(rows, 2), strict=True):
        groups = _by_method(found, split, asked)
        for place, (method, ones) in enumerate(groups.items()):
            whole = [one for one in ones if one.client is None]
            values = tables.gathered((one.round, 100 * one.accuracy) for one in whole)
            rounds = sorted(values)
            # Temperatures of one method share its colour; the paper's is dotted and hollow.
            look = looks[method[0]]
            own = {"linestyle": ":", "markerfacecolor": "white"} if method[1] == 1 else {}
            means = [statistics.fmean(values[number]) for number in rounds]
            over.plot(rounds, means, markersize=5, **look, **own)
            ends = [100 * one.accuracy for one in ones if one.client is not None]
            spread = place + np.linspace(-0.25, 0.25, len(ends)) if ends else []
            dots.plot(ends, spread, markersize=4, **look, **own | {"linestyle": ""})
            if ends:
                dots.plot([statistics.fmean(ends)] * 2, [place - 0.4, place + 0.4], color="black")
        over.set(xlabel="round", ylabel="accuracy, %, mean over clients")
        over.set_title(f"{split}: accuracy over rounds", fontsize="medium", loc="left")
        names = [textwrap.fill(label(*method), 26) for method in groups]
        dots.set_yticks(range(len(groups)), names, fontsize="small")
        words = f"{split}: each client and seed at the end, and the mean (line)"
        dots.set_title(words, fontsize="medium", loc="left")
        dots.set_xlabel("accuracy of a client, %")
        dots.invert_yaxis()
    figures.save(figure, path)


def _looks(asked: Config) -> dict[str, dict[str, str]]:
    palette = ("#8a8a8a", "#1a1a1a", "#d98200", "#2b78ad", "#57b894", "#8b1e6b")
    palette += ("#c4501b", "#b89400", "#4d7a1f", "#7fc8e8")
    order = list(settings.methods())
    looks = [{"color": c, "marker": m} for c, m in zip(palette, figures.MARKERS, strict=False)]
    return {name: looks[order.index(name) % len(looks)] for name in asked.algorithms}


def draw_temperatures(found: Sequence[Measurement], path: Path) -> None:
    """Draw the accuracy on held-out training data, which chooses temperatures, over these."""
    ends = [x for x in found if x.held and x.client is None and x.round == x.rounds]
    figure, panel = figures.canvas(7.2, 3.8, grid="both")
    names = dict.fromkeys(x.algorithm for x in ends)
    for name, marker in zip(names, figures.MARKERS, strict=False):
        curve = sorted((x.temperature or 0, 100 * x.accuracy) for x in ends if x.algorithm == name)
        panel.plot(*zip(*curve, strict=True), marker=marker, label=settings.methods()[name].label)
    panel.set(xscale="log", xlabel="temperature", ylabel="accuracy, %, held out")
    figures.save_with_legend(figure, path, columns=2)


def read_weights(path: Path) -> dict[str, np.ndarray]:
    """Read the weights [M, M] of each run."""
    if not path.exists():
        return {}
    (_, *lines), number = records.read_units(path)
    if len(lines) < number:
        print(f"{path} is damaged: weights that are not as they were written are not drawn.")
    found = tables.gathered(
        (run, [float(x) for x in row if x]) for run, _, *row in csv.reader(lines)
    )
    return {run: np.array(rows) for run, rows in found.items()}


def keep_weights(path: Path, name: str, weights: np.ndarray) -> None:
    """Add the weights of a run to the file."""
    found = read_weights(path) | {name: weights}
    units = [
        [(run, i, *(f"{x:.4g}" for x in row)) for i, row in enumerate(matrix)]
        for run, matrix in found.items()
    ]
    columns = ("run", "client", *map(str, range(max(map(len, found.values())))))
    records.write_units(path, units, columns)


def draw_weights(asked: Config, populations: Mapping[str, Population], out: Path) -> bool:
    """Draw the weights of clients beside the similarity of their classes; return if any were."""
    weights = read_weights(out / "weights.csv")
    if not weights:
        return False
    shown = []
    for split in (s for s in asked.splits if any(run.startswith(f"{s}, ") for run in weights)):
        of = populations[split]
        unit = of.shares / np.linalg.norm(of.shares, axis=1, keepdims=True)
        shown.append((f"{split}, classes in common", unit @ unit.T, of.names))
        own = [(run, x, of.names) for run, x in weights.items() if run.startswith(f"{split}, ")]
        shown += own
    figure, panels = figures.in_two_columns(len(shown), 3)
    for panel, (run, matrix, names) in zip(panels, shown, strict=True):
        image = panel.imshow(matrix, cmap="Blues", vmin=0, vmax=matrix.max())
        panel.set_title(textwrap.fill(run, 40), fontsize="medium")
        figure.colorbar(image, ax=panel, shrink=0.8)
        if len(names) <= 8:
            panel.set_xticks(range(len(names)), names, rotation=45, fontsize="small")
            panel.set_yticks(range(len(names)), names, fontsize="small")
    figures.save(figure, out / "weights.png")
    return True
