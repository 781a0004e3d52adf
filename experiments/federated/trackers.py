"""Log the numbers of a run, round by round, to a file or by the packages of others."""

import contextlib
import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Log = Callable[[int, Mapping[str, float]], Any]
"""Function of the number of a round and its numbers by name."""


@contextlib.contextmanager
def tracker(name: str, folder: Path, run: str) -> Iterator[Log]:
    """Open a tracker: "csv" writes RUN.csv, others need the package tensorboardX or wandb.

    Example:
        >>> with tracker("none", Path(), "") as log:
        ...     log(1, {"test accuracy": 0.5})
    """
    if name == "none":
        yield lambda *_: None
    elif name == "csv":
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{run}.csv", "w", newline="") as file:
            write = csv.writer(file).writerows
            yield lambda number, values: write((number, *x) for x in values.items())
    elif name == "tensorboard":
        from tensorboardX import SummaryWriter

        with SummaryWriter(str(folder / run)) as writer:
            yield lambda number, values: writer.add_scalars("rounds", values, number)
    else:
        import wandb

        with wandb.init(project=folder.name, name=run, dir=str(folder)) as opened:
            yield lambda number, values: opened.log(dict(values), step=number)
