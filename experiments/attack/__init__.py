"""Attacks of a curious server: `python -m experiments.attack`."""
