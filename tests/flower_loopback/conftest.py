"""The client of these tests is no module of theirs: Flower loads it, as a part of an app."""

import importlib.util

collect_ignore = ["replaying_client.py", "quick_nodes.py"]
if importlib.util.find_spec("flwr") is None:  # make test-flower has an environment with it
    collect_ignore += [f"test_{x}.py" for x in ("faults", "secure_dropouts", "interrupted_load")]
