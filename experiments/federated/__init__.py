"""Rounds: `python -m experiments.federated`."""
