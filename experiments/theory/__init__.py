"""What is proven about small networks: `python -m experiments.theory`."""
