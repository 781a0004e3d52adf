"""Draw why FedLPA and FedFisher merge as they do, each picture with the number that it shows.

    python -m experiments.fedlpa_pictures --out runs/pictures

gaussians.png: two correlated Gaussians fused by FedAvg, a diagonal, Kronecker factors and the full
precisions, and the distance to the mode of their product. fisher.png: the full empirical Fisher
information of a small network and its Kronecker blocks, and their cosine similarity. tsne.png: what
the last layer of each merged model sees, and how many of a point's ten nearest neighbours have its
label. summary.md holds the numbers.
"""

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from experiments.fedlpa_pictures import features, fisher_blocks, gaussians
from experiments.harness import commands, config, grids, limits, records

PROGRAM = "experiments.fedlpa_pictures"


@dataclasses.dataclass(frozen=True)
class Config:
    """What to draw."""

    dataset: str = "mnist"
    """Images that the networks learn: those of niid_table; digits to try."""
    algorithms: tuple[str, ...] = ("fedavg", "fednova", "fedprox", "fedlpa", "fedfisher_kfac")
    """Methods whose merged models are looked at."""
    num_clients: int = 10
    """Clients whose models are merged."""
    beta: float = 0.05
    """Split of their data, by Dirichlet shares of the classes."""
    epochs: int = 10
    """Passes of training over the data."""
    seed: int = 0
    """Seed of all that is random."""
    num_points: int = 2000
    """Training images that t-SNE lays out."""
    num_examples: int = 2000
    """Training images of the Fisher information."""
    draws: int = 200
    """Pairs of random Gaussians over a layer."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/pictures")
    """Folder for the pictures and the numbers."""


@commands.command(PROGRAM, continues=False)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, Config)
    _check(asked)
    network = asked.num_examples, asked.epochs, asked.seed
    sections = {
        "gaussians": partial(gaussians.section, asked.seed, asked.draws),
        "fisher": partial(fisher_blocks.section, asked.dataset, asked.data_dir, *network),
        "tsne": partial(features.section, _experiment(asked), asked.num_points),
    }
    parts = ["# Why curvature merges better than averaging\n"]
    with records.folder(asked.out):
        for name, section in sections.items():
            with console.status(name):
                parts.append(section(asked.out / f"{name}.png"))
            console.print(parts[-1], markup=False, soft_wrap=True)
        parts.append(f"```\n{commands.write(asked, PROGRAM)}\n```\n")
        records.write_text(asked.out / "summary.md", "\n".join(parts))
    files = "gaussians.png, fisher.png, tsne.png, summary.md"
    console.print(f"In {asked.out}/: {files}", soft_wrap=True)


def _experiment(asked: Config) -> config.OneShot:
    shared = {name: getattr(asked, name) for name in ("epochs", "num_clients", "data_dir", "out")}
    grid = grids.Grid(merging=config.Merging(asked.algorithms), **shared)
    cell = grids.Cell(asked.dataset, "niid_bench", f"{asked.beta:g}")
    return grids.configuration(grid, cell, asked.seed)


def _check(asked: Config) -> None:
    commands.check_name("dataset", asked.dataset, grids.DATASETS)
    commands.check(asked, "num_points", "31 or more", lambda x: x > 30)  # t-SNE's perplexity is 30
    for option in ("num_examples", "draws"):
        commands.check(asked, option, "1 or more", lambda x: x >= 1)
    limits.check_one_shot(_experiment(asked))


if __name__ == "__main__":
    sys.exit(main())
