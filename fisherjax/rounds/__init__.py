"""Federated rounds: broadcast, train a cohort, summarize, aggregate, and repeat."""

from fisherjax.rounds._one_round import Round, State
from fisherjax.rounds.experiment import Federated, Traffic, federated, run
from fisherjax.rounds.stream import run_stream

__all__ = ["Federated", "Round", "State", "Traffic", "federated", "run", "run_stream"]
