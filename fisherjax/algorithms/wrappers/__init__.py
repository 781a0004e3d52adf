"""Algorithms made of algorithms: a server optimizer, local leaves, sketched Fishers."""
