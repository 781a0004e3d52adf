"""Draw why FedLPA and FedFisher merge better than averaging, with the numbers that show it.

    python -m experiments.fedlpa_pictures --out runs/pictures

gaussians.png shows two correlated Gaussians fused by FedAvg, a diagonal, Kronecker factors and the
full precisions, with the distance to the mode of their product. fisher.png shows the full empirical
Fisher information of a small network and its Kronecker blocks, with their cosine similarity.
tsne.png shows the inputs of the last layer of each merged model, with the share of a point's ten
nearest neighbours that have its label. summary.md holds the numbers.
"""

import dataclasses
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
    """Images that the networks learn, as in niid_table; digits for a trial."""
    algorithms: tuple[str, ...] = ("fedavg", "fednova", "fedprox", "fedlpa", "fedfisher_kfac")
    """Methods whose merged models are compared."""
    num_clients: int = 10
    """Clients whose models are merged."""
    beta: float = 0.05
    """Dirichlet parameter of the split of each class over the clients."""
    epochs: int = 10
    """Passes of training over the data."""
    seed: int = 0
    """Seed of everything that is random."""
    shown_clients: int = 0
    """Number of clients whose own models are compared with the merged ones, from the first."""
    num_points: int = 2000
    """Training images that t-SNE lays out."""
    num_examples: int = 2000
    """Training images for the Fisher information."""
    draws: int = 200
    """Number of random pairs of Gaussians over a layer."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/pictures")
    """Folder for the pictures and the numbers."""


def _experiment(asked: Config) -> config.OneShot:
    shared = {name: getattr(asked, name) for name in ("epochs", "num_clients", "data_dir", "out")}
    grid = grids.Grid(merging=config.Merging(asked.algorithms), **shared)
    cell = grids.Cell(asked.dataset, "niid_bench", f"{asked.beta:g}")
    return grid.configuration(cell, asked.seed)


def _check(asked: Config) -> None:
    limits.check_options(asked)
    commands.check_name("dataset", asked.dataset, grids.DATASETS)
    commands.check(asked, "num_points", "31 or more", lambda x: x > 30)  # t-SNE's perplexity is 30
    fits = range(asked.num_clients + 1)
    commands.check(asked, "shown_clients", "0 to the number of clients", fits.__contains__)
    limits.check_one_shot(_experiment(asked))


@commands.command(PROGRAM, __doc__, Config, _check, continues=False)
def main(asked: Config, console: Console) -> None:
    network = asked.num_examples, asked.epochs, asked.seed
    shown = asked.num_points, asked.shown_clients
    sections = {
        "gaussians": partial(gaussians.section, asked.seed, asked.draws),
        "fisher": partial(fisher_blocks.section, asked.dataset, asked.data_dir, *network),
        "tsne": partial(features.section, _experiment(asked), *shown),
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


if __name__ == "__main__":
    raise SystemExit(main())
