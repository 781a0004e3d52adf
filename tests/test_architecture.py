"""The order in which the library is read, and how much there is of it.

A module imports only modules above it: `ORDER` is the architecture. A folder is one line of it.
`INSIDE` has the order inside the folders whose files build on one another; the files of other
folders import only those of them that `SHARED` has, in that order, and know nothing of each other.
"""

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fisherjax

PACKAGE = Path(__file__).resolve().parents[1] / "fisherjax"

ORDER = [
    "_other_libraries",
    "typing",
    "_one_device",
    "tree",
    "_stacked",
    "_core",
    "leaves",
    "likelihoods",
    "_padding",
    "nn",
    "networks",
    "_cinic10",
    "datasets",
    "partition",
    "text",
    "_self_check",
    "_predicted_memory",
    "devices",
    "_device_division",
    "parallel",
    "_minibatches",
    "_user_data",
    "clients",
    "_optimizers",
    "local_update",
    "training",
    "_layers",
    "fisher",
    "_wide_layers",
    "_preconditioning",
    "quadratic",
    "solvers",
    "algorithms",
    "compression",
    "_semidefinite_uploads",
    "_upload_checks",
    "adapters",
    "_finite_uploads",
    "privacy",
    "merging",
    "secure_aggregation",
    "files",
    "metrics",
    "rounds",
    "personalization",
    "theory",
    "flower",
    "_command_line",
    "__main__",
]
BUILT = {  # folders whose files build on one another
    "likelihoods": ["_distributions", "_custom"],
    "networks": ["statistics", "functions", "images", "residual", "transformer"],
    "datasets": ["reading", "images", "_records", "on_disk", "natural", "grouping"],
    "_core": [
        "caching",
        "compat",
        "compiler",
        "linalg",
        "batches",
        "checks",
        "output_checks",
        "secrecy",
    ],
    "_layers": [
        *("computed", "rewriting", "choices", "equations", "views", "mixing", "operations", "uses"),
        *("normalized_values", "normalization", "layer", "reading", "feeders", "blocks"),
        *("arrangement", "pairs", "loops", "locations", "graph"),
    ],
    "fisher": [
        *("_columns", "kinds", "operators", "kfac_operator", "kfac_sum_operator", "_passes"),
        *("diagonal", "full", "_factors", "kfac"),
    ],
    "training": ["_cohort", "_train"],
    "solvers": ["base", "direct", "descent", "krylov"],
    "adapters": ["base", "_checks", "_evaluation", "merge", "network", "methods"],
    "files": [
        *("_shown", "_paths", "_limits", "base", "_archive", "_places", "_shards", "arrays"),
        *("uploads.values", "uploads._size_checks", "uploads._description_checks"),
        *("uploads._records", "uploads.update", "uploads._reads", "uploads._parts"),
        *("uploads._layerwise", "uploads._packed", "checkpoints._pickles", "checkpoints._torch"),
        *("checkpoints._fishers", "checkpoints._compared", "checkpoints._plain"),
        *("checkpoints._pieces", "checkpoints._unfinished", "checkpoints._leaf_writers"),
        *("checkpoints._merge", "checkpoints._imported", "merge"),
        *("adapters._config", "adapters.folders", "adapters.merge"),
    ],
    "rounds": ["_cohorts", "_messages", "_one_round", "experiment", "stream"],
    "flower": [
        *("_wire", "_uploads", "_secure", "_state", "_kept", "_secure_client", "_replies"),
        *("_client", "_grid", "_received", "_nodes", "_secure_server", "_strategy", "_server"),
    ],
    "metrics": ["_targets", "_test_set", "_clients"],
}
# What the other files of a folder may import, and these in this order.
SHARED = [
    *("_cohorts", "accounting", "clipping", "encoded", "reading", "base", "stages", "checks"),
    *("_rows", "_changes", "_layer_solves", "_fisher_updates", "_unit_matching", "_layer_errors"),
    "_fedlpa_solvers",
    *("exchanges._head_sums", "exchanges._rescaling"),
    *("wrappers.local_leaves", "wrappers.server_optimizer"),
    *("distillation.synthesis", "distillation._outliers", "distillation.student"),
    "distillation._open_set",
    *("keys", "shares", "fixed_point", "messages", "_setting", "_masks", "_message_checks"),
    *("_server", "protocol"),
    *("quantized", "matrices", "stream"),
    *(
        "statistics",
        "summaries",
        "_running_statistics",
        "_server_half",
        "merges",
        "streams",
        "_repair",
    ),
    *("two_layer", "signal_noise", "_recursion"),
]
# The files that read all others of their folder, each a paper, in the order of their imports.
REGISTRY = ("weighted_fedbn", "registry", "_lookup")

LATER = {"networks", "flower"}  # imported when they are first used
EXTRA = {"flower"}  # needs an extra, so that `from fisherjax import *` leaves it out

