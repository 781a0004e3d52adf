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

import sys
import time
from collections.abc import Sequence

from rich.console import Console

from experiments import commands, config, figures, memory, records, report, rounds, runs
from experiments.experiment import Experiment, prepare
from experiments.progress import Watch
from experiments.records import Row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of this process if None.

    Returns:
        The exit status: 0 when all is done, 1 when something was refused or a client diverged, 130
        when interrupted.
    """
    console = Console(highlight=False)
    try:
        asked = config.parse(sys.argv[1:] if arguments is None else arguments, __doc__)
        rows = records.resume(asked.out, asked)
        missing = [unit for unit in records.units(asked) if unit not in records.finished(rows)]
        experiment = prepare(asked) if missing else None
        if experiment is not None:
            with console.status("compiling"):
                need = memory.predict(experiment)
            console.print(memory.check(need, memory.available()))
    except (ValueError, OSError) as error:
        return commands.refuse(error)
    try:
        if experiment is not None:
            rows = _execute(experiment, rows, missing, console)
    except runs.Diverged as error:
        return commands.refuse(error)
    except KeyboardInterrupt:
        console.print(
            f"Interrupted. What was finished is in {asked.out}; the same command continues it:\n"
            f"  {config.command(asked)}",
            soft_wrap=True,
        )
        return 130
    _report(asked, rows, console)
    return 0


def _execute(
    experiment: Experiment, rows: list[Row], missing: list[records.Unit], console: Console
) -> list[Row]:
    """Compute the missing units, and write the rows after each."""
    asked = experiment.config
    if rows:
        total = len(records.units(asked))
        console.print(f"Continuing {asked.out}: {total - len(missing)} of {total} runs are done.")
        for change in records.environment_changes(asked.out):
            console.print(f"[yellow]It was started in another environment: {change}.[/]")
    else:
        records.write_config(asked.out, asked)
    records.write_labels(asked.out / records.LABELS, experiment.label_counts)
    for seed, counts in experiment.label_counts.items():
        console.print(report.label_table(counts, seed))
    with Watch(console, asked, missing) as watch:
        for unit in missing:
            start = time.perf_counter()
            new = runs.run(experiment, unit, watch.begin(unit))
            rows = [*rows, *new]
            records.write(asked.out / records.RESULTS, rows)
            watch.finish(unit, new, time.perf_counter() - start)
    return rows


def _report(asked: config.Config, rows: list[Row], console: Console) -> None:
    table = report.lines(rows, asked.algorithms)
    title = report.title(asked)
    console.print(report.accuracy_table(table, title))
    console.print(report.footnote(asked.algorithms), style="dim")
    summary = report.summary(rows, asked, records.read_environment(asked.out))
    names = [records.CONFIG, records.RESULTS, records.LABELS, "summary.md", "accuracy.png"]
    curves = rounds.curves(rows, asked.algorithms)
    if curves:
        console.print(rounds.table(curves))
        summary += "\n" + rounds.markdown(curves)
        rounds.figure(curves, title, asked.out / "rounds.png")
        names.append("rounds.png")
    records.write_text(asked.out / "summary.md", summary)
    figures.accuracy(table, title, asked.out / "accuracy.png")
    console.print(f"\nIn {asked.out}/: {', '.join(names)}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
