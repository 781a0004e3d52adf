"""Wrappers of algorithms: local leaves, a server optimiser, sketches of Fisher information."""
