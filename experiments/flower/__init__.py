"""Federated runs on other machines: Flower's processes, and an app that trains on images."""
