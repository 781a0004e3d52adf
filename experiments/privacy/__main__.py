"""Measure accuracy over epsilon: private merges of clients that trained once.

    python -m experiments.privacy --out runs/private
    python -m experiments.privacy --clients 100 --model lenet --algorithms fedavg head

The more clients, the less noise each needs: with five it hides everything. Clips are the median
norms of public clients beside them. results.csv: every accuracy and its ledger, of each group the
clip and the noise's deviation; private.png: lines are means; summary.md: the tables. An interrupted
run continues when the same command is given again.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from experiments.harness import commands, config, figures, measurements, records, tables
from experiments.harness.config import Data, Training
from experiments.privacy import runs
from experiments.privacy.runs import Config, Point

PROGRAM = "experiments.privacy"
_STYLES = {
    "fedavg": ("#1a1a1a", "FedAvg"),
    "fedfisher_diag": ("#0b4f8a", "FedFisher (diagonal)"),
    "head": ("#d98200", "ridge head, initial network"),
    "fedavg+head": ("#4d7a1f", "FedAvg, then ridge head"),
}


@commands.command(PROGRAM)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, _default)
    _check(asked)
    with records.folder(asked.out):
        default, units = _default(asked.data.dataset), runs.units(asked)
        measured = partial(runs.measured, asked, console)
        found = measurements.continued(asked, PROGRAM, default, Point, units, measured)
        _report(asked, found, console)


def _default(dataset: str | None = None) -> Config:
    """Return what is run if nothing else is asked."""
    data = Data(dataset or "mnist", "mlp", partition="dirichlet_of_client", alpha=0.5)
    return Config(data, Training(learning_rate=0.05, batch_size=32))


def _check(asked: Config) -> None:
    commands.check_list(asked, "algorithms", "clients", "seeds", "noise_multipliers")
    for name in asked.algorithms:
        commands.check_name("algorithms", name, runs.METHODS)
    for option, least in (("clients", 1), ("pilots", 1), ("draws", 1), ("epochs", 1), ("seeds", 0)):
        commands.check(asked, option, f"{least} or more", lambda number, m=least: number >= m)
    for option in ("noise_multipliers", "noise_damping", "ridge"):
        commands.check(asked, option, "0 or more", lambda x: 0 <= x < math.inf)
    commands.check(asked, "delta", "above 0 and below 1", lambda delta: 0 < delta < 1)


def _report(asked: Config, measured: Sequence[Point], console: Console) -> None:
    found: dict[tuple[int, str, float], list[float]] = {}
    cost: dict[float, float] = {}
    for point in measured:
        own = found.setdefault((point.clients, point.algorithm, point.noise_multiplier), [])
        own.append(100 * point.accuracy)
        cost[point.noise_multiplier] = point.epsilon
    parts = []
    for number in asked.clients:
        title = f"{asked.data.dataset}, {asked.data.model}, {number} clients: accuracy in %"
        headings = ("algorithm", *(f"epsilon {cost[s]:.3g}" for s in asked.noise_multipliers))
        lines = [
            (
                _STYLES[name][1],
                *(tables.spread(found[number, name, s]) for s in asked.noise_multipliers),
            )
            for name in asked.algorithms
        ]
        shown = tables.Table(title, headings, lines)
        console.print(tables.terminal(shown))
        parts += [tables.markdown(shown)]
    _draw_figure(asked, found, cost)
    words = f"delta {asked.delta:g}; mean ± standard deviation over seeds and draws of the noise."
    parts += [words, "", "![accuracy over epsilon](private.png)", ""]
    parts += ["```", commands.write(asked, PROGRAM), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))
    console.print(f"In {asked.out}/: config.json, results.csv, private.png, summary.md")


def _draw_figure(asked: Config, found: dict, cost: dict[float, float]) -> None:
    numbers, noisy = asked.clients, [s for s in asked.noise_multipliers if s]
    drawn, axes = figures.canvas(3.2 * len(numbers), 3.4, len(numbers), sharey=True, squeeze=False)
    for number, panel in zip(numbers, axes[0], strict=True):
        for name in asked.algorithms:
            colour, label = _STYLES[name]
            means = [statistics.fmean(found[number, name, s]) for s in noisy]
            panel.plot([cost[s] for s in noisy], means, ".-", color=colour, label=label)
            if 0.0 in asked.noise_multipliers:
                level = statistics.fmean(found[number, name, 0.0])
                panel.axhline(level, color=colour, linewidth=0.8, linestyle=":")
        panel.set(xscale="log", title=f"{number} clients", xlabel="epsilon", ylim=(0, 100))
        panel.grid(color=figures.GRID, linewidth=0.8)
    axes[0][0].set_ylabel("test accuracy, %")
    drawn.suptitle(
        f"{config.title(asked.data).split(', ')[0]} (dotted: clips only)", fontsize="medium"
    )
    figures.legend(drawn, axes[0])
    figures.save(drawn, asked.out / "private.png")


if __name__ == "__main__":
    sys.exit(main())
