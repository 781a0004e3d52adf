"""Compare orders of local training, merges and exchanges at equal seconds and at equal bytes.

    python -m experiments.orders --dataset digits --out runs/orders
    python -m experiments.orders --orders "10 fedfisher_kfac analytic_head" "1 fedavg x10"

An order is a line of steps: a number of local epochs, the merge behind them, and exchanges without
training, of which 4*natural_gradient is four; x3 at its end is for three times all of it. All
clients take part in every step. results.csv has a row for each step, summary.md the accuracy that
an order reached within some seconds and bytes, and orders.png the curves. Seconds of a step are its
median over all runs; a step of each kind runs once before, so that compiling does not count. The
same command continues an interrupted run.
"""

import itertools
import statistics
from collections.abc import Callable, Sequence

from rich.console import Console

from experiments.harness import figures, limits, studies, tables, titles
from experiments.orders import runs
from experiments.orders.runs import TRAIN, Config, Measurement

PROGRAM = "experiments.orders"
_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)
"""Shares of the dearest order's cost, at which orders are compared."""

Curve = list[tuple[float, float]]
"""Cost so far and mean accuracy in %, behind each step."""


def _check(asked: Config) -> None:
    for order in asked.orders:
        runs.plan(order)
    limits.check_one_shot(runs.one_shot(asked))


def _report(asked: Config, measured: Sequence[Measurement], console: Console) -> None:
    each = _seconds(measured)
    costs: dict[str, Callable[[Measurement], float]] = {
        "seconds of the clients": lambda one: each[one.step] * max(one.epochs, 1),
        "MB sent by a client": lambda one: one.bytes / 1e6,
    }
    curves = {what: _curves(asked, measured, cost) for what, cost in costs.items()}
    shown = [_ends(asked, measured, curves)]
    shown += [_within(what, own) for what, own in curves.items()]
    taken = [(step, f"{seconds:.3g}") for step, seconds in each.items()]
    shown.append(tables.Table("seconds of a step", ("step", "seconds"), taken))
    _draw(asked, curves)
    words = (
        "Accuracy on the test data in %, mean over splits and seeds. Seconds are of all clients "
        "together and of the server, for training those of an epoch, medians over all runs."
    )
    pictures, title = {"orders.png": "accuracy over costs"}, titles.title(asked.data)
    studies.report(asked, PROGRAM, shown, pictures, console, words, title)


def _seconds(measured: Sequence[Measurement]) -> dict[str, float]:
    """Return the median seconds of each step, of training those of an epoch."""
    pairs = ((one.step, one.seconds / max(one.epochs, 1)) for one in measured)
    return {step: statistics.median(own) for step, own in tables.gathered(pairs).items()}


def _curves(
    asked: Config, measured: Sequence[Measurement], cost: Callable[[Measurement], float]
) -> dict[str, Curve]:
    found = {}
    for order in asked.orders:
        pairs = ((one.number, one) for one in measured if one.order == order)
        same = [*tables.gathered(pairs).values()]
        costs = itertools.accumulate(cost(ones[0]) for ones in same)
        means = (100 * statistics.fmean(one.accuracy for one in ones) for ones in same)
        found[order] = [
            point
            for (step, _), point in zip(
                runs.plan(order), zip(costs, means, strict=True), strict=True
            )
            if step != TRAIN
        ]
    return found


def _ends(
    asked: Config, measured: Sequence[Measurement], curves: dict[str, dict[str, Curve]]
) -> tables.Table:
    lines = []
    for order in asked.orders:
        last = len(runs.plan(order))
        found = [100 * x.accuracy for x in measured if (x.order, x.number) == (order, last)]
        epochs = sum(epochs for _, epochs in runs.plan(order))
        costs = (f"{own[order][-1][0]:.3g}" for own in curves.values())
        lines.append((order, tables.spread(found), str(epochs), *costs))
    return tables.Table("whole orders", ("order", "accuracy", "epochs", *curves), lines)


def _within(what: str, curves: dict[str, Curve]) -> tables.Table:
    """Return the accuracy that each order has reached within shares of the dearest order's cost."""
    most = max(curve[-1][0] for curve in curves.values())
    lines = []
    for order, curve in curves.items():
        reached = (
            [mean for cost, mean in curve if cost <= share * most * (1 + 1e-9)] for share in _SHARES
        )
        lines.append((order, *(f"{means[-1]:.1f}" if means else "-" for means in reached)))
    headings = (f"{share * most:.3g}" for share in _SHARES)
    return tables.Table(f"accuracy within {what}", ("order", *headings), lines)


def _draw(asked: Config, curves: dict[str, dict[str, Curve]]) -> None:
    drawn, panels = figures.in_two_columns(len(curves), 4.0, grid="both", sharey=True)
    for (what, own), panel in zip(curves.items(), panels, strict=True):
        for order, curve in own.items():
            panel.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=order)
        panel.set(xscale="log", xlabel=what, ylabel="test accuracy, %")
    drawn.suptitle(titles.title(asked.data), fontsize="medium")
    figures.save_with_legend(drawn, asked.out / "orders.png", columns=1)


main = studies.study(PROGRAM, __doc__, runs, _check, _report)

if __name__ == "__main__":
    raise SystemExit(main())
