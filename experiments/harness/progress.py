"""Show the progress of a long run: a bar in a terminal, and lines with estimates everywhere."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from experiments.harness import one_round, records, steps, tables
from experiments.harness.steps import Unit
from experiments.harness.tasks import OneRound

_WORTH_SAYING = 60  # seconds


def bar(console: Console) -> Progress:
    """Return a progress bar, which disappears after its `with` block."""
    what = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    when = TextColumn("{task.fields[speed]}"), TimeRemainingColumn(elapsed_when_finished=True)
    return Progress(*what, *when, console=console, transient=True)


class Watch:
    """The progress of the units of an experiment in one round."""

    def __init__(
        self, console: Console, shown: Progress, parts: Sequence[tuple[OneRound, Sequence[Unit]]]
    ):
        self._console, self._bar = console, shown
        lengths = [one_round.length(task, unit) for task, units in parts for unit in units]
        self._total, self._num_epochs = sum(map(sum, lengths)), sum(epochs for epochs, _ in lengths)
        self._estimated = parts[0][0].config.epochs == 1  # then the second epoch compiles too
        # Time and number of steps from which the rest is estimated, and words for the estimate.
        self._since = time.perf_counter(), 0.0, "at most about"
        self._task = shown.add_task("compiling", total=self._total, speed="")

    def begin(self, unit: Unit, where: str = "") -> steps.Progress:
        """Return the progress function of a unit; `where` is printed before its name."""
        name = where + _named(unit)
        ends: list[float] = []

        def show(now: float | str) -> None:
            if isinstance(now, float):
                ends.append(time.perf_counter())
                if len(ends) == 2 and not self._estimated:  # the first epoch compiles
                    self._estimated, epoch = True, ends[1] - ends[0]
                    expected = epoch * self._num_epochs
                    if expected > _WORTH_SAYING:
                        total = f"training about {tables.duration(expected)} in all"
                        line = f"An epoch takes {epoch:.2g} s, {total}; merging comes on top."
                        self._console.print(line, soft_wrap=True)
                now = f"loss {now:.3f}"
            self._bar.update(self._task, advance=1, description=f"{name}: {now}")

        return show

    def finish(
        self, unit: Unit, rows: Sequence[records.Row], seconds: float, where: str = ""
    ) -> None:
        """Print the results of a unit and the seconds that it took, and estimate the others."""
        measured = [row for row in rows if row.metric == "accuracy" and row.round == 1]
        merged = [row for row in measured if row.algorithm not in ("local", "ensemble")]
        values = "  ".join(f"{row.algorithm} {100 * row.value:.1f}" for row in merged)
        done, now = self._bar.tasks[0].completed, time.perf_counter()
        from_time, from_done, bound = self._since
        left = (now - from_time) / max(done - from_done, 1) * (self._total - done)
        if not from_done:  # the first unit compiles, so its time is only an upper bound
            self._since = now, done, "about"
        to_go = f", {bound} {tables.duration(left)} to go" if left > _WORTH_SAYING else ""
        time_taken = f"[dim]({seconds:.1f} s{to_go})[/]"
        self._console.print(f"{where}{_named(unit)}: {values}  {time_taken}", soft_wrap=True)


def _named(unit: Unit) -> str:
    partition_seed, seed = unit
    where = "all data" if partition_seed is None else f"partition {partition_seed}"
    return f"{where}, seed {seed}"
