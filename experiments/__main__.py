"""List the commands, each with the first line of its module's docstring.

    python -m experiments

An unknown name is refused, with the three nearest commands.
"""

import ast
import difflib
import importlib.resources
import sys
from collections.abc import Sequence


def commands() -> dict[str, str]:
    """Return the first line of each command's docstring, by the command's name, sorted.

    Commands are the modules of this folder, and its folders that can be run. Nothing is imported:
    JAX would take seconds to load.
    """
    found = {}
    for path in sorted(importlib.resources.files("experiments").iterdir(), key=lambda x: x.name):
        source = path / "__main__.py" if path.is_dir() else path
        if source.is_file() and source.name.endswith(".py") and not path.name.startswith("_"):
            text = ast.get_docstring(ast.parse(source.read_text()))
            found[path.name.removesuffix(".py")] = text.splitlines()[0]
    return found


def main(arguments: Sequence[str]) -> int:
    """Print the list of commands; return 2 if anything was asked for."""
    found = commands()
    if arguments and arguments[0] not in ("-h", "--help"):
        print(_refusal(arguments[0], list(found)), file=sys.stderr)
        return 2
    print("python -m experiments.NAME runs a command; with --help it prints the options.\n")
    width = max(map(len, found))
    for name, line in found.items():
        print(f"  {name:{width}}  {line}")
    return 0


def _refusal(name: str, names: Sequence[str]) -> str:
    if name in names:
        return f"error: to run {name}: python -m experiments.{name}"
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.0)
    return (
        f"error: no command is called {name!r}, the nearest are {', '.join(nearest)}; "
        "python -m experiments lists all of them"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
