"""How many examples a Fisher information needs: `python -m experiments.knee`."""
