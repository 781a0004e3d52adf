"""The one-shot table of the FedLPA paper: `python -m experiments.niid_table`."""
