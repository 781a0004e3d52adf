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

from experiments.harness import commands, config, figures, folders, limits, records, studies, tables
from experiments.secure.runs import MEAN, OPEN, SKETCHED, Config, Measurement, measured

PROGRAM = "experiments.secure"
_COLOURS = ("#0b4f8a", "#d98200", "#4d7a1f", "#1a1a1a")


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
    heading = f"{config.title(asked.data)}: merged from sums alone"
    _draw(asked, found, heading)
    shown = [tables.Table(heading, headings, lines)]
    studies.report(asked, PROGRAM, shown, {"secure.png": "accuracy over terms"}, console)


def _draw(asked: Config, found: Sequence[Measurement], heading: str) -> None:
    drawn, panel = figures.canvas(4.4, 3.4, grid="both")
    for damping, colour in zip(asked.dampings, _COLOURS, strict=False):
        own = [one for one in found if one.damping == damping]
        percent = tables.gathered((one.way, 100 * one.accuracy) for one in own)
        look = {"color": colour, "label": f"damping {damping:g}"}
        panel.plot(asked.terms, percent[SKETCHED], "o-", **look)
        panel.axhline(*percent[OPEN], color=colour, linewidth=0.8, linestyle=":")
        panel.plot([1], percent[MEAN], "x", color=colour)
    panel.set(xlabel="terms", ylabel="test accuracy, %", xticks=asked.terms)
    drawn.suptitle(f"{heading}\n(dotted: openly; cross: mean factors)", fontsize="small")
    figures.save_with_legend(drawn, asked.out / "secure.png")


if __name__ == "__main__":
    raise SystemExit(main())
