"""The text table with clients that train adapters (LoRA) of several ranks: other defaults."""

import dataclasses
from pathlib import Path
from typing import Annotated

import fisherjax as fj
from experiments.harness import commands
from experiments.pretrained import text_table
from experiments.pretrained.text_table import run

__all__ = ["Config", "run"]


@dataclasses.dataclass(frozen=True)
class Config(text_table.Config):
    """Domains, training of adapters, and methods that merge them."""

    algorithms: Annotated[tuple[str, ...], commands.names(fj.algorithms.merges())] = (
        *("fedavg", "task_arithmetic", "ties", "regmean", "fedfisher_kfac"),
        "fedfisher_sequential",
    )
    """Methods that merge; with options as in fedfisher_kfac@damping=0.1,kind='true'."""
    scales: tuple[float, ...] = (1.0,)
    """Factors of the change of a merged model; 1 is the method itself."""
    ranks: tuple[int, ...] = (4, 8, 16)
    """Ranks of the adapters that clients train; with 0 they train the whole network."""
    learning_rate: float = 5e-4
    """Step size of Adam."""
    out: commands.Folder = Path("runs/adapters")
    """Folder for the results; an unfinished run there continues."""
