"""One round: `python -m experiments.one_shot`."""
