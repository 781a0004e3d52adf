"""A page for each paper, with its numbers beside ours: `python -m experiments.papers`."""
