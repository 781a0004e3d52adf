"""How a long run shows that it is alive: a bar in a terminal, lines and an estimate everywhere."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from experiments import runs
from experiments.config import Config
from experiments.results import Row, Unit

_WORTH_SAYING = 60  # seconds


class Watch:
    """A progress bar over the steps of all units, as a context manager.

    Args:
        console: where to print.
        config: the experiment.
        units: what is going to be computed.
    """

    def __init__(self, console: Console, config: Config, units: Sequence[Unit]):
        self._console, self._config = console, config
        self._left = sum(runs.steps(config, unit) for unit in units)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("compiling", total=self._left)
        self._epoch_ends: list[float] = []

    def __enter__(self) -> "Watch":
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self._bar.stop()

    def begin(self, unit: Unit) -> runs.Progress:
        """Return what a unit calls while it is computed."""
        name = describe(unit)

        def epoch(loss: float) -> None:
            self._estimate_once()
            self._bar.update(self._task, advance=1, description=f"{name}: loss {loss:.3f}")

        def step(what: str) -> None:
            self._bar.update(self._task, advance=1, description=f"{name}: {what}")

        return runs.Progress(epoch, step)

    def finish(self, unit: Unit, rows: Sequence[Row], seconds: float) -> None:
        """Say what a unit gave."""
        merged = [row for row in rows if row.algorithm not in ("local", "ensemble")]
        values = "  ".join(f"{row.algorithm} {100 * row.value:.1f}" for row in merged)
        self._console.print(f"{describe(unit)}: {values}  [dim]({seconds:.1f} s)[/]", soft_wrap=True)

    def _estimate_once(self) -> None:
        """Estimate the whole from the third epoch: the first compiles, the second may write caches."""
        self._epoch_ends.append(time.perf_counter())
        if len(self._epoch_ends) != 3:
            return
        expected = (self._epoch_ends[2] - self._epoch_ends[1]) * self._left
        if expected > _WORTH_SAYING:
            self._console.print(
                f"An epoch takes {self._epoch_ends[2] - self._epoch_ends[1]:.2g} s: expect about "
                f"{expected / 60:.0f} minutes in all, counting each merge as an epoch."
            )


def describe(unit: Unit) -> str:
    """Name a unit."""
    partition_seed, seed = unit
    where = "all data" if partition_seed is None else f"partition {partition_seed}"
    return f"{where}, seed {seed}"
