"""Federated rounds: broadcast, train a cohort, summarize, aggregate, and repeat."""

from fisherjax.rounds._one_round import Round, State
from fisherjax.rounds.experiment import Federated, Traffic, federated, run

__all__ = ["Federated", "Round", "State", "Traffic", "federated", "run"]
