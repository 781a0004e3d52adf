"""Run federated rounds, and compare how updates are merged.

In every round a cohort of clients trains from the global model; an algorithm merges what they send,
and the server's optimiser takes its step. Cohorts, minibatches and initial models are the same for
all algorithms of a seed. Where several server learning rates are given, clients set apart choose
one for each algorithm and number of local epochs, with the first seed; the others use that one.

A run leaves in its folder: config.json, all that is needed to run it again; results.csv, one row
for each number; summary.md, the table; curves.png and barrier.png; models/, the final params. It
may be killed at any moment: the same command goes on from the last checkpoint and ends at the same
params, bit for bit.
"""

import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import commands, records
from experiments.federated import config, report, runs
from experiments.federated.config import Config
from experiments.federated.runs import Row, Unit
from experiments.federated.task import Task, prepare


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of this process if None.

    Returns:
        The exit status: 0 when all is done, 1 when something was refused, 130 when interrupted.
    """
    # A log has no width of its own; tables are wide.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    try:
        asked = config.parse(sys.argv[1:] if arguments is None else arguments, __doc__)
        records.check_writable(asked.out)
        if (asked.out / records.CONFIG).exists():
            where_and_how = config.WHERE_AND_HOW
            records.check_config(asked.out, asked, "unfinished runs", where_and_how)
        task = prepare(asked)
        runs.check(asked, task)
    except (ValueError, OSError) as error:
        return commands.refuse(error)
    records.write_config(asked.out, asked, config.command)
    console.print(task.told)
    try:
        rows = _run(asked, task, console)
    except (ValueError, OSError) as error:  # checkpoints of another state, a full disk
        return commands.refuse(error)
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was saved is in {asked.out}; the same command continues.")
        return 130
    _report(asked, task, rows, console)
    return 0


def _run(asked: Config, task: Task, console: Console) -> list[Row]:
    """Run all units, and return the rows of the chosen server learning rates."""
    where = [(epochs, algorithm) for epochs in asked.local_epochs for algorithm in asked.algorithm]
    first = [
        Unit(algorithm, epochs, rate, asked.seeds[0])
        for epochs, algorithm in where
        for rate in asked.server_learning_rate
    ]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("compiling", total=None, speed="")

        def run(unit: Unit) -> list[Row]:
            bar.reset(shown, total=config.rounds(asked, unit.local_epochs), speed="")
            watcher = runs.Watcher(_shower(bar, shown, unit), lambda text: console.print(text))
            begun = time.perf_counter()
            rows = runs.run(asked, task, unit, asked.out / "checkpoints" / unit.name, watcher)
            console.print(_told(unit, rows, time.perf_counter() - begun), soft_wrap=True)
            return rows

        tried = [row for unit in first for row in run(unit)]
        chosen = runs.select(asked, tried)
        report.write_rows(asked.out / "results.csv", tried)
        rest = [
            Unit(algorithm, epochs, chosen[algorithm, epochs], seed)
            for seed in asked.seeds[1:]
            for epochs, algorithm in where
        ]
        everything = list(tried)
        for unit in rest:
            everything += run(unit)
            report.write_rows(asked.out / "results.csv", everything)
    return [
        row
        for row in everything
        if row.server_learning_rate == chosen[row.algorithm, row.local_epochs]
    ]


def _shower(bar: Progress, shown: int, unit: Unit) -> Callable[[int, float | None], None]:
    """Return what a run calls after each round; the first one compiles and is not timed."""
    ends: list[tuple[float, int]] = []

    def show(number: int, accuracy: float | None) -> None:
        ends.append((time.perf_counter(), number))
        since, before = ends[min(1, len(ends) - 1)]
        elapsed = ends[-1][0] - since
        speed = f"{(number - before) / elapsed:.2f} rounds/s" if number > before else ""
        reached = "" if accuracy is None else f", accuracy {100 * accuracy:.1f}"
        name = f"{unit.algorithm}, {unit.local_epochs} epochs, seed {unit.seed}"
        bar.update(shown, completed=number, description=name + reached, speed=speed)

    return show


def _told(unit: Unit, rows: Sequence[Row], seconds: float) -> str:
    test = [r.value for r in rows if (r.split, r.metric) == ("test", "accuracy")]
    number, rate = rows[-1].round, f"{unit.server_learning_rate:g}"
    return (
        f"{unit.algorithm}, {unit.local_epochs} local epochs, server rate {rate}, seed "
        f"{unit.seed}: test accuracy {100 * test[-1]:.1f} after {number} rounds ({seconds:.1f} s)"
    )


def _report(asked: Config, task: Task, rows: list[Row], console: Console) -> None:
    found = report.lines(asked, rows)
    console.print(report.table(asked, found, task.told))
    console.print(report.footnote(asked), style="dim")
    names = ["config.json", "results.csv", "summary.md", "curves.png"]
    report.figure(asked, rows, "test", "accuracy", "test accuracy", asked.out / "curves.png")
    if asked.barrier:
        names.append("barrier.png")
        label = "client-server barrier, nats"
        path = asked.out / "barrier.png"
        report.figure(asked, rows, "cohort", "barrier_loss", label, path)
    text = report.summary(asked, found, task.told)
    records.write_text(asked.out / "summary.md", text)
    console.print(f"\nIn {asked.out}/: {', '.join(names)}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
