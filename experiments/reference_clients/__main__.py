"""Merge clients that the FedFisher authors' PyTorch code trained, and compare with that code.

    python -m experiments.reference_clients --reference FILE --dataset mnist --model lenet

The file mnist_lenet_m5_alpha01.npz holds five LeNets trained on MNIST; any other file of its layout
does as well. Nothing is trained here: each algorithm merges the same weights, from the same data.

A run leaves in its folder what `experiments.one_shot` does: config.json, results.csv,
label_counts.csv, summary.md, the table, and accuracy.png, the figure.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console

import fisherjax as fj
from experiments.harness import (
    accuracies,
    commands,
    limits,
    one_round,
    records,
    reference,
    tasks,
)
from experiments.harness.config import Data, Group, Merging, OneShot
from experiments.harness.methods import trains_its_own
from experiments.harness.reference import Reference
from experiments.harness.steps import measure

PROGRAM = "experiments.reference_clients"
AUTHORS = {
    "fedavg": 66.31,
    "fisher_merge": 86.64,
    "regmean": 84.53,
    "fedfisher_diag": 86.28,
    "fedfisher_kfac": 91.48,
    "pfnm": 77.1,
}
"""Accuracies in % that their code reports of their file for MNIST; with compressed uploads."""
FILE = "mnist_lenet_m5_alpha01.npz"
_UNIT = (0, 0)  # nothing is drawn but validation images, which the file names


@dataclasses.dataclass(frozen=True)
class Config:
    """Which clients, and how they are merged."""

    merging: Group[Merging] = dataclasses.field(default=Merging())
    reference: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("../shared/reference") / FILE
    """Client models and partition, in the layout of the reference clients."""
    dataset: Literal["mnist", "cifar10"] = "mnist"
    """What they were trained on."""
    model: Literal["lenet", "cnn"] = "lenet"
    """Their network."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/reference_clients")
    """Folder for the results."""


@commands.command(PROGRAM, continues=False)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, Config)
    found = reference.load(asked.reference)
    task = prepare(asked, found)
    with records.folder(asked.out):
        if records.read_rows(asked.out / records.RESULTS, records.ONE_SHOT):
            records.check_config(asked.out, asked, Config())
        with console.status("merging"):
            rows = merge(task, found)
        records.write_config(asked.out, asked, PROGRAM)
        accuracies.write_labels(asked.out, task.label_counts)
        records.write_rows(asked.out / records.RESULTS, rows, records.ONE_SHOT)
        heading = f"{asked.dataset}, {asked.model}, {len(found.partition)} clients of a file"
        accuracies.report(asked, heading, rows, PROGRAM, console)
    if asked.reference.name == FILE:
        told = ", ".join(f"{name} {value:.1f}" for name, value in AUTHORS.items())
        console.print(f"The authors' code reports, of its own merges: {told}.", soft_wrap=True)


def prepare(asked: Config, found: Reference) -> tasks.OneRound:
    """Read the data, and give each client those that it has in the file."""
    data = Data(asked.dataset, asked.model, len(found.partition), data_dir=asked.data_dir)
    whole = OneShot(data, merging=asked.merging, partition_seeds=(0,), seeds=(0,), central=False)
    limits.check_one_shot(whole)
    if training := [name for name in asked.merging.algorithms if trains_its_own(name)]:
        raise ValueError(
            f"--algorithms has {', '.join(training)}, which change how clients train: these are "
            "trained already; expected methods that merge them as they are"
        )
    train, test = fj.datasets.load(asked.dataset, asked.data_dir)
    rows, last = found.validation, len(train.targets) - 1
    if len(rows) and not 0 <= rows.min() <= rows.max() <= last:
        raise ValueError(
            f"{asked.reference} has validation_indices {rows.min()} to {rows.max()}, expected 0 to "
            f"{last}, the rows of the training data"
        )
    task = tasks.shared(whole, train, test)
    images = fj.Examples(task.central.inputs[rows], task.central.targets[rows])
    return tasks.split_up(task, {0: found.partition})._replace(validation=lambda _: images)


def merge(task: tasks.OneRound, found: Reference) -> list[records.Row]:
    """Merge the clients in every way, and measure them alone."""
    params, weights = jax.tree.map(lambda leaf: leaf[0], found.params), task.federations[0].weights
    trained = fj.training.Trained(found.params)
    merged = one_round.merge(task, task.methods, _UNIT, params, trained, weights)
    rows = one_round.references(task, _UNIT, trained, trained, weights, None)
    return rows + [measure(task, _UNIT, name, own) for name, own in merged.items()]


if __name__ == "__main__":
    sys.exit(main())
