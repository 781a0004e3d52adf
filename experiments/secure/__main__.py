"""Merge K-FAC clients by sums alone: what sketches of so many terms give, and what they cost.

    python -m experiments.secure --partition-seed 3 --out runs/secure_digits
    python -m experiments.secure --dataset mnist --reference ../shared/reference/FILE.npz

Clients are trained once, or read from a file, and their Fisher information is computed once; then
it is merged openly, from sketches of so many terms, from the mean of the factors (the expectation
approximation of FedLPA), and under masks. results.csv: each merge, its distance from the open one,
and what a client sends; secure.png: accuracy over terms; summary.md: the table.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from experiments.harness import commands, config, figures, records, tables
from experiments.secure.runs import MEAN, OPEN, SKETCHED, Config, Point, measured

PROGRAM = "experiments.secure"
_COLOURS = ("#0b4f8a", "#d98200", "#4d7a1f", "#1a1a1a")


@commands.command(PROGRAM, continues=False)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, Config.usual)
    commands.check_list(asked, "terms", "dampings")
    for option, least in (("terms", 1), ("epochs", 1)):
        commands.check(asked, option, f"{least} or more", lambda number, m=least: number >= m)
    commands.check(asked, "dampings", "more than zero", lambda number: number > 0)
    with records.folder(asked.out):
        points = list(measured(asked, console))
        records.write_config(asked.out, asked, PROGRAM)
        lines = [(w, k, d, f"{a:.6f}", f"{e:.3g}", f"{s:.4f}") for w, k, d, a, e, s in points]
        text = tables.csv_text(Point._fields, lines)
        records.write_text(asked.out / records.RESULTS, text)
        _report(asked, points, console)


def _report(asked: Config, points: Sequence[Point], console: Console) -> None:
    headings = ("way", "terms", "damping", "accuracy, %", "difference", "sent / model")
    lines = [
        (
            p.way,
            str(p.terms or "-"),
            f"{p.damping:g}",
            f"{100 * p.accuracy:.1f}",
            f"{p.difference:.1e}",
            f"{p.sent:.1f}",
        )
        for p in points
    ]
    heading = f"{config.title(asked.data)}: merged from sums alone"
    shown = tables.Table(heading, headings, lines, text=1)
    console.print(tables.terminal(shown))
    drawn, [[panel]] = figures.canvas(4.4, 3.4, squeeze=False)
    for damping, colour in zip(asked.dampings, _COLOURS, strict=False):
        own = [p for p in points if p.damping == damping]
        sketched = [p for p in own if p.way == SKETCHED]
        told = {"color": colour, "label": f"damping {damping:g}"}
        panel.plot([p.terms for p in sketched], [100 * p.accuracy for p in sketched], "o-", **told)
        (whole,) = [100 * p.accuracy for p in own if p.way == OPEN]
        panel.axhline(whole, color=colour, linewidth=0.8, linestyle=":")
        (mean,) = [100 * p.accuracy for p in own if p.way == MEAN]
        panel.plot([1], [mean], "x", color=colour)
    panel.set(xlabel="terms", ylabel="test accuracy, %", xticks=asked.terms)
    panel.grid(color=figures.GRID, linewidth=0.8)
    drawn.suptitle(f"{heading}\n(dotted: openly; cross: mean factors)", fontsize="small")
    figures.legend(drawn, [panel])
    figures.save(drawn, asked.out / "secure.png")
    parts = [tables.markdown(shown), "![accuracy over terms](secure.png)", ""]
    parts += ["```", commands.write(asked, PROGRAM), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))


if __name__ == "__main__":
    sys.exit(main())
