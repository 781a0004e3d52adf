"""The one-shot table of the FedFisher paper: `python -m experiments.fedfisher_table`."""
