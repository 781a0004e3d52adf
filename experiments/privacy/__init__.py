"""Accuracy over epsilon: `python -m experiments.privacy`."""
