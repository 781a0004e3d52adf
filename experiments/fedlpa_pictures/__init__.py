"""Why curvature merges better than averaging: `python -m experiments.fedlpa_pictures`."""
