"""Orders of local training, merges and exchanges: `python -m experiments.orders`."""
