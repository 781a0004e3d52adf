"""Exchanges without training: clients evaluate the merged model and return sums.

This folder has the methods; `merging.run_exchanges` runs them.
"""
