"""Flower's app of fisherjax: clients that train on images, and a server that merges."""
