"""Measure how fast fisherjax is, both sides of every comparison in the same run.

Cases take turns, A B A B ..., on one machine; the first call, which compiles, is kept apart, and
the median of the others counts. A run prints tables and leaves in its folder: results.csv, one row
for each number; results.json, the same with the hardware, the versions and the configuration;
plot.png. PyTorch and nngeometry come with the extra `bench`; without them their side is left out.
Other work on the machine spoils the times, those of PyTorch's threads more than XLA's.
"""

import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import commands
from experiments.benchmark import (
    clients,
    config,
    devices,
    fisher,
    measure,
    pfl,
    pipeline,
    plot,
    report,
    rounds,
    server,
    train,
)
from experiments.benchmark.config import Config

_SUITES = {
    "train": train.groups,
    "fisher": fisher.groups,
    "server": server.groups,
    "clients": clients.groups,
    "pipeline": pipeline.groups,
    "pfl": pfl.groups,
    "rounds": rounds.groups,
    "devices": devices.groups,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of this process if None.

    Returns:
        The exit status: 0 when all is done, 1 when something was refused, 130 when interrupted.
    """
    # JAX would claim most of a GPU's memory for itself, and PyTorch computes beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # A log has no width of its own; tables are wide.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    try:
        asked = config.parse(sys.argv[1:] if arguments is None else arguments, __doc__)
        report.check_out(asked.out)
    except (ValueError, OSError) as error:
        return commands.refuse(error)
    try:
        _run(asked, console)
    except FileNotFoundError as error:  # a data set that is not prepared
        return commands.refuse(error)
    except KeyboardInterrupt:
        console.print(f"Interrupted. What was measured is in {asked.out}.", soft_wrap=True)
        return 130
    return 0


def _run(asked: Config, console: Console) -> None:
    rows: list[measure.Row] = []
    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            console.print(text, style="yellow", soft_wrap=True, markup=False)

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # Drawn between measurements, never by a thread of its own: that would take part of a measured
    # core, and would fail to import while TensorFlow Datasets is, which makes imports lazy.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("preparing", total=None)
        bar.refresh()
        for group in _SUITES[asked.suite](asked, note):
            bar.reset(task, total=len(group.cases) * (asked.repeats + 1), completed=-1)

            def show(case: str, workload: str = group.workload) -> None:
                bar.update(task, advance=1, description=f"{workload}: {case}", refresh=True)

            measured = measure.measure(group, asked.repeats, asked.seconds_per_case, show)
            new = measure.rows(asked.suite, group, measured)
            rows += new
            report.write(asked, rows, notes)
            console.print(report.table(group.workload, new))
            bar.update(task, description="preparing", total=None, refresh=True)
    if asked.suite == "clients":
        plot.growth(clients.panels(rows), asked.out / report.PLOT)
    else:
        plot.bars(rows, asked.out / report.PLOT)
    names = ", ".join((report.CSV, report.JSON, report.PLOT))
    console.print(f"\nIn {asked.out}/: {names}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