ALONE = {  # who may import what the rest must not see
    "kfac_jax": {"_core.compat"},
    "flax": {
        f"networks.{name}"
        for name in ("functions", "images", "residual", "statistics", "transformer")
    },
    "safetensors": {"files.base", "files.arrays"},
    "tensorflow_datasets": {"_cinic10", "datasets.reading", "datasets._records"},
    "sklearn": {"datasets.reading"},
    "cryptography": {"secure_aggregation.keys"},
    "flwr": {f"flower{x}" for x in ("", *("._wire", "._kept", "._client", "._grid", "._received"))}
    | {"flower._strategy", "flower._server", "flower._nodes", "flower._replies"}
    | {"flower._secure", "flower._secure_client"},
}
HEAVY = [
    *("kfac_jax", "chex", "tensorflow_datasets", "tensorflow", "orbax", "flax"),
    *("matplotlib", "rich", "sklearn", "PIL", "tyro", "cryptography", "scipy", "flwr"),
]

PUBLIC, INTERNAL = 11, 8  # parameters, of every kind

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """Return "fisher.layers" for fisherjax/_layers/layer.py and "fisher" for its __init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}
FOLDERS = {name_of(path) for path in FILES if path.name == "__init__.py"}


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


def is_inside(module: str) -> bool:
    """Return whether a module, or a folder that it lies in, has an underscore: no user sees it."""
    return any(part.startswith("_") for part in module.split("."))


def position(module: str) -> tuple[int, int]:
    """Return (line of ORDER, line inside the folder); a folder's __init__ reads its files."""
    folder, _, file = module.partition(".")
    assert folder in ORDER, f"give {folder} its place in ORDER"
    if file and module in FOLDERS:  # says only what the folder is
        return ORDER.index(folder), -1
    files = BUILT.get(folder, SHARED)
    if folder in BUILT and file:
        assert file in files, f"give {module} its place in BUILT"
    ranked = (*files, "", *REGISTRY)  # any other file, a paper, has the place of ""
    inside = ranked.index(file if file in ranked else "")
    return ORDER.index(folder), inside if file else len(ranked)


@pytest.mark.parametrize("module", [module for module in MODULES if module])
def test_a_module_imports_only_modules_above_it(module):
    place = position(module)
    for imported in own_modules(MODULES[module]):
        assert imported, f"{module} imports the package itself: import the modules it uses"
        assert position(imported) < place, f"{module} imports {imported}, which is not above it"


def test_every_module_has_its_place():
    assert {module.partition(".")[0] for module in MODULES if module} == set(ORDER)
    for folder, files in BUILT.items():
        inside = {module for module in MODULES if module.startswith(f"{folder}.")} - FOLDERS
        assert {module.partition(".")[2] for module in inside} == set(files)
    known = {".".join(module.split(".")[1:]) for module in MODULES}
    assert set(SHARED) <= known


def test_the_package_imports_every_module_and_does_nothing_else():
    tree = ast.parse(MODULES[""].read_text())
    assert own_modules(MODULES[""]) == {x for x in ORDER if not is_inside(x)}
    assert ast.get_docstring(tree)
    kinds = [type(node) for node in tree.body[1:]]
    assert set(kinds) == {ast.Import, ast.ImportFrom, ast.Assign, ast.If}


def test_what_is_imported_later_is_known_to_type_checkers_alone():
    tree = ast.parse(MODULES[""].read_text())
    [later] = [node for node in tree.body if isinstance(node, ast.If)]
    [known], [function] = later.body, later.orelse
    assert ast.unparse(later.test) == "TYPE_CHECKING"
    assert ast.unparse(known) == f"from fisherjax import {', '.join(sorted(LATER))}"
    assert isinstance(function, ast.FunctionDef)
    assert function.name == "__getattr__"


def test_the_package_offers_every_module_and_the_two_nouns_that_everybody_writes():
    public = {x for x in ORDER if not is_inside(x)}
    assert set(fisherjax.__all__) == public - EXTRA | {"Model", "Examples"}
    for name in fisherjax.__all__:
        assert getattr(fisherjax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'network'"):
        _ = fisherjax.network


@pytest.mark.parametrize("module", MODULES)
def test_a_file_has_at_most_300_lines(module):
    """A longer one holds two ideas."""
    assert len(MODULES[module].read_text().splitlines()) <= 300


@pytest.mark.parametrize("library", ALONE)
def test_a_foreign_world_stops_at_the_files_that_know_it(library):
    users = {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == library for name in imports_of(path))
    }
    assert users == ALONE[library]


@pytest.mark.parametrize("module", MODULES)
def test_no_module_uses_the_inside_of_another_library(module):
    private = {
        name
        for name in imports_of(MODULES[module])
        if "._" in name and not name.startswith("fisherjax.")
    }
    assert not private or module in ("_core.compat", "_core.compiler"), private


