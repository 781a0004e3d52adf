"""Train clients apart, then merge their models in one round, in every way that was asked for.

Each client trains on its own part of a data set. Every algorithm then merges the same trained
clients into one model, beside three references: the clients' own models (local), the mean of their
outputs (ensemble) and a model trained on all the data (central), the ceiling. Without any option
this is the digits demo, which takes seconds and needs no download.

A run leaves in its folder: config.json, all that is needed to run it again; results.csv, one row
for each number; label_counts.csv, who owns which label; summary.md, the table; accuracy.png, the
figure, and rounds.png if rounds follow. An interrupted run keeps what it finished, and continues
when the same command is given again.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.harness import (
    accuracies,
    commands,
    config,
    limits,
    memory,
    one_round,
    records,
    tasks,
)
from experiments.harness.progress import Watch, bar
from experiments.harness.steps import Unit
from experiments.one_shot import vmapped_seeds

PROGRAM = "experiments.one_shot"


def parse(arguments: Sequence[str]) -> config.OneShot:
    """Read the command line and check it; `out` is filled in."""
    asked = commands.read(arguments, PROGRAM, __doc__, config.one_shot)
    limits.check_one_shot(asked)
    return dataclasses.replace(asked, out=asked.out or Path("runs") / config.name(asked))


@commands.command(PROGRAM)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = parse(arguments)
    with records.folder(asked.out):
        default = config.one_shot(asked.data.dataset)
        rows = records.resume(asked.out, asked, default, records.ONE_SHOT)
        missing = [unit for unit in one_round.units(asked) if unit not in one_round.finished(rows)]
        if missing:
            rows = _execute(tasks.one_round(asked), rows, missing, console)
        accuracies.report(asked, config.title(asked.data), rows, PROGRAM, console)


def _execute(
    task: tasks.OneRound, rows: list[records.Row], missing: list[Unit], console: Console
) -> list[records.Row]:
    """Compute the missing units, and write the rows after each, or after each split's."""
    asked = task.config
    whole = vmapped_seeds.program(task) if asked.seeds_together else None
    groups = vmapped_seeds.groups(missing) if whole else [[unit] for unit in missing]
    with console.status("compiling"):
        need = whole.memory(groups[0]) if whole else memory.predict(task)
    console.print(memory.check(need, memory.available()))
    total = len(one_round.units(asked))
    done = f"{total - len(missing)} of {total} runs are done" if rows else ""
    records.begin(asked, PROGRAM, console, done)
    accuracies.write_labels(asked.out, task.label_counts)
    for seed, counts in task.label_counts.items():
        console.print(accuracies.label_table(counts, seed))
    with bar(console) as shown:
        watch = Watch(console, shown, task, missing)
        for units in groups:
            start = time.perf_counter()
            if whole:
                over = watch.begin_all(units)
                new = whole.run(units)
                over()
            else:
                new = one_round.run(task, units[0], watch.begin(units[0]))
            rows = [*rows, *new]
            records.write_rows(asked.out / records.RESULTS, rows, records.ONE_SHOT)
            one_round.clear(task)
            watch.finish(units, new, time.perf_counter() - start)
    return rows


if __name__ == "__main__":
    sys.exit(main())
