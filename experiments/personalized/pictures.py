"""Draw tables and figures of methods that train a model for each client."""

import csv
import statistics
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
    """Draw mean accuracy over rounds, and the final accuracy of every client as a dot."""
    rows = len(asked.splits)
    figure, axes = figures.canvas(11, 4.2 * rows, 2, rows, grid="x", squeeze=False)
    colours = _colours(asked)
    for split, (over, dots) in zip(asked.splits, axes, strict=True):
        groups = _by_method(found, split, asked)
        for place, (method, ones) in enumerate(groups.items()):
            whole = [one for one in ones if one.client is None]
            values = tables.gathered((one.round, 100 * one.accuracy) for one in whole)
            rounds = sorted(values)
            # Temperatures of one method share its colour; the paper's temperature is dotted.
            look = {"color": colours[method[0]], "linestyle": ":" if method[1] == 1 else "-"}
            means = [statistics.fmean(values[number]) for number in rounds]
            over.plot(rounds, means, label=label(*method), **look)
            ends = [100 * one.accuracy for one in ones if one.client is not None]
            spread = place + np.linspace(-0.25, 0.25, len(ends)) if ends else []
            dots.plot(ends, spread, ".", color=look["color"], markersize=4)
            if ends:
                dots.plot([statistics.fmean(ends)] * 2, [place - 0.4, place + 0.4], color="black")
        over.set(xlabel="round", ylabel="accuracy, %, mean over clients", title=split)
        over.grid(axis="y", color=figures.GRID, linewidth=0.8)
        dots.set_yticks(range(len(groups)), [label(*method) for method in groups])
        dots.set(xlabel="accuracy of a client, %", title="at the end: dots are clients and seeds")
        dots.invert_yaxis()
    figures.save_with_legend(figure, path, columns=3, fontsize="small")


def _colours(asked: Config) -> dict[str, str]:
    palette = ("#8a8a8a", "#1a1a1a", "#d98200", "#2b78ad", "#57b894", "#8b1e6b")
    palette += ("#c4501b", "#b89400", "#4d7a1f", "#7fc8e8")
    order = list(settings.methods())
    return {name: palette[order.index(name) % len(palette)] for name in asked.algorithms}


def draw_temperatures(found: Sequence[Measurement], path: Path) -> None:
    """Draw the accuracy on held-out training data, which chooses temperatures, over these."""
    ends = [x for x in found if x.held and x.client is None and x.round == x.rounds]
    figure, panel = figures.canvas(6, 3.6, grid="both")
    for name in dict.fromkeys(x.algorithm for x in ends):
        curve = sorted((x.temperature or 0, 100 * x.accuracy) for x in ends if x.algorithm == name)
        panel.plot(*zip(*curve, strict=True), marker="o", label=settings.methods()[name].label)
    panel.set(xscale="log", xlabel="temperature", ylabel="accuracy, %, held out")
    figures.save_with_legend(figure, path, columns=2, fontsize="small")


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
    splits = [s for s in asked.splits if any(run.startswith(f"{s}, ") for run in weights)]
    most = 1 + max(sum(run.startswith(f"{s}, ") for run in weights) for s in splits)
    figure, axes = figures.canvas(2.6 * most, 3.1 * len(splits), most, len(splits), squeeze=False)
    for split, panels in zip(splits, axes, strict=True):
        of = populations[split]
        unit = of.shares / np.linalg.norm(of.shares, axis=1, keepdims=True)
        shown = {f"{split}: classes in common": unit @ unit.T}
        shown |= {run: x for run, x in weights.items() if run.startswith(f"{split}, ")}
        for panel in panels[len(shown) :]:
            panel.set_visible(False)
        for panel, (run, matrix) in zip(panels, shown.items(), strict=False):
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
