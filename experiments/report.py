"""What a run shows: who owns which label, the table of accuracies, the summary in Markdown."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from experiments.commands import contents
from experiments.config import Config, command, split
from experiments.methods import trains_its_own
from experiments.records import Row

MEANINGS = {
    "local": "one client's own model, mean over clients",
    "ensemble": "mean of all clients' outputs: M models, not one",
    "central": "one model trained on all the data: the ceiling",
}
_MOST_CLIENTS, _MOST_CLASSES = 20, 20


class Line(NamedTuple):
    """One algorithm of the table.

    Attributes:
        algorithm: its name.
        accuracies: in percent, one for each unit; of `local` the mean over clients.
        upload_bytes: of one client; None where nothing is sent.
        seconds: the median over units; None where nothing was timed.
    """

    algorithm: str
    accuracies: tuple[float, ...]
    upload_bytes: int | None
    seconds: float | None


def lines(rows: Sequence[Row], algorithms: Sequence[str]) -> list[Line]:
    """Gather rows by algorithm: local models, their ensemble, each way of merging, the ceiling.

    Args:
        rows: of one experiment.
        algorithms: the merged ones, in the order of the table.

    Returns:
        One line each for those that have rows.
    """
    gathered = []
    for name in ("local", "ensemble", *algorithms, "central"):
        own = [row for row in rows if row.algorithm == name and row.round == 1]
        units = dict.fromkeys((row.partition_seed, row.seed) for row in own)
        if not units:
            continue
        values = [
            100 * statistics.fmean(r.value for r in own if (r.partition_seed, r.seed) == unit)
            for unit in units
        ]
        seconds = [row.seconds for row in own if row.seconds is not None]
        median = statistics.median(seconds) if seconds else None
        gathered.append(Line(name, tuple(values), own[0].upload_bytes, median))
    return gathered


def accuracy_table(table: Sequence[Line], title: str) -> Table:
    """Lay the lines out for a terminal.

    Args:
        table: what `lines` returned.
        title: above it.

    Returns:
        A table for `rich`.
    """
    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    shown.add_column("algorithm", no_wrap=True)
    for heading in ("mean %", "std", "runs", "upload", "seconds"):
        shown.add_column(heading, justify="right", no_wrap=True)
    best = _best(table)
    for line in table:
        style = "dim" if line.algorithm in MEANINGS else "bold" if line is best else None
        shown.add_row(*_cells(line), style=style)
        if line.algorithm == "ensemble" or line is _last_merged(table):
            shown.add_section()
    return shown


def summary(rows: Sequence[Row], config: Config, environment: dict[str, object]) -> str:
    """Write the table and what it is of, in Markdown.

    Args:
        rows: of the finished experiment.
        config: the experiment.
        environment: versions and device, by name.

    Returns:
        The text of summary.md.
    """
    table = lines(rows, config.algorithms)
    best = _best(table)
    body = [
        "| " + " | ".join([f"**{c}**" for c in cells] if line is best else cells) + " |"
        for line, cells in ((line, _cells(line)) for line in table)
    ]
    setting = [f"| {key} | {_words(value)} |" for key, value in contents(config).items()]
    versions = ", ".join(f"{key} {value}" for key, value in environment.items())
    return "\n".join(
        [
            f"# {title(config)}",
            "",
            "| algorithm | mean % | std | runs | upload | seconds |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *body,
            "",
            footnote(config.algorithms),
            "",
            "![accuracy](accuracy.png)",
            "",
            "```",
            command(config),
            "```",
            "",
            "| option | value |",
            "| --- | --- |",
            *setting,
            "",
            f"Run with {versions}.",
            "",
        ]
    )


def title(config: Config) -> str:
    """Say in one line what was run."""
    partition, number = split(config)
    option = {"fedfisher": ", alpha ", "niid_bench": ", beta ", "classes_per_client": " = "}
    how = f"{partition}{option.get(partition, '')}{number}"
    return f"{config.dataset}, {config.model}, {config.num_clients} clients ({how})"


def footnote(algorithms: Sequence[str]) -> str:
    """Say what the columns hold, of these algorithms."""
    own = [name for name in algorithms if trains_its_own(name)]
    all_three = f"of {' and '.join(own)} of all three, " if own else ""
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in MEANINGS.items())
    return (
        "Test accuracy, its mean and standard deviation over runs (partition seeds x seeds); "
        "upload of one client; seconds of the clients' summaries and the merge, of local and "
        f"central of training, {all_three}median over runs, where the first includes compilation. "
        f"{meanings[0].upper()}{meanings[1:]}."
    )


def label_table(counts: np.ndarray, partition_seed: int) -> Table:
    """Show who owns which label; the largest owner of each stands out.

    Args:
        counts: examples of each client and class [M, C].
        partition_seed: for the title.

    Returns:
        A table for `rich`.
    """
    table = Table(
        title=f"Training examples of each client, partition seed {partition_seed}",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # ten classes of ten thousand fit into 80 columns
        title_justify="left",
        title_style="bold",
    )
    table.add_column("client", justify="right", no_wrap=True)
    few = counts.shape[1] <= _MOST_CLASSES
    headings = map(str, range(counts.shape[1])) if few else ("classes", "most frequent")
    for heading in (*headings, "all"):
        table.add_column(heading, justify="right", no_wrap=True)
    owners = counts.argmax(axis=0)
    for client, own in enumerate(counts[:_MOST_CLIENTS]):
        cells = _class_cells(own, owners == client) if few else _many_classes(own)
        table.add_row(str(client), *cells, str(own.sum()))
    left = counts[_MOST_CLIENTS:].sum(axis=1)
    if left.size:
        table.caption = f"and {left.size} more clients, {left.min()} to {left.max()} examples each"
    return table


def _class_cells(own: np.ndarray, is_owner: np.ndarray) -> list[str]:
    marked = zip(own, is_owner, strict=True)
    return [f"[bold]{n}[/]" if owns else str(n) if n else "[dim]·[/]" for n, owns in marked]


def _many_classes(own: np.ndarray) -> list[str]:
    top = [f"{label}: {own[label]}" for label in np.argsort(-own)[:3] if own[label]]
    return [str(np.count_nonzero(own)), ", ".join(top)]


def _cells(line: Line) -> list[str]:
    deviation = statistics.stdev(line.accuracies) if len(line.accuracies) > 1 else None
    return [
        line.algorithm,
        f"{statistics.fmean(line.accuracies):.1f}",
        "-" if deviation is None else f"{deviation:.1f}",
        str(len(line.accuracies)),
        "-" if line.upload_bytes is None else size(line.upload_bytes),
        "-" if line.seconds is None else f"{line.seconds:.3f}",
    ]


def _best(table: Sequence[Line]) -> Line | None:
    merged = [line for line in table if line.algorithm not in MEANINGS]
    return max(merged, key=lambda line: statistics.fmean(line.accuracies), default=None)


def _last_merged(table: Sequence[Line]) -> Line | None:
    merged = [line for line in table if line.algorithm not in MEANINGS]
    return merged[-1] if merged else None


def size(count: float) -> str:
    """Write a number of bytes.

    Example:
        >>> size(35328)
        '35.3 kB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _words(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