@pytest.mark.parametrize("module", [name for name in MODULES if name != "_core.linalg"])
def test_factorisations_are_those_that_are_loops_under_vmap(module):
    """Batched ones of several layers wait for each other for ever on a CPU of two cores."""
    found = re.findall(r"(?:jnp|lax|jax\.scipy)\.linalg\.(\w+)", MODULES[module].read_text())
    assert set(found) <= {"norm", "multi_dot"}


@pytest.mark.long
def test_importing_the_package_loads_nothing_heavy():
    program = f"import sys, fisherjax; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def method_names_compared(path: Path) -> list[str]:
    """Return comparisons with the name of a method: `name == "fedavg"`, `in ("fedavg", "toy")`."""
    found, plain = [], ast.Constant | ast.Tuple | ast.List | ast.Set
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [x for x in (node.left, *node.comparators) if isinstance(x, plain)]
            said = {x.value for y in sides for x in ast.walk(y) if isinstance(x, ast.Constant)}
            if said & fisherjax.algorithms.METHODS.keys():
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


TESTS = sorted((PACKAGE.parent / "tests").rglob("*.py"))


def conditions(nodes: list[ast.stmt]) -> Iterator[ast.Compare]:
    """Yield the comparisons that decide what a program does next, or takes of several things."""
    for node in itertools.chain.from_iterable(map(ast.walk, nodes)):
        if isinstance(node, (ast.If, ast.IfExp, ast.comprehension)):
            some = node.ifs if isinstance(node, ast.comprehension) else [node.test]
            for condition in some:
                yield from (x for x in ast.walk(condition) if isinstance(x, ast.Compare))


def labels_of(function: ast.FunctionDef) -> set[str]:
    """Return the arguments by which a test is given its case, and what a fixture is asked for."""
    found = {"request.param"}
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize"):
            said = [x.value for x in ast.walk(decorator.args[0]) if isinstance(x, ast.Constant)]
            found |= {"name", "method"}.intersection(said)
    return found


def cases_compared(path: Path) -> list[str]:
    """Return the comparisons of a case's label with a text by which a test, or a fixture, branches.

    To choose cases by their names, where a test is parametrised, is no branch.
    """
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            labels = labels_of(function)
            for compared in conditions(function.body):
                sides = [compared.left, *compared.comparators]
                is_text = any(
                    isinstance(x, ast.Constant) and isinstance(x.value, str)
                    for side in sides
                    for x in ast.walk(side)
                )
                if is_text and labels.intersection(map(ast.unparse, sides)):
                    found.append(f"line {compared.lineno}: {ast.unparse(compared)}")
    return found


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(PACKAGE.parent)))
def test_no_test_branches_on_the_label_of_its_case(path):
    """What differs between cases is a field of the case."""
    assert not cases_compared(path)


def test_branches_on_labels_are_found(tmp_path):
    path = tmp_path / "test_some.py"
    path.write_text(
        "@pytest.mark.parametrize(('name', 'how'), [n for n in NAMES if n != 'mlp'])\n"
        "def test_some(name, how):\n"
        "    size = 1 if name == 'mlp' else 2\n"
        "    if how and name in ('mlp', 'cnn'):\n"
        "        return\n"
        "    assert name == 'mlp'\n"
    )
    assert [x.partition(":")[0] for x in cases_compared(path)] == ["line 3", "line 4"]


EXPERIMENTS = PACKAGE.parent / "experiments"


@pytest.mark.parametrize(
    "path",
    [*FILES, *sorted((EXPERIMENTS / "harness").rglob("*.py"))],
    ids=lambda path: str(path.relative_to(PACKAGE.parent)),
)
def test_nothing_asks_for_a_method_by_its_name(path):
    """What differs between methods is a field of its row in the registry, or of the algorithm."""
    assert not method_names_compared(path)


def functions_of(path: Path) -> Iterator[tuple[str, bool, ast.arguments]]:
    """Yield the name, whether users see it, and the arguments of every function in a file."""
    tree = ast.parse(path.read_text())
    nested = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(outer)
        if inner is not outer
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            name = getattr(node, "name", "lambda")
            is_public = not (name.startswith("_") or name == "lambda" or node in nested)
            yield f"{name}, line {node.lineno}", is_public, node.args


def count(arguments: ast.arguments) -> int:
    """Count the parameters of every kind; *args is one, and so is **kwargs."""
    named = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
    return named + (arguments.vararg is not None) + (arguments.kwarg is not None)


def test_all_kinds_of_parameters_count():
    [function] = ast.parse("def f(a, /, b, c=1, *d, e, g=2, **h): pass").body
    assert count(function.args) == 7


@pytest.mark.parametrize("module", MODULES)
def test_functions_take_few_parameters(module):
    heavy = {
        f"{module}.{name}": number
        for name, is_public, arguments in functions_of(MODULES[module])
        if (number := count(arguments)) > (PUBLIC if is_public else INTERNAL)
    }
    assert not heavy, f"give these a NamedTuple, or options of another function: {heavy}"
