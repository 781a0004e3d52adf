"""These tests need Flower: make test-flower has an environment of its own."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["*.py"]
