"""Report an experiment in one round: labels of clients, accuracies, and the rounds that follow."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from experiments.harness import commands, folders, methods, records, tables
from experiments.harness.figures import (
    INK,
    REFERENCES,
    canvas,
    label,
    save,
    save_with_legend,
    style,
)
from experiments.harness.records import Row

Curves = dict[str, list[tuple[float, ...]]]
"""Accuracies in percent by algorithm: for each round one accuracy for each unit."""

_LABELS, _WIDTH = "label_counts.csv", 110
_MOST_CLIENTS, _MOST_CLASSES = 20, 20
_PLAIN = "fedavg"  # gains are counted from it, as it sends only the model
_REFERENCES = {
    "local": "local: one client's own model",
    "ensemble": "ensemble: mean of outputs",
    "central": "central: trained on all data",
}
"""The references in figures."""


class Line(NamedTuple):
    """One algorithm of the table: accuracy in % of each unit, upload size, median seconds.

    A unit is a split, by its partition seed (None for all data), and a seed.
    """

    algorithm: str
    units: Mapping[tuple[int | None, int], float]
    upload_bytes: int | None
    seconds: float | None

    @property
    def accuracies(self) -> tuple[float, ...]:
        """The accuracy of each unit."""
        return tuple(self.units.values())

    @property
    def mean(self) -> float:
        """The mean of the accuracies."""
        return statistics.fmean(self.accuracies)


def lines(rows: Sequence[Row], algorithms: Sequence[str]) -> list[Line]:
    """Gather rows by algorithm: merges in order of their mean accuracy, then the references."""
    merged, references = [], []
    rows = [row for row in rows if row.metric == "accuracy"]
    last = exchanged(rows, algorithms)
    for name in (*algorithms, *last, *REFERENCES):
        ones = [row for row in rows if (row.algorithm, row.round) == (name, last.get(name, 1))]
        units = tables.gathered(((row.partition_seed, row.seed), row.value) for row in ones)
        if units:
            means = {unit: 100 * statistics.fmean(values) for unit, values in units.items()}
            seconds = [row.seconds for row in ones if row.seconds is not None]
            median = statistics.median(seconds) if seconds else None
            line = Line(name, means, ones[0].upload_bytes, median)
            (references if name in REFERENCES else merged).append(line)
    return sorted(merged, key=lambda line: -tables.rank(line.mean)) + references


def exchanged(rows: Iterable[Row], algorithms: Sequence[str]) -> dict[str, int]:
    """Return the exchanges without training that follow merges, with their last round."""
    last: dict[str, int] = {}
    for row in rows:
        if "+" in row.algorithm and row.algorithm not in algorithms and row.metric == "accuracy":
            last[row.algorithm] = max(last.get(row.algorithm, 1), row.round)
    return last


def table(found: Sequence[Line], heading: str) -> tables.Table:
    """Return the table of the lines, with the best merge in bold and gains over FedAvg."""
    merged = [place for place, line in enumerate(found) if line.algorithm not in REFERENCES]
    plain = next((line for line in found if line.algorithm == _PLAIN), None)
    body = []
    for line in found:
        runs, uploaded, seconds = len(line.accuracies), line.upload_bytes, line.seconds
        std = f"{tables.deviation(line.accuracies):.1f}" if runs > 1 else "-"
        upload = "-" if uploaded is None else tables.size(uploaded)
        took = "-" if seconds is None else f"{seconds:.3f}"
        cells = (line.algorithm, f"{line.mean:.1f}", std, str(runs), upload, took)
        body.append(cells if plain is None else (*cells, *_gains(line, plain)))
    headings = ("algorithm", "mean %", "std", "runs", "upload", "seconds")
    return tables.Table(
        title=heading,
        headings=headings if plain is None else (*headings, "points/MB", "points/s"),
        lines=body,
        best=max(merged, key=lambda place: tables.rank(found[place].mean), default=None),
        dim=[place for place in range(len(found)) if place not in merged],
        sections=[max(merged, default=-1)],
    )


def split_table(found: Sequence[Line]) -> tables.Table | None:
    """Return the table of splits, if there are several: median, worst run, mean of each split."""
    splits = sorted({split for line in found for split, _ in line.units if split is not None})
    if len(splits) < 2:
        return None
    body = []
    for line in found:
        own = tables.gathered((split, value) for (split, _), value in line.units.items())
        if None in own:  # all data have no split
            continue
        whole = statistics.median(line.accuracies), min(line.accuracies)
        means = [statistics.fmean(own[split]) if split in own else None for split in splits]
        cells = ["-" if value is None else f"{value:.1f}" for value in (*whole, *means)]
        body.append((line.algorithm, *cells))
    headings = ("partition seed", "median", "worst", *map(str, splits))
    return tables.Table(
        "Accuracy in %: median and worst run, and the mean of each split", headings, body
    )


def _gains(line: Line, plain: Line) -> tuple[str, str]:
    """Return the gain over FedAvg in points for each additional MB and for each second."""
    if line.algorithm in (_PLAIN, *REFERENCES):
        return "-", "-"
    gain, more = line.mean - plain.mean, None
    if line.upload_bytes is not None and plain.upload_bytes is not None:
        more = (line.upload_bytes - plain.upload_bytes) / 1e6
    return tables.quotient(gain, more), tables.quotient(gain, line.seconds)


def curves(rows: Sequence[Row], algorithms: Sequence[str]) -> Curves:
    """Gather accuracies by algorithm and round, of algorithms with more than one round.

    Exchanges without training are separate curves, which start at the same first round.
    """
    found: Curves = {}
    for name in (*algorithms, *(f"{merge}+natural_gradient" for merge in algorithms)):
        merge = name.removesuffix("+natural_gradient")
        own = [x for x in rows if x.algorithm == name or (x.algorithm, x.round) == (merge, 1)]
        own = [x for x in own if x.metric == "accuracy"]
        rounds = tables.gathered((x.round, 100 * x.value) for x in own)
        if len(rounds) > 1:
            found[name] = [tuple(rounds[number]) for number in sorted(rounds)]
    return found


def curve_table(found: Curves) -> tables.Table:
    """Return the table of mean accuracies in percent; a dash marks rounds after the last."""
    longest = max(map(len, found.values()))
    lines = []
    for name, rounds in found.items():
        means = [f"{statistics.fmean(values):.1f}" for values in rounds]
        lines.append((name, *means, *["-"] * (longest - len(means))))
    headings = ("first round", *map(str, range(1, longest + 1)))
    return tables.Table("Mean accuracy in % after each round", headings, lines)


def report(asked: Any, heading: str, rows: Sequence[Row], program: str, console: Console) -> None:
    """Print the results of a run, and write summary.md and the figures into its folder."""
    out, names = asked.out, asked.merging.algorithms
    found, later = lines(rows, names), curves(rows, names)
    shown = table(found, heading)
    # The table may be wider than the terminal, where its lines then break.
    wide = Console(file=console.file, highlight=False, width=max(console.width, _WIDTH))
    wide.print(tables.terminal(shown))
    note = footnote(names)
    console.print(note, style="dim")
    figure(found, heading, out / "accuracy.png")
    left = [records.CONFIG, records.RESULTS, _LABELS, "summary.md", "accuracy.png"]
    parts = [tables.markdown(shown), note, "", "![accuracy](accuracy.png)", ""]
    if (splits := split_table(found)) is not None:
        wide.print(tables.terminal(splits))
        parts += [tables.markdown(splits, 2), ""]
    if later:
        console.print(tables.terminal(curve_table(later)))
        curve_figure(later, heading, out / "rounds.png")
        left.append("rounds.png")
        picture = "![accuracy round by round](rounds.png)"
        parts += [tables.markdown(curve_table(later), 2), picture, ""]
    options = [(name, commands.in_words(x)) for name, x in commands.contents(asked).items()]
    parts += [tables.markdown(tables.Table("", ("option", "value"), options, text=2))]
    folders.write_summary(asked, parts, program)
    console.print(f"\nIn {out}/: {', '.join(left)}", soft_wrap=True)


def footnote(algorithms: Sequence[str]) -> str:
    """Return the note that explains the columns, for these algorithms."""
    training = [name for name in algorithms if methods.trains_its_own(name)]
    all_three = f"of {' and '.join(training)} of all three, " if training else ""
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in REFERENCES.items())
    gains = (
        "Gains are from fedavg's mean: points/MB for each MB that a client sends above fedavg's "
        "upload, points/s for each of the seconds. "
    )
    return (
        "Test accuracy, its mean and standard deviation over runs (partition seeds x seeds); "
        "upload of one client; seconds of the clients' summaries and the merge, of local and "
        f"central of training, {all_three}median over runs, where the first includes compilation. "
        f"{gains if _PLAIN in algorithms else ''}{meanings[0].upper()}{meanings[1:]}."
    )


def label_table(counts: np.ndarray, partition_seed: int) -> RichTable:
    """Return the table of label counts [M, C]; the client with most examples of a label is bold."""
    few = counts.shape[1] <= _MOST_CLASSES
    headings = map(str, range(counts.shape[1])) if few else ("classes", "most frequent")
    cells = _class_cells if few else _most_frequent
    body = [
        (str(client), *cells(own, counts.argmax(axis=0) == client), str(own.sum()))
        for client, own in enumerate(counts[:_MOST_CLIENTS])
    ]
    heading = f"Who owns which label, partition seed {partition_seed}"
    shown = tables.terminal(tables.Table(heading, ("client", *headings, "all"), body, text=0))
    shown.padding = (0, 1, 0, 0)  # ten classes with five digits fit into 80 columns
    left = counts[_MOST_CLIENTS:].sum(axis=1)
    if left.size:
        shown.caption = f"and {left.size} more clients, {left.min()} to {left.max()} examples each"
    return shown


def write_labels(out: Path, label_counts: dict[int, np.ndarray]) -> None:
    """Write label_counts.csv: the number of examples of each class of each client of a split."""
    num_classes = next(iter(label_counts.values())).shape[1]
    lines = (
        (seed, client, *own)
        for seed, counts in label_counts.items()
        for client, own in enumerate(counts.tolist())
    )
    text = tables.csv_text(("partition_seed", "client", *range(num_classes)), lines)
    records.write_text(out / _LABELS, text)


def figure(
    found: Sequence[Line], heading: str, path: Path, names: Mapping[str, str] | None = None
) -> None:
    """Draw a dot for each run and the mean of each algorithm; `names` replaces labels."""
    names = _REFERENCES | dict(names or {})
    # Names of exchanges that follow a merge need a wider figure.
    width = 8.4 if any("+" in line.algorithm for line in found) else 7.2
    drawn, axes = canvas(width, 0.9 + 0.42 * len(found), grid="x")
    for place, line in enumerate(found):
        colour = style(line.algorithm)["color"]
        axes.barh(place, line.mean, height=0.62, color=colour, alpha=0.25)
        axes.plot([line.mean] * 2, [place - 0.31, place + 0.31], color=colour, linewidth=2.5)
        # Dots are spread across the bar in the order of the runs.
        count = len(line.accuracies)
        heights = place + (np.linspace(-0.2, 0.2, count) if count > 1 else np.zeros(1))
        dots = {"markersize": 4, "markeredgecolor": "white", "markeredgewidth": 0.4}
        axes.plot(line.accuracies, heights, style(line.algorithm)["marker"], color=colour, **dots)
        # The mean stands in a column beside the axes, where no dot can lie.
        beside = {"transform": axes.get_yaxis_transform(), "va": "center", "color": INK}
        axes.text(1.02, place, f"{line.mean:.1f}", **beside)
    labels = [names.get(line.algorithm, label(line.algorithm)) for line in found]
    axes.set_yticks(range(len(found)), labels)
    axes.set(xlim=(0, 100), ylim=(len(found) - 0.5, -0.5))
    axes.set_xlabel("test accuracy, % (a dot is one run, the bar their mean)")
    axes.set_title(heading, fontsize="medium", loc="left")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    save(drawn, path)


def curve_figure(found: Curves, heading: str, path: Path) -> None:
    """Draw mean accuracy over runs, round by round."""
    drawn, axes = canvas(7.2, 4.6, grid="both")
    exchanged = any("+" in name for name in found)
    for name, rounds in found.items():
        means = [statistics.fmean(values) for values in rounds]
        looks = style(name) | {"markersize": 5}
        if "+" in name:
            merge = name.partition("+")[0]
            looks |= {"marker": style(merge)["marker"], "markerfacecolor": "white"}
        elif exchanged:
            looks |= {"linestyle": "--", "label": f"{label(name)}, then averaging"}
        axes.plot(range(1, len(means) + 1), means, **looks)
    axes.set_xlabel("round: the first merges, the others average, or exchange without training")
    axes.set_ylabel("test accuracy, %, mean over runs")
    axes.set_title(heading, fontsize="medium", loc="left")
    axes.xaxis.get_major_locator().set_params(integer=True)
    save_with_legend(drawn, path, columns=2 if exchanged else 4)


def _class_cells(own: np.ndarray, is_owner: np.ndarray) -> list[str]:
    marked = zip(own, is_owner, strict=True)
    return [f"[bold]{n}[/]" if owns else str(n) if n else "[dim]·[/]" for n, owns in marked]


def _most_frequent(own: np.ndarray, _: np.ndarray) -> list[str]:
    top = [f"{label}: {own[label]}" for label in np.argsort(-own)[:3] if own[label]]
    return [str(np.count_nonzero(own)), ", ".join(top)]
