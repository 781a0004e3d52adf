"""Train clients independently, then merge their models in one round by each chosen algorithm.

    python -m experiments.one_shot --algorithms fedavg regmean fedfisher_kfac --out runs/digits
    python -m experiments.one_shot --dataset mnist --data-dir DIR --out runs/mnist

Each client trains on its own part of a data set. Every algorithm then merges the same trained
clients into one model. Three references stand beside the merged models: the clients' own models
(local), the mean of their outputs (ensemble), and a model trained on all the data (central), the
ceiling. Without any option this is the digits demo, which takes seconds and needs no download.

A run writes into its folder: config.json, which is needed to run it again; results.csv with one row
for each number; label_counts.csv with the labels of each client; summary.md with the table;
accuracy.png, and rounds.png if rounds follow. The same command continues an interrupted run.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from experiments.harness import (
    accuracies,
    commands,
    config,
    folders,
    kept_clients,
    limits,
    memory,
    one_round,
    records,
    tables,
    tasks,
    titles,
)
from experiments.harness.progress import Watch, bar
from experiments.harness.steps import Unit

PROGRAM = "experiments.one_shot"


@commands.command(PROGRAM, __doc__, config.one_shot, limits.check_one_shot, distributed=True)
def main(asked: config.OneShot, console: Console) -> None:
    asked = dataclasses.replace(asked, out=asked.out or Path("runs") / titles.name(asked))
    with records.folder(asked.out):
        asked, rows = folders.resume(asked, config.one_shot(asked.data.dataset))
        if missing := one_round.missing(asked, rows):
            rows = _execute(tasks.one_round(asked), rows, missing, console)
        accuracies.report(asked, titles.title(asked.data), rows, PROGRAM, console)


def _execute(
    task: tasks.OneRound,
    rows: list[records.Row],
    missing: Mapping[Unit, tuple[str, ...]],
    console: Console,
) -> list[records.Row]:
    """Compute what is missing, and write the rows after each unit."""
    asked = task.config
    # Units that lack the same methods.
    alike = tables.gathered((names, unit) for unit, names in missing.items())
    parts = [(one_round.only(task, names), units) for names, units in alike.items()]
    largest = max((own for own, _ in parts), key=lambda own: len(own.methods))
    with console.status("compiling"):
        need = memory.predict(largest)
    console.print(memory.check(need, memory.available()))
    if kept := kept_clients.announce(asked.out, parts):
        console.print(kept)
    total = len(one_round.units(asked))
    done = f"{total - len(missing)} of {total} runs are done" if rows else ""
    folders.begin(asked, PROGRAM, console, done)
    accuracies.write_labels(asked.out, task.label_counts)
    for seed, counts in task.label_counts.items():
        console.print(accuracies.label_table(counts, seed))
    with bar(console) as shown:
        watch = Watch(console, shown, parts)
        for own, units in parts:
            for unit in units:
                start = time.perf_counter()
                new = one_round.run(own, unit, watch.begin(unit))
                rows = one_round.replaced(rows, new)
                records.write_rows(asked.out / records.RESULTS, rows, records.ONE_SHOT)
                one_round.clear(task)
                watch.finish(unit, new, time.perf_counter() - start)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
