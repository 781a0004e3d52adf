"""Two clients that learned pieces of one curve: `python -m experiments.function_space`."""
