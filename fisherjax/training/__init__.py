"""Local training: every client runs its own optimiser on its own examples."""

from fisherjax.training._cohort import Cohort, Trained, cohort_memory, train_cohort
from fisherjax.training._train import check, train, train_memory, untrained

__all__ = [
    "Cohort",
    "Trained",
    "check",
    "cohort_memory",
    "train",
    "train_cohort",
    "train_memory",
    "untrained",
]
