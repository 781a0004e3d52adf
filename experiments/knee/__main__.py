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
from experiments.harness import commands, figures, studies, tables, titles
from experiments.harness.names import takes
from experiments.knee import runs
from experiments.knee.runs import Config, Measurement

PROGRAM = "experiments.knee"
_LOOKS = {
    "true": ("#0b4f8a", "o", "-"),
    "sampled": ("#d98200", "s", "--"),
    "empirical": ("#4d7a1f", "^", "-."),
    "-": ("#1a1a1a", "o", "-"),
    "curvature_propagation": ("#a3246b", "D", figures.LINES[-1]),
}
"""Colours, markers and lines of the kinds of Fisher information."""


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
    heading = f"{titles.title(asked.data)}: accuracy in % over examples a client"
    _draw_figure(asked, found)
    shown = [tables.Table(heading, headings, lines, text=2)]
    studies.report(asked, PROGRAM, shown, {"knee.png": "accuracy over examples"}, console)


def _draw_figure(asked: Config, found: dict) -> None:
    names, shown = asked.algorithms, [n for n in asked.counts if n]
    drawn, panels = figures.in_two_columns(len(names), 2.7, grid="both", sharey=True)
    for name, panel in zip(names, panels, strict=True):
        for kind, (colour, marker, line) in _LOOKS.items():
            values = found.get((name, kind), {})
            counts = [n for n in shown if n in values]
            means = [statistics.fmean(values[n]) for n in counts]
            look = {"color": colour, "marker": marker}
            if values:
                words = kind.replace("_", " ") if kind != "-" else None
                panel.plot(counts, means, markersize=4, linestyle=line, label=words, **look)
            for n in counts:
                dots = {"linestyle": "", "markersize": 2, "alpha": 0.6}
                panel.plot([n] * len(values[n]), values[n], **dots, **look)
            if 0 in values:
                panel.axhline(values[0][0], color=colour, linewidth=0.8, linestyle=":")
        panel.set(xscale="log", xlabel="examples a client", ylabel="test accuracy, %")
        panel.set_title(figures.label(name), fontsize="medium", loc="left")
        panel.set_xticks(shown, map(str, shown), rotation=45)
        panel.minorticks_off()
    explained = "dots are draws of examples, lines their means; dotted across: all examples"
    drawn.suptitle(f"{titles.title(asked.data)}\n{explained}", fontsize="medium")
    figures.save_with_legend(drawn, asked.out / "knee.png", title="Fisher information")


main = studies.study(PROGRAM, __doc__, runs, _check, _report)

if __name__ == "__main__":
    raise SystemExit(main())
