"""OTFusion, PFNM, DENSE and FedOV on small clients: `python -m experiments.baselines`."""
