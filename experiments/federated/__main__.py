"""Run federated rounds, and compare how updates are merged.

    python -m experiments.federated --algorithms fedavg fedfish --rounds 20 --out runs/federated

In every round a cohort of clients trains from the global model, an algorithm merges the updates,
and the server's optimiser takes a step. Cohorts, minibatches and initial models are the same for
all algorithms of a seed. If several server learning rates are given, validation clients choose one
for each algorithm and number of local epochs with the first seed; the other seeds use that rate.
With --local-learning-rate, rates of clients and server are a grid: all its cells run a quarter of
the rounds with the first seed, the best three all rounds with all seeds, and validation clients
choose; a choice at an edge widens the grid.

A run writes into its folder: config.json, which is needed to run it again; results.csv with one row
for each number; summary.md with the table; curves.png and barrier.png; and models/ with the final
params. It may be killed at any moment: the same command continues from the last checkpoint and
ends with the same params, bit for bit.
"""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress, TaskID

from experiments.federated import curves, grid, plan, runs, tasks
from experiments.harness import (
    commands,
    config,
    figures,
    folders,
    limits,
    progress,
    records,
)
from experiments.harness.records import Row

PROGRAM = "experiments.federated"


@commands.command(PROGRAM, __doc__, config.federated, limits.check_federated, distributed=True)
def main(asked: config.Federated, console: Console) -> None:
    default = config.federated(asked.data.dataset)
    with records.folder(asked.out):
        asked, rows = folders.resume(asked, default, grid.columns(asked))
        if not rows and (asked.out / runs.CHECKPOINTS).exists():
            asked = folders.grown(asked, default, "checkpoint")
        done = plan.finished(asked, rows) | plan.compared(asked, rows)
        rows = [row for row in rows if row.unit in done]
        if plan.following(asked, rows) is not None:
            rows = _execute(asked, rows, console)
        curves.report(asked, rows, PROGRAM, console)


def _execute(asked: config.Federated, rows: list[Row], console: Console) -> list[Row]:
    """Compute the units that are missing, and write the rows after each."""
    task = tasks.rounds(asked)
    methods = runs.prepare(task)
    goes_on = rows or (asked.out / runs.CHECKPOINTS).exists()
    done = f"{len(plan.finished(asked, rows))} runs are finished" if goes_on else ""
    folders.begin(asked, PROGRAM, console, done)
    console.print(task.description)

    def warn(message: str) -> None:
        console.print(message, style="yellow", markup=False, soft_wrap=True)

    with progress.bar(console) as bar:
        shown = bar.add_task("compiling", total=None, speed="")
        while (step := plan.following(asked, rows)) is not None:
            unit = step.unit
            bar.reset(shown, total=step.rounds, speed="")
            method, start = methods[unit[:2]], time.perf_counter()
            new = runs.run(task, method, step, _shower(bar, shown, unit), warn)
            rows = [*(row for row in rows if row.unit != unit), *new]
            records.write_rows(asked.out / records.RESULTS, rows, grid.columns(asked))
            seconds = time.perf_counter() - start
            test = [r.value for r in new if (r.split, r.metric) == ("test", "accuracy")]
            reached = f"test accuracy {100 * test[-1]:.1f} % after {new[-1].round} rounds"
            line = f"{_named(unit)}, {_rates(unit)}: {reached} [dim]({seconds:.1f} s)[/]"
            console.print(line, soft_wrap=True)
    return rows


def _rates(unit: plan.Unit) -> str:
    local = "" if unit.learning_rate is None else f"local rate {unit.learning_rate:g}, "
    return f"{local}server rate {unit.server_learning_rate:g}"


def _shower(bar: Progress, shown: TaskID, unit: plan.Unit) -> Callable[[int, float | None], None]:
    """Return what a unit calls after each round; the first round compiles and is not timed."""
    ends: list[tuple[float, int]] = []

    def show(number: int, accuracy: float | None) -> None:
        ends.append((time.perf_counter(), number))
        since, before = ends[min(1, len(ends) - 1)]
        rate = (number - before) / max(ends[-1][0] - since, 1e-9)
        speed = f"{rate:.2f} rounds/s" if number > before else ""
        reached = "" if accuracy is None else f", accuracy {100 * accuracy:.1f} %"
        bar.update(shown, completed=number, description=_named(unit) + reached, speed=speed)

    return show


def _named(unit: plan.Unit) -> str:
    epochs = f"{unit.local_epochs} local epoch{'s' * (unit.local_epochs > 1)}"
    return f"{figures.label(unit.algorithm)}, {epochs}, seed {unit.seed}"


if __name__ == "__main__":
    raise SystemExit(main())
