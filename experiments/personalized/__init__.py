"""A model for each client: `python -m experiments.personalized`."""
