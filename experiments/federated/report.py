"""What a federated experiment found: a table, curves, and the barrier round by round."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich import box
from rich.table import Table

from experiments.federated.config import Config, command, rounds
from experiments.federated.runs import FRACTIONS, Row
from experiments.figures import canvas, save
from experiments.records import write_text
from experiments.report import size

COLOURS = ("#0b5fa5", "#c4501b", "#2a7f3f", "#7a3fa0", "#8a6d1a", "#222222")


class Line(NamedTuple):
    """One algorithm with so many local epochs, over seeds; percent, losses in nats.

    Attributes:
        algorithm: how updates were merged.
        local_epochs: of a round.
        server_learning_rate: that was used.
        test: final accuracy on the test data.
        perplexity: there, exp of the mean loss of a prediction.
        personal: by fraction, accuracy on held-out clients.
        barrier: in loss, the mean over the rounds measured.
        down: bytes that a client receives in a round.
        up: bytes that it sends.
        diverged: clients that were left out.
    """

    algorithm: str
    local_epochs: int
    server_learning_rate: float
    test: tuple[float, ...]
    perplexity: tuple[float, ...]
    personal: dict[float, tuple[float, ...]]
    barrier: tuple[float, ...]
    down: float
    up: float
    diverged: int


def lines(config: Config, rows: Sequence[Row]) -> list[Line]:
    """Gather the final numbers of the runs that count.

    Args:
        config: the experiment.
        rows: of the chosen server learning rates only.

    Returns:
        A line for each algorithm and number of local epochs that has runs.
    """
    found = []
    for epochs in config.local_epochs:
        for algorithm in config.algorithm:
            own = [r for r in rows if (r.algorithm, r.local_epochs) == (algorithm, epochs)]
            if not own:
                continue
            last = [row for row in own if row.round == rounds(config, epochs)]
            personal = {f: _percent(last, "held_out", f) for f in FRACTIONS}
            barrier = [
                statistics.fmean(_values(own, "cohort", "barrier_loss", seed=seed))
                for seed in sorted({row.seed for row in own})
                if _values(own, "cohort", "barrier_loss", seed=seed)
            ]
            (down,), (up,) = ({*_values(last, "traffic", way)} for way in ("down", "up"))
            found.append(
                Line(
                    algorithm=algorithm,
                    local_epochs=epochs,
                    server_learning_rate=own[0].server_learning_rate,
                    test=_percent(last, "test"),
                    perplexity=tuple(math.exp(loss) for loss in _values(last, "test", "loss")),
                    personal=personal,
                    barrier=tuple(barrier),
                    down=down,
                    up=up,
                    diverged=round(sum(_values(own, "cohort", "diverged"))),
                )
            )
    return found


def columns(config: Config, found: Sequence[Line]) -> dict[str, list[str]]:
    """Write lines as text, column by column.

    Args:
        config: the experiment.
        found: what `lines` returned.

    Returns:
        By heading, a cell for each line. Text has a perplexity.
    """
    written = {
        "local epochs": [str(line.local_epochs) for line in found],
        "algorithm": [line.algorithm for line in found],
        "server rate": [f"{line.server_learning_rate:g}" for line in found],
        "test": [_spread(line.test) for line in found],
    }
    if _is_text(config):
        written["perplexity"] = [_spread(line.perplexity, digits=2) for line in found]
    for fraction in FRACTIONS:
        heading = f"{100 * fraction:g} % tuned" if fraction else "held out"
        written[heading] = [_spread(line.personal[fraction]) for line in found]
    return written | {
        "barrier": [_spread(line.barrier, digits=3) for line in found],
        "down": [size(line.down) for line in found],
        "up": [size(line.up) for line in found],
        "diverged": [str(line.diverged) for line in found],
    }


def table(config: Config, found: Sequence[Line], title: str) -> Table:
    """Lay the lines out for a terminal."""
    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    written = columns(config, found)
    for heading in written:
        justify = "left" if heading == "algorithm" else "right"
        shown.add_column(heading, justify=justify, no_wrap=True)
    for row in zip(*written.values(), strict=True):
        shown.add_row(*row)
    return shown


def footnote(config: Config) -> str:
    """Say what the columns are."""
    what, perplexity = "Accuracy", ""
    if _is_text(config):
        what = "Next-character accuracy"
        perplexity = " Perplexity is exp of the test loss of a character."
    number = len(config.seeds)
    runs = "one seed" if number == 1 else f"mean ± standard deviation over {number} seeds"
    return (
        f"{what} in %, {runs}, of the last model: on the test data, then the mean over held-out "
        "clients of the model as it is and fine-tuned on 25 or 50 % of their data, always on the "
        "other half. The barrier is in loss, the mean over the rounds measured."
        f"{perplexity} Down and up are a client's bytes in a round. Diverged clients are counted "
        "over all rounds."
    )


def summary(config: Config, found: Sequence[Line], title: str) -> str:
    """Write the results in Markdown.

    Args:
        config: the experiment.
        found: what `lines` returned.
        title: of the document.

    Returns:
        The text.
    """
    written = columns(config, found)
    body = [f"| {' | '.join(row)} |" for row in zip(*written.values(), strict=True)]
    return "\n".join(
        [
            f"# {title}",
            "",
            f"| {' | '.join(written)} |",
            "| ---: | --- |" + " ---: |" * (len(written) - 2),
            *body,
            "",
            footnote(config),
            "",
            "![accuracy](curves.png)",
            *(["", "![barrier](barrier.png)"] if config.barrier else []),
            "",
            f"    {command(config)}",
            "",
        ]
    )


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows; the file changes as a whole or not at all."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)  # None becomes an empty cell
    write_text(path, text.getvalue())


def figure(
    config: Config, rows: Sequence[Row], split: str, metric: str, label: str, path: Path
) -> None:
    """Draw a metric over local epochs, one panel for each number of them, with all seeds.

    Args:
        config: the experiment.
        rows: of the chosen server learning rates only.
        split: of the rows to draw.
        metric: of the rows to draw.
        label: of the vertical axis.
        path: of the PNG file.
    """
    number = len(config.local_epochs)
    drawn, axes = canvas(1.2 + 3.4 * number, 3.6, columns=number)
    for place, (panel, epochs) in enumerate(
        zip(np.atleast_1d(axes), config.local_epochs, strict=True)
    ):
        for colour, algorithm in zip(_colours(config), config.algorithm, strict=True):
            series = _series(rows, algorithm, epochs, split, metric)
            if not series:
                continue
            x = [epochs * round_ for round_ in series]
            values = list(series.values())
            panel.plot(x, [statistics.fmean(own) for own in values], color=colour, label=algorithm)
            low, high = [min(own) for own in values], [max(own) for own in values]
            panel.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        plural = "" if epochs == 1 else "s"
        panel.set_title(f"{epochs} local epoch{plural} a round", fontsize="medium", loc="left")
        panel.set_xlabel("local epochs in all")
        panel.grid(color="#dddddd", linewidth=0.8)
        if place == 0:
            panel.set_ylabel(label)
            panel.legend(frameon=False)
    save(drawn, path)


def _is_text(config: Config) -> bool:
    return config.dataset == "tiny_shakespeare"


def _colours(config: Config) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(config.algorithm))]


def _series(
    rows: Sequence[Row], algorithm: str, epochs: int, split: str, metric: str
) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        if row[:2] == (algorithm, epochs) and (row.split, row.metric) == (split, metric):
            found.setdefault(row.round, []).append(row.value)
    return dict(sorted(found.items()))


def _values(
    rows: Sequence[Row],
    split: str,
    metric: str,
    fraction: float | None = None,
    seed: int | None = None,
) -> list[float]:
    return [
        row.value
        for row in rows
        if (row.split, row.metric, row.fraction) == (split, metric, fraction)
        and seed in (None, row.seed)
    ]


def _percent(rows: Sequence[Row], split: str, fraction: float | None = None) -> tuple[float, ...]:
    return tuple(100 * value for value in _values(rows, split, "accuracy", fraction))


def _spread(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
