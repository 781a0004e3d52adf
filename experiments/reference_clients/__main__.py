"""Merge clients that the FedFisher authors' PyTorch code trained, and compare with that code.

    python -m experiments.reference_clients --reference FILE --dataset mnist --model lenet

The file mnist_lenet_m5_alpha01.npz holds five LeNets trained on MNIST; any other file of its layout
works too. Nothing is trained here: each algorithm merges the same weights, from the same data.

A run writes the same files as `experiments.one_shot`: config.json, results.csv, label_counts.csv,
summary.md with the table, and accuracy.png.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console

import fisherjax as fj
from experiments.harness import (
    accuracies,
    commands,
    figures,
    folders,
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
"""Accuracies in % that the authors' code reports for their MNIST file, with compressed uploads."""
FILE = "mnist_lenet_m5_alpha01.npz"
_UNIT = (0, 0)  # only validation images are drawn by the seeds, and the file lists these


@dataclasses.dataclass(frozen=True)
class Config(commands.Imports):
    """The clients of a file, and methods that merge them."""

    merging: Group[Merging] = dataclasses.field(default=Merging())
    reference: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("../shared/reference") / FILE
    """File of client models and their partition, in the layout of `harness.reference`."""
    dataset: Literal["mnist", "cifar10"] = "mnist"
    """Data set that the clients were trained on."""
    model: Literal["lenet", "cnn"] = "lenet"
    """Network of the clients."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/reference_clients")
    """Folder for the results."""


@commands.command(PROGRAM, __doc__, Config, continues=False)
def main(asked: Config, console: Console) -> None:
    found = reference.load(asked.reference)
    task = prepare(asked, found)
    with records.folder(asked.out):
        both, _ = folders.resume(asked, Config())
        if both != asked:
            asked, task = both, prepare(both, found)
        with console.status("merging"):
            rows = merge(task, found)
        folders.write_config(asked.out, asked, PROGRAM)
        accuracies.write_labels(asked.out, task.label_counts)
        records.write_rows(asked.out / records.RESULTS, rows, records.ONE_SHOT)
        both = f"{figures.label(asked.dataset)}, {figures.label(asked.model)}"
        heading = f"{both}, {len(found.partition)} clients of a file"
        accuracies.report(asked, heading, rows, PROGRAM, console)
    if asked.reference.name == FILE:
        reported = ", ".join(f"{name} {value:.1f}" for name, value in AUTHORS.items())
        console.print(f"The authors' code reports, of its own merges: {reported}.", soft_wrap=True)


def prepare(asked: Config, found: Reference) -> tasks.OneRound:
    """Read the data, and assign to each client the examples that the file lists."""
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
    """Merge the clients by every method, and measure their own models."""
    params, weights = jax.tree.map(lambda leaf: leaf[0], found.params), task.federations[0].weights
    trained = fj.training.Trained(found.params)
    merged = one_round.merge(task, task.methods, _UNIT, params, trained, weights)
    rows = one_round.references(task, _UNIT, trained, trained, weights, None)
    return rows + [measure(task, _UNIT, name, own) for name, own in merged.items()]


if __name__ == "__main__":
    raise SystemExit(main())
