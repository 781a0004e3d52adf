"""Merge from masked sums: `python -m experiments.secure`."""
