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

from experiments.benchmark import clients, config, fisher, pipeline, report, rounds, server, train
from experiments.benchmark.measure import measure
from experiments.benchmark.plot import bars, growth
from experiments.harness import commands, figures, records, tables

PROGRAM = "experiments.benchmark"
GROUPS = {
    **{"train": train.groups, "devices": train.devices, "fisher": fisher.groups},
    **{"server": server.groups, "clients": clients.groups, "pipeline": pipeline.groups},
    **{"rounds": rounds.groups, "personal": rounds.personal, "pfl": rounds.pfl},
}


def _spreads(arguments: Sequence[str]) -> bool:
    # What runs on one device only is a third slower where each core is one: its elementwise
    # operations are then not divided among threads.
    return any(word.removeprefix("--suite=") in ("devices", "pipeline") for word in arguments)


@commands.command(PROGRAM, continues=False, all_cores=_spreads)
def main(arguments: Sequence[str], console: Console) -> None:
    # JAX would claim most of a GPU's memory for itself, and PyTorch computes beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    asked = config.filled(commands.read(arguments, PROGRAM, __doc__, config.Config))
    with records.folder(asked.out):
        if (asked.out / report.JSON).exists():
            held = f"--out {asked.out} holds results already"
            raise ValueError(f"{held}: choose another, or delete it")
        _run(asked, console)


def _run(asked: config.Config, console: Console) -> None:
    rows: list[report.Row] = []
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        console.print(text, style="yellow", soft_wrap=True, markup=False)

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # Drawn between measurements, never by a thread of its own: that would take part of a measured
    # core, and would fail to import while TensorFlow Datasets is, which makes imports lazy.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("preparing", total=None)
        bar.refresh()
        for group in GROUPS[asked.suite](asked, note):
            bar.reset(task, total=len(group.cases) * (asked.repeats + 1), completed=-1)

            def show(case: str, workload: str = group.workload) -> None:
                bar.update(task, advance=1, description=f"{workload}: {case}", refresh=True)

            measured = measure(group, asked.repeats, asked.seconds_per_case, show)
            new = report.rows(asked.suite, group, measured)
            rows += new
            report.write(asked, rows, notes)
            shown = tables.terminal(report.table(new))
            for column in shown.columns[1:]:
                column.no_wrap = False  # headings may take two lines
            console.print(shown)
            bar.update(task, description="preparing", total=None, refresh=True)
    draw = growth if asked.suite == "clients" else bars
    figures.save(draw(rows), asked.out / report.PLOT)
    left = f"\nIn {asked.out}/: {report.CSV}, {report.JSON}, {report.PLOT}"
    console.print(left, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
