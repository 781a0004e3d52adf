"""Measure how many examples of a client its Fisher information needs: accuracy over their number.

    python -m experiments.knee --dataset mnist --epochs 10 --out runs/knee_mnist
    python -m experiments.knee --dataset mnist --reference ../shared/reference/FILE.npz

Clients are trained once, or read from a file, and merged by each method with each kind of Fisher
information of so many examples a client, drawn several times. results.csv: every accuracy;
knee.png: a dot is a draw, a line their mean; summary.md: the table. An interrupted run continues
when the same command is given again.
"""

import statistics
import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, config, figures, measurements, records, tables
from experiments.harness.names import takes
from experiments.knee import runs
from experiments.knee.runs import Config, Point

PROGRAM = "experiments.knee"
_COLOURS = {
    **{"true": "#0b4f8a", "sampled": "#d98200", "empirical": "#4d7a1f", "-": "#1a1a1a"},
    "curvature_propagation": "#a3246b",
}


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
    commands.check_list(asked, "algorithms", "kinds", "counts")
    known = [name for name, row in fj.algorithms.merges().items() if "max_examples" in takes(row)]
    for name in asked.algorithms:
        commands.check_name("algorithms", name, known)
    for option, least in (("counts", 0), ("draws", 1), ("epochs", 1)):
        commands.check(asked, option, f"{least} or more", lambda number, m=least: number >= m)


def _report(asked: Config, measured: Sequence[Point], console: Console) -> None:
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for point in measured:
        own = found.setdefault((point.algorithm, point.kind), {})
        own.setdefault(point.examples, []).append(100 * point.accuracy)
    lines = [
        (figures.label(name), kind, *(tables.spread(own[n]) for n in asked.counts))
        for (name, kind), own in found.items()
    ]
    headings = ("algorithm", "Fisher", *(str(n) if n else "all" for n in asked.counts))
    heading = f"{config.title(asked.data)}: accuracy in % over examples a client"
    shown = tables.Table(heading, headings, lines, text=2)
    console.print(tables.terminal(shown))
    _draw_figure(asked, found, heading)
    parts = [tables.markdown(shown), "![accuracy over examples](knee.png)", ""]
    parts += ["```", commands.write(asked, PROGRAM), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))
    console.print(f"In {asked.out}/: config.json, results.csv, knee.png, summary.md")


def _draw_figure(asked: Config, found: dict, heading: str) -> None:
    names, shown = asked.algorithms, [n for n in asked.counts if n]
    drawn, axes = figures.canvas(2.7 * len(names), 3.4, len(names), sharey=True, squeeze=False)
    for name, panel in zip(names, axes[0], strict=True):
        for kind, colour in _COLOURS.items():
            if not (own := found.get((name, kind))):
                continue
            counts = [n for n in shown if n in own]
            means = [statistics.fmean(own[n]) for n in counts]
            panel.plot(counts, means, color=colour, label=kind if kind != "-" else None)
            for n in counts:
                panel.plot([n] * len(own[n]), own[n], ".", color=colour, markersize=4, alpha=0.5)
            if 0 in own:
                panel.axhline(own[0][0], color=colour, linewidth=0.8, linestyle=":")
        panel.set(xscale="log", title=figures.label(name), xlabel="examples a client")
        panel.set_xticks(shown, map(str, shown), rotation=45)
        panel.minorticks_off()
        panel.grid(color=figures.GRID, linewidth=0.8)
    axes[0][0].set_ylabel("test accuracy, %")
    drawn.suptitle(f"{heading} (dotted: all)", fontsize="medium")
    figures.legend(drawn, axes[0])
    figures.save(drawn, asked.out / "knee.png")


if __name__ == "__main__":
    sys.exit(main())
