"""Federated rounds: algorithms compared over local epochs, cohorts and data sets."""
