"""Measure accuracy over epsilon: private merges of clients that trained once.

    python -m experiments.privacy --out runs/private
    python -m experiments.privacy --clients 100 --model lenet --algorithms fedavg head

The more clients take part, the less noise each upload needs; with five clients the noise hides
everything. Clips are the median norms of additional public clients. results.csv holds every
accuracy and its ledger: the clip of each group and the standard deviation of its noise.
private.png shows means over seeds and draws, and summary.md holds the tables. The same command
continues an interrupted run. Keys of the noise come from the operating system; with --seeded-noise
they come from the seeds, so that a run can be repeated. python -m experiments.privacy.costs
measures the time and the memory of epsilon.
"""

import statistics
from collections.abc import Sequence

from rich.console import Console

from experiments.harness import commands, figures, studies, tables
from experiments.privacy import runs
from experiments.privacy.runs import Config, Measurement

PROGRAM = "experiments.privacy"
_STYLES = {
    "fedavg": {"color": "#1a1a1a", "marker": "o", "label": "FedAvg"},
    "fedfisher_diag": {"color": "#0b4f8a", "marker": "^", "label": "FedFisher (diagonal)"},
    "head": {"color": "#d98200", "marker": "s", "label": "ridge head, initial network"},
    "fedavg+head": {"color": "#4d7a1f", "marker": "D", "label": "FedAvg, then ridge head"},
}


def _check(asked: Config) -> None:
    commands.check_names(asked, "algorithms", runs.METHODS)


def _report(asked: Config, measured: Sequence[Measurement], console: Console) -> None:
    found = tables.gathered(
        ((one.clients, one.algorithm, one.noise_multiplier), 100 * one.accuracy) for one in measured
    )
    cost = {one.noise_multiplier: one.epsilon for one in measured}
    shown, noises = [], asked.noise_multipliers
    for number in asked.clients:
        both = f"{figures.label(asked.data.dataset)}, {figures.label(asked.data.model)}"
        title = f"{both}, {number} clients: accuracy in %"
        headings = ("algorithm", *(f"epsilon {cost[noise]:.3g}" for noise in noises))
        lines = [
            (_STYLES[name]["label"], *(tables.spread(found[number, name, s]) for s in noises))
            for name in asked.algorithms
        ]
        shown.append(tables.Table(title, headings, lines))
    _draw_figure(asked, found, cost)
    words = (
        f"delta {asked.delta:g}; mean ± standard deviation over seeds and draws of the noise. "
        f"The noise comes from {runs.NOISE[asked.seeded_noise]}."
    )
    pictures = {"private.png": "accuracy over epsilon"}
    studies.report(asked, PROGRAM, shown, pictures, console, words)


def _draw_figure(asked: Config, found: dict, cost: dict[float, float]) -> None:
    numbers, noisy = asked.clients, [s for s in asked.noise_multipliers if s]
    how = {"grid": "both", "sharey": True, "squeeze": False}
    drawn, axes = figures.canvas(8, 3.6, len(numbers), **how)
    for number, panel in zip(numbers, axes[0], strict=True):
        for name in asked.algorithms:
            look = _STYLES[name]
            means = [statistics.fmean(found[number, name, s]) for s in noisy]
            panel.plot([cost[s] for s in noisy], means, markersize=4, **look)
            if 0.0 in asked.noise_multipliers:
                level = statistics.fmean(found[number, name, 0.0])
                panel.axhline(level, color=look["color"], linewidth=0.8, linestyle=":")
        panel.set(xscale="log", xlabel="epsilon", ylim=(0, 100))
        panel.set_title(f"{number} clients", fontsize="medium", loc="left")
    axes[0][0].set_ylabel("test accuracy, %")
    words = "accuracy over the privacy budget (dotted: uploads are clipped, without noise)"
    drawn.suptitle(f"{figures.label(asked.data.dataset)}: {words}", fontsize="medium")
    figures.save_with_legend(drawn, asked.out / "private.png", columns=2)


main = studies.study(PROGRAM, __doc__, runs, _check, _report)

if __name__ == "__main__":
    raise SystemExit(main())
