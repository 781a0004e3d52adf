"""Federated rounds: broadcast, train a cohort, summarize, aggregate, and repeat."""

from fisherjax.rounds._one_round import Round, State
from fisherjax.rounds.experiment import Federated, Traffic, federated, run
from fisherjax.rounds.stream import read_cohort, run_stream

__all__ = [
    "Federated",
    "Round",
    "State",
    "Traffic",
    "federated",
    "read_cohort",
    "run",
    "run_stream",
]
