"""Accuracy over the bytes that clients send: `python -m experiments.compression`."""
