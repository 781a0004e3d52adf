"""Merge K-FAC clients from sums alone, and measure the accuracy and the upload of sketches.

    python -m experiments.secure --partition-seed 3 --out runs/secure_digits
    python -m experiments.secure --dataset mnist --reference ../shared/reference/FILE.npz

Clients are trained once, or read from a file, and their Fisher information is computed once. Then
they are merged openly, from sketches of a number of terms, from the mean of the factors (the
expectation approximation of FedLPA), and under masks. results.csv holds each merge, its distance
from the open one, and the size of an upload; secure.png shows accuracy over terms, and summary.md
holds the table.
"""

from collections.abc import Sequence

from rich.console import Console

from experiments.harness import (
    commands,
    figures,
    folders,
    limits,
    records,
    studies,
    tables,
    titles,
)
from experiments.secure.runs import MEAN, OPEN, SKETCHED, Config, Measurement, measured

PROGRAM = "experiments.secure"
_COLOURS = ("#0b4f8a", "#d98200", "#4d7a1f", "#1a1a1a")  # of the dampings


@commands.command(PROGRAM, __doc__, Config.usual, limits.check_options, continues=False)
def main(asked: Config, console: Console) -> None:
    with records.folder(asked.out):
        # Refuse a folder of another experiment; the numbers of the same are computed again.
        folders.resume(asked, Config.usual(asked.data.dataset), Measurement._fields, Measurement)
        found = list(measured(asked, console))
        folders.write_config(asked.out, asked, PROGRAM)
        lines = [(w, k, d, f"{a:.6f}", f"{e:.3g}", f"{s:.4f}") for w, k, d, a, e, s in found]
        units = [[line] for line in lines]
        records.write_units(asked.out / records.RESULTS, units, Measurement._fields)
        _report(asked, found, console)


def _report(asked: Config, found: Sequence[Measurement], console: Console) -> None:
    headings = ("way", "terms", "damping", "accuracy, %", "difference", "sent / model")
    lines = [
        (w, str(k or "-"), f"{d:g}", f"{100 * a:.1f}", f"{e:.1e}", f"{s:.1f}")
        for w, k, d, a, e, s in found
    ]
    heading = f"{titles.title(asked.data)}: merged from sums alone"
    _draw(asked, found)
    shown = [tables.Table(heading, headings, lines)]
    studies.report(asked, PROGRAM, shown, {"secure.png": "accuracy over terms"}, console)


def _draw(asked: Config, found: Sequence[Measurement]) -> None:
    drawn, panel = figures.canvas(7.2, 3.8, grid="both")
    looks = zip(asked.dampings, _COLOURS, figures.MARKERS, figures.LINES, strict=False)
    for damping, colour, marker, line in looks:
        own = [one for one in found if one.damping == damping]
        percent = tables.gathered((one.way, 100 * one.accuracy) for one in own)
        words = f"damping {damping:g}"
        look = {"color": colour, "marker": marker, "linestyle": line}
        panel.plot(asked.terms, percent[SKETCHED], **look, label=f"sums, {words}")
        panel.axhline(*percent[OPEN], color=colour, linewidth=1, linestyle=":")
        one = {"color": colour, "linestyle": "", "markerfacecolor": "white", "marker": marker}
        panel.plot([1], percent[MEAN], **one, label=f"mean factors, {words}")
    panel.set(xlabel="terms of the sketch", ylabel="test accuracy, %", xticks=asked.terms)
    words = "merged from sums of the clients' sketches (dotted: from open uploads)"
    panel.set_title(f"{titles.title(asked.data)}\n{words}", fontsize="medium", loc="left")
    figures.save_with_legend(drawn, asked.out / "secure.png", columns=2)


if __name__ == "__main__":
    raise SystemExit(main())
