"""Measure what a merge loses where clients send less: accuracy over bytes.

    python -m experiments.compression --dataset mnist --epochs 10 --out runs/compression
    python -m experiments.compression --dataset mnist --reference ../shared/reference/FILE.npz

Clients are trained once, or read from a file. The uploads of each method are compressed in several
ways, to several sizes, and merged. results.csv holds the bytes of a client and the accuracies,
compression.png shows accuracy over bytes, and summary.md holds the table. The same command
continues an interrupted run.
"""

from collections.abc import Sequence

from rich.console import Console

from experiments.compression import runs
from experiments.compression.runs import Config, Measurement
from experiments.harness import commands, figures, studies, tables, titles

PROGRAM = "experiments.compression"


def _check(asked: Config) -> None:
    for option in ("algorithms", "codecs"):
        commands.check_names(asked, option, getattr(Config(), option))


def _report(asked: Config, measured: Sequence[Measurement], console: Console) -> None:
    lines = [
        (
            *(figures.label(one.algorithm), one.codec, tables.size(one.bytes)),
            *(f"{one.bytes / one.fedavg:.2f}", f"{100 * one.accuracy:.1f}"),
        )
        for one in measured
    ]
    heading = f"{titles.title(asked.data)}: accuracy over the bytes of an update"
    headings = ("algorithm", "codec", "bytes", "of FedAvg's", "accuracy %")
    _draw_figure(asked, measured)
    shown = [tables.Table(heading, headings, lines, text=2)]
    studies.report(asked, PROGRAM, shown, {"compression.png": "accuracy over bytes"}, console)


def _draw_figure(asked: Config, measured: Sequence[Measurement]) -> None:
    drawn, panel = figures.canvas(7.2, 4.6, grid="both")
    for name in asked.algorithms:
        look = figures.style(name)
        ones = [one for one in measured if one.algorithm == name]
        best = [one for one in ones if one.codec.startswith(("none", "water"))]
        best.sort(key=lambda one: one.bytes)
        even, paper = ([x for x in ones if x.codec.startswith(kind)] for kind in ("even", "paper"))
        faint = {"color": look["color"], "alpha": 0.8, "linestyle": ""}
        for some, how in (
            (best, look | {"markersize": 5, "linestyle": figures.line_style(name)}),
            (even, faint | {"marker": look["marker"], "markersize": 5, "fillstyle": "none"}),
            (paper, faint | {"marker": "x"}),
        ):
            places = [one.bytes / one.fedavg for one in some]
            panel.plot(places, [100 * one.accuracy for one in some], **how)
    panel.axvline(1, color=figures.GREY, linewidth=0.8)
    panel.set(xscale="log", xlabel="bytes that a client sends, in units of FedAvg's")
    panel.set_ylabel("test accuracy, %")
    ticks = [0.1, 0.25, 0.5, 1, 2, 4, 8]
    panel.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    panel.minorticks_off()
    words = "lines: water filling; hollow: as many bits everywhere; x: the paper's codec"
    panel.set_title(f"{titles.title(asked.data)}\n{words}", fontsize="medium", loc="left")
    figures.save_with_legend(drawn, asked.out / "compression.png", columns=3)


main = studies.study(PROGRAM, __doc__, runs, _check, _report)

if __name__ == "__main__":
    raise SystemExit(main())
