"""Report a run on Flower: a table of its rounds and a figure."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich.console import Console

from experiments.harness import figures, folders, records, tables

ROUNDS, MODEL = "server/rounds.jsonl", "server/model.safetensors"
SECONDS = ("start", "import", "compile", "work", "transfer", "aggregate")
"""Where the seconds of a round go, in the order in which they pass."""
_FIELDS = ("start", "imports", "compile", "work", "transfer", "aggregate")  # of a row
_EXPLAINED = (
    "Accuracy is on the server's test images. Down and up are the bytes of a client's arrays; of "
    "seconds, aggregate is the server's, and the others are means over clients: start is Python, "
    "Flower and the app's download, transfer the rest of the time between the server's message and "
    "the reply, in which both sides wait for each other in intervals of up to 3 seconds."
)


class Round(NamedTuple):
    """One round; a line of results.csv."""

    round: int  # from 1
    clients: int  # whose uploads were merged
    left_out: int
    accuracy: float
    test_loss: float  # nats
    loss: float  # mean training loss of the clients in nats
    down: float  # bytes of a client's arrays
    up: float
    start: float  # seconds, means over clients
    imports: float
    compile: float
    work: float
    transfer: float
    aggregate: float  # seconds of the server
    seconds: float  # of the round

    @property
    def unit(self) -> int:
        """What was computed at once: a round."""
        return self.round


def row_of(saved: Mapping[str, Any]) -> Round:
    """Return the row of what the server saved of a round."""
    renamed = {"round": saved["round"] + 1, "left_out": len(saved["left_out"])}
    found = {**saved, **renamed, "imports": saved.get("import", math.nan)}
    return Round(**{name: found.get(name, math.nan) for name in Round._fields})


def report(asked: Any, rows: Sequence[Round], program: str, console: Console) -> None:
    """Print the rounds, and write results.csv, summary.md and the figure."""
    records.write_rows(asked.out / records.RESULTS, rows, Round._fields)
    shown = table(asked, rows)
    console.print(tables.terminal(shown))
    console.print(_EXPLAINED, style="dim")
    _draw(asked, rows)
    parts = [tables.markdown(shown), _EXPLAINED, "", "![accuracy](accuracy.png)", ""]
    folders.write_summary(asked, parts, program)
    files = [records.CONFIG, records.RESULTS, "summary.md", "accuracy.png", MODEL]
    console.print(f"\nIn {asked.out}/: {', '.join(files)}", soft_wrap=True)


def table(asked: Any, rows: Sequence[Round]) -> tables.Table:
    """Return the table of the rounds, and of their means."""
    headings = ("round", "clients", "left out", "test %", "loss", "down", "up", *SECONDS, "seconds")
    title = f"{figures.label(asked.method)} on Flower: {asked.dataset}, {asked.model}"
    lines = [_line(str(row.round), row) for row in rows]
    return tables.Table(f"{title}, {asked.num_clients} clients", headings, lines)


def _line(name: str, row: Round) -> tuple[str, ...]:
    loss = "-" if math.isnan(row.loss) else f"{row.loss:.3f}"
    return (
        *(name, str(row.clients), str(row.left_out), f"{100 * row.accuracy:.1f}", loss),
        *(tables.size(row.down), tables.size(row.up)),
        *(f"{getattr(row, x):.2f}" for x in (*_FIELDS, "seconds")),
    )


def _draw(asked: Any, rows: Sequence[Round]) -> None:
    """Draw the accuracy of each round, and where its seconds went."""
    drawn, (left, right) = figures.canvas(7.2, 3.2, columns=2, grid="y")
    rounds = [row.round for row in rows]
    looks = figures.style(asked.method)
    left.plot(rounds, [100 * row.accuracy for row in rows], **looks)
    ticks = rounds[:: max(1, len(rounds) // 10)]
    left.set(xlabel="round", ylabel="test accuracy, %", xticks=ticks)
    means = [fmean(getattr(row, name) for row in rows) for name in _FIELDS]
    right.barh(SECONDS, means, color=looks["color"])
    right.invert_yaxis()
    right.set(xlabel="seconds of a round, mean")
    figures.save(drawn, asked.out / "accuracy.png")
