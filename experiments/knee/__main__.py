"""Measure how many examples of a client its Fisher information needs: accuracy over their number.

    python -m experiments.knee --dataset mnist --epochs 10 --out runs/knee_mnist
    python -m experiments.knee --dataset mnist --reference ../shared/reference/FILE.npz

Clients are trained once, or read from a file. Each method merges them with each kind of Fisher
information, computed from a given number of examples a client, which are drawn several times.
results.csv holds every accuracy and summary.md the table; in knee.png a dot is a draw and a line
is their mean. The same command continues an interrupted run.
"""

import statistics
from collections.abc import Sequence

from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, config, figures, studies, tables
from experiments.harness.names import takes
from experiments.knee import runs
from experiments.knee.runs import Config, Measurement

PROGRAM = "experiments.knee"
_COLOURS = {
    **{"true": "#0b4f8a", "sampled": "#d98200", "empirical": "#4d7a1f", "-": "#1a1a1a"},
    "curvature_propagation": "#a3246b",
}


def _check(asked: Config) -> None:
    known = [name for name, row in fj.algorithms.merges().items() if "max_examples" in takes(row)]
    commands.check_names(asked, "algorithms", known)


def _report(asked: Config, measured: Sequence[Measurement], console: Console) -> None:
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for one in measured:
        accuracies = found.setdefault((one.algorithm, one.kind), {})
        accuracies.setdefault(one.examples, []).append(100 * one.accuracy)
    lines = [
        (figures.label(name), kind, *(tables.spread(accuracies[n]) for n in asked.counts))
        for (name, kind), accuracies in found.items()
    ]
    headings = ("algorithm", "Fisher", *(str(n) if n else "all" for n in asked.counts))
    heading = f"{config.title(asked.data)}: accuracy in % over examples a client"
    _draw_figure(asked, found, heading)
    shown = [tables.Table(heading, headings, lines, text=2)]
    studies.report(asked, PROGRAM, shown, {"knee.png": "accuracy over examples"}, console)


def _draw_figure(asked: Config, found: dict, heading: str) -> None:
    names, shown = asked.algorithms, [n for n in asked.counts if n]
    how = {"grid": "both", "sharey": True, "squeeze": False}
    drawn, axes = figures.canvas(2.7 * len(names), 3.4, len(names), **how)
    for name, panel in zip(names, axes[0], strict=True):
        for kind, colour in _COLOURS.items():
            values = found.get((name, kind), {})
            counts = [n for n in shown if n in values]
            means = [statistics.fmean(values[n]) for n in counts]
            if values:
                panel.plot(counts, means, color=colour, label=kind if kind != "-" else None)
            for n in counts:
                dots = {"color": colour, "markersize": 4, "alpha": 0.5}
                panel.plot([n] * len(values[n]), values[n], ".", **dots)
            if 0 in values:
                panel.axhline(values[0][0], color=colour, linewidth=0.8, linestyle=":")
        panel.set(xscale="log", title=figures.label(name), xlabel="examples a client")
        panel.set_xticks(shown, map(str, shown), rotation=45)
        panel.minorticks_off()
    axes[0][0].set_ylabel("test accuracy, %")
    drawn.suptitle(f"{heading} (dotted: all)", fontsize="medium")
    figures.save_with_legend(drawn, asked.out / "knee.png")


main = studies.study(PROGRAM, __doc__, runs, _check, _report)

if __name__ == "__main__":
    raise SystemExit(main())
