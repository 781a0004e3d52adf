"""Merges from masked sums: `python -m experiments.secure`."""
