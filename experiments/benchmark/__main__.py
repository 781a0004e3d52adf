"""Measure how fast fisherjax is, both sides of every comparison in the same run.

    python -m experiments.benchmark --suite train --models lenet --out runs/benchmark

Cases take turns, A B A B ..., on one machine. The first call, which compiles, is reported
separately, and the median of the other calls counts. A run prints tables and writes results.csv
with one row for each number, results.json with the same numbers, the hardware, the versions and
the configuration, and plot.png. PyTorch and nngeometry come with the extra `bench`; without them
their side is left out. Other work on the machine disturbs the times, those of PyTorch more than
those of XLA.
"""

import os
from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.benchmark import (
    clients,
    compiling,
    config,
    fisher,
    growing,
    pipeline,
    plot,
    report,
    rounds,
    server,
    train,
)
from experiments.benchmark.measure import Apart, measure
from experiments.benchmark.programs import Failed
from experiments.harness import commands, figures, records, tables

PROGRAM = "experiments.benchmark"
GROUPS = {
    **{"train": train.groups, "devices": train.devices, "fisher": fisher.groups},
    **{"server": server.groups, "clients": clients.groups, "pipeline": pipeline.groups},
    **{"rounds": rounds.groups, "personal": rounds.personal, "pfl": rounds.pfl},
    **{"population": rounds.population, "compile": compiling.groups, "growth": growing.groups},
}
_GROWTH = partial(plot.growth, values=growing.VALUES)
_FIGURES = {"clients": plot.growth, "compile": plot.stacks, "growth": _GROWTH}
_SUMMARIES = {"compile": compiling.summary, "growth": growing.summary}


def _spreads(arguments: Sequence[str]) -> bool:
    # Where each core is a device, programs on one device are a third slower, because their
    # elementwise operations are not divided among threads.
    return any(word.removeprefix("--suite=") in ("devices", "pipeline") for word in arguments)


@commands.command(
    PROGRAM, __doc__, config.Config, continues=False, all_cores=_spreads, cached=False
)
def main(asked: config.Config, console: Console) -> None:
    # JAX would claim most of a GPU's memory, which PyTorch needs in the same process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    asked = config.filled(asked)
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
    # The bar is drawn between measurements and has no thread, which would use a measured core and
    # could not import modules while TensorFlow Datasets makes imports lazy.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("preparing", total=None)
        bar.refresh()
        for group in GROUPS[asked.suite](asked, note):
            # What is measured elsewhere runs once.
            runs = [1 if isinstance(case, Apart) else asked.repeats + 1 for case in group.cases]
            bar.reset(task, total=sum(runs), completed=-1)

            def show(case: str, workload: str = group.workload) -> None:
                bar.update(task, advance=1, description=f"{workload}: {case}", refresh=True)

            try:
                measured = measure(group, asked.repeats or 1, asked.seconds_per_case, show)
            except Failed as error:
                note(f"left out: {error}")
                continue
            new = report.rows(asked.suite, group, measured)
            rows += new
            report.write(asked, rows, notes)
            shown = tables.terminal(report.table(new))
            for column in shown.columns[1:]:
                column.no_wrap = False  # headings may take two lines
            console.print(shown)
            bar.update(task, description="preparing", total=None, refresh=True)
    if not rows:
        raise ValueError(f"nothing was measured, and {asked.out} holds no results: see above")
    if asked.suite in _SUMMARIES:
        summary = _SUMMARIES[asked.suite](rows)
        console.print(tables.markdown(summary), soft_wrap=True, markup=False)
    figures.save(_FIGURES.get(asked.suite, plot.bars)(rows), asked.out / report.PLOT)
    left = f"\nIn {asked.out}/: {report.CSV}, {report.JSON}, {report.PLOT}"
    console.print(left, soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
