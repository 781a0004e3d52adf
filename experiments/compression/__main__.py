"""Measure what a merge loses where clients send less: accuracy over bytes.

    python -m experiments.compression --dataset mnist --epochs 10 --out runs/compression
    python -m experiments.compression --dataset mnist --reference ../shared/reference/FILE.npz

Clients are trained once, or read from a file. What each method's clients send is compressed in
several ways, to several sizes, and merged. results.csv: bytes of a client, and accuracies;
compression.png: accuracy over bytes; summary.md: the tables. An interrupted run continues when the
same command is given again.
"""

import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from experiments.compression import runs
from experiments.compression.runs import Config, Point
from experiments.harness import commands, config, figures, measurements, records, tables

PROGRAM = "experiments.compression"


@commands.command(PROGRAM)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, Config.usual)
    _check(asked)
    with records.folder(asked.out):
        default, units = Config.usual(asked.data.dataset), runs.units(asked)
        measured = partial(runs.measured, asked, console)
        found = measurements.continued(asked, PROGRAM, default, Point, units, measured)
        _report(asked, found, console)


def _check(asked: Config) -> None:
    commands.check_list(asked, "algorithms", "codecs", "sizes")
    for name in asked.algorithms:
        commands.check_name("algorithms", name, Config().algorithms)
    for name in asked.codecs:
        commands.check_name("codecs", name, Config().codecs)
    for option in ("sizes", "trust"):
        commands.check(asked, option, "more than 0", lambda number: number > 0)
    for option, least in (("max_examples", 0), ("epochs", 1)):
        commands.check(asked, option, f"{least} or more", lambda number, m=least: number >= m)


def _report(asked: Config, measured: Sequence[Point], console: Console) -> None:
    lines = [
        (
            figures.label(point.algorithm),
            point.codec,
            tables.size(point.bytes),
            f"{point.bytes / point.fedavg:.2f}",
            f"{100 * point.accuracy:.1f}",
        )
        for point in measured
    ]
    heading = f"{config.title(asked.data)}: accuracy over the bytes of an update"
    headings = ("algorithm", "codec", "bytes", "of FedAvg's", "accuracy %")
    shown = tables.Table(heading, headings, lines, text=2)
    console.print(tables.terminal(shown))
    _draw_figure(asked, measured, heading)
    parts = [tables.markdown(shown), "![accuracy over bytes](compression.png)", ""]
    parts += ["```", commands.write(asked, PROGRAM), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))
    console.print(f"In {asked.out}/: config.json, results.csv, compression.png, summary.md")


def _draw_figure(asked: Config, measured: Sequence[Point], heading: str) -> None:
    drawn, panel = figures.canvas(7, 4.2)
    for name in asked.algorithms:
        own = [point for point in measured if point.algorithm == name]
        look = figures.style(name)
        best = [p for p in own if p.codec == "none" or p.codec.startswith("water")]
        best.sort(key=lambda point: point.bytes)
        places = [point.bytes / point.fedavg for point in best]
        panel.plot(places, [100 * p.accuracy for p in best], markersize=4, **look)
        for kind, marker in (("even", "_"), ("paper", "x")):
            others = [p for p in own if p.codec.startswith(kind)]
            places = [p.bytes / p.fedavg for p in others]
            heights = [100 * p.accuracy for p in others]
            panel.plot(places, heights, marker, color=look["color"], alpha=0.8)
    panel.axvline(1, color=figures.GREY, linewidth=0.8)
    panel.set(xscale="log", xlabel="bytes of a client, in units of FedAvg's", ylabel="accuracy, %")
    ticks = [0.1, 0.25, 0.5, 1, 2, 4, 8]
    panel.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
    panel.minorticks_off()
    panel.grid(color=figures.GRID, linewidth=0.8)
    drawn.suptitle(f"{heading}\n(lines: water filling; _ even bits, x the paper's codec)", size=10)
    figures.legend(drawn, [panel], columns=3)
    figures.save(drawn, asked.out / "compression.png")


if __name__ == "__main__":
    sys.exit(main())
