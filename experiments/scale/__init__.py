"""Compute and check what one round of very many devices costs."""
