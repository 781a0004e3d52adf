"""How a long run shows that it is alive: a bar in a terminal, lines and an estimate everywhere."""

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from experiments.harness import one_round, records, steps, tables
from experiments.harness.steps import Unit
from experiments.harness.tasks import OneRound

_WORTH_SAYING = 60  # seconds


def bar(console: Console) -> Progress:
    """Make a bar, which goes when the block that it is shown for is over."""
    what = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    when = TextColumn("{task.fields[speed]}"), TimeRemainingColumn(elapsed_when_finished=True)
    return Progress(*what, *when, console=console, transient=True)


class Watch:
    """What is shown while the units of an experiment in one round are computed."""

    def __init__(self, console: Console, shown: Progress, task: OneRound, units: Sequence[Unit]):
        self._console, self._bar, self._of = console, shown, task
        lengths = [one_round.length(task, unit) for unit in units]
        self._total, self._num_epochs = sum(map(sum, lengths)), sum(epochs for epochs, _ in lengths)
        self._estimated = task.config.epochs == 1  # there the second epoch compiles too
        # From when, and after how many steps, the rest is estimated, and how surely.
        self._since = time.perf_counter(), 0.0, "at most about"
        self._task = shown.add_task("compiling", total=self._total, speed="")

    def begin(self, unit: Unit, where: str = "") -> steps.Progress:
        """Return what a unit calls while it is computed; `where` stands before its name."""
        name = where + _named(unit)
        ends: list[float] = []

        def show(now: float | str) -> None:
            if isinstance(now, float):
                ends.append(time.perf_counter())
                if len(ends) == 2 and not self._estimated:  # the first epoch compiles
                    self._estimated, epoch = True, ends[1] - ends[0]
                    expected = epoch * self._num_epochs
                    if expected > _WORTH_SAYING:
                        all_ = f"training about {tables.duration(expected)} in all"
                        told = f"An epoch takes {epoch:.2g} s, {all_}; merging comes on top."
                        self._console.print(told, soft_wrap=True)
                now = f"loss {now:.3f}"
            self._bar.update(self._task, advance=1, description=f"{name}: {now}")

        return show

    def begin_all(self, units: Sequence[Unit]) -> Callable[[], None]:
        """Say which seeds one program computes; return what to call when it is over."""
        split = _named(units[0]).rpartition(",")[0]
        self._bar.update(self._task, description=f"{split}: {len(units)} seeds in one program")
        steps_of_all = sum(sum(one_round.length(self._of, unit)) for unit in units)
        return lambda: self._bar.update(self._task, advance=steps_of_all)

    def finish(
        self, units: Sequence[Unit], rows: Sequence[records.Row], seconds: float, where: str = ""
    ) -> None:
        """Say what units gave, which share the seconds, and how long the others may take."""
        for unit in units:
            own = [row for row in rows if row.seed == unit[1]]
            self._finish(unit, own, seconds / len(units), where)

    def _finish(self, unit: Unit, rows: Sequence[records.Row], seconds: float, where: str) -> None:
        measured = [row for row in rows if row.metric == "accuracy" and row.round == 1]
        merged = [row for row in measured if row.algorithm not in ("local", "ensemble")]
        values = "  ".join(f"{row.algorithm} {100 * row.value:.1f}" for row in merged)
        done, now = self._bar.tasks[0].completed, time.perf_counter()
        from_time, from_done, bound = self._since
        left = (now - from_time) / max(done - from_done, 1) * (self._total - done)
        if not from_done:  # the first unit compiles: it bounds the others, which estimate the rest
            self._since = now, done, "about"
        to_go = f", {bound} {tables.duration(left)} to go" if left > _WORTH_SAYING else ""
        time_taken = f"[dim]({seconds:.1f} s{to_go})[/]"
        self._console.print(f"{where}{_named(unit)}: {values}  {time_taken}", soft_wrap=True)


def _named(unit: Unit) -> str:
    partition_seed, seed = unit
    where = "all data" if partition_seed is None else f"partition {partition_seed}"
    return f"{where}, seed {seed}"
