"""Client models of a file: `python -m experiments.reference_clients`."""
