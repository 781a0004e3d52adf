"""Run federated learning on other machines with Flower: keys, superlink, supernodes, run.

    python -m experiments.flower superlink --insecure
    python -m experiments.flower supernodes --insecure --nodes 2
    python -m experiments.flower run --insecure

Each of these commands takes a terminal of its own. The first try above is on one machine, without
encryption; `python -m experiments.flower keys` makes what `--keys` needs instead of `--insecure`.
Each command has its own --help.
"""

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "keys": "keys",
    "superlink": "superlink",
    "supernodes": "supernodes",
    "run": "submit",
}
"""The module of each command, whose function `main` it is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status, 2 if there is no such command."""
    name, *others = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name not in COMMANDS:
        print(f"error: expected one of {', '.join(COMMANDS)}, not {name!r}", file=sys.stderr)
        return 2
    run = importlib.import_module(f"experiments.flower.{COMMANDS[name]}").main
    if arguments is not None:
        return run(others)
    # A command that reads the arguments of this process also handles its signals.
    sys.argv[1:] = others
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
