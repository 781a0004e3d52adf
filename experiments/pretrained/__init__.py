"""Merge fine-tuned networks: `python -m experiments.pretrained`."""
