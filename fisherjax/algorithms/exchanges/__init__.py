"""Exchanges without training: clients evaluate the merged model and return sums."""
