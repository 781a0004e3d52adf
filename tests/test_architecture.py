"""The order in which the library is read: a module imports only modules above it.

`ORDER` is the architecture. A folder is one line of it, and `FISHER` is the order inside the only
folder whose files build on one another; those of `aggregation/` share `base` and nothing else.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "fisherjax"

ORDER = [
    "typing",
    "compat",
    "tree",
    "likelihoods",
    "nn",
    "models",
    "data",
    "partition",
    "text",
    "mapping",
    "clients",
    "local",
    "training",
    "fisher",
    "quadratic",
    "solvers",
    "aggregation",
    "cohort",
    "rounds",
    "metrics",
    "personalization",
]
FISHER = ["kinds", "layers", "operators", "passes", "diagonal", "full", "kfac"]

ALONE = {  # who may import what the rest must not see
    "kfac_jax": {"compat", "fisher.layers"},
    "tensorflow_datasets": {"data"},
    "sklearn": {"data"},
}
HEAVY = ["tensorflow", "tensorflow_datasets", "sklearn", "matplotlib", "tyro"]

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return "fisher.layers" for fisherjax/fisher/layers.py and "fisher" for its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imports_of(path: Path) -> set[str]:
    """Return the full names that a file imports anywhere, `from a import b` as "a.b"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}, line {node.lineno}: write the whole module name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_modules(path: Path) -> set[str]:
    """Return the modules of fisherjax among them: "fisherjax.tree.dot" counts as "tree"."""
    found = set()
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "fisherjax":
            prefixes = (".".join(parts[1:end]) for end in range(len(parts), 1, -1))
            found.add(next((prefix for prefix in prefixes if prefix in MODULES), ""))
    return found


def position(module: str) -> tuple[int, int]:
    """Return (line of ORDER, line inside the folder); a folder's __init__ reads its files."""
    folder, _, file = module.partition(".")
    assert folder in ORDER, f"give {folder}.py its place in ORDER"
    if folder == "fisher" and file:
        assert file in FISHER, f"give fisher/{file}.py its place in FISHER"
        return ORDER.index(folder), FISHER.index(file)
    inside = {"": len(FISHER), "base": 0}.get(file, 1)
    return ORDER.index(folder), inside


@pytest.mark.parametrize("module", [module for module in MODULES if module])
def test_a_module_imports_only_modules_above_it(module):
    place = position(module)
    for imported in own_modules(MODULES[module]):
        assert imported, f"{module} imports the package itself: import the modules it uses"
        assert position(imported) < place, f"{module} imports {imported}, which is not above it"


def test_the_package_imports_every_module_and_does_nothing_else():
    tree = ast.parse(MODULES[""].read_text())
    assert own_modules(MODULES[""]) == set(ORDER) - {"compat"}
    assert ast.get_docstring(tree)
    assert {type(node) for node in tree.body[1:]} == {ast.ImportFrom, ast.Assign}


@pytest.mark.parametrize("library", ALONE)
def test_a_foreign_world_stops_at_the_files_that_know_it(library):
    users = {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == library for name in imports_of(path))
    }
    assert users <= ALONE[library]


@pytest.mark.parametrize("module", MODULES)
def test_no_module_uses_the_inside_of_another_library(module):
    private = {name for name in imports_of(MODULES[module]) if "._" in name}
    assert not private or module == "compat", private


def test_importing_the_package_loads_nothing_heavy():
    program = f"import sys, fisherjax; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
