"""What keeps kfac-jax 0.0.8 running on current JAX: the one place that touches its inside.

kfac-jax 0.0.8, the newest release, is older than three changes of JAX. Only its own modules are
changed: `jax` stays as it is, but for two names lent to it while kfac-jax is imported. When
`tests/core/test_compat.py` says so, a newer kfac-jax needs none of this, and the file can go.
"""

import contextlib
import functools
import importlib.metadata
import re
import sys
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.core
import jax.extend as jex
import jax.extend.core
import jax.extend.source_info_util

_KFAC_JAX = importlib.metadata.version("kfac-jax")
# The names that kfac-jax takes from jax.core and jax 0.11 has in jax.extend.core alone.
_READ_AT_IMPORT = "DebugInfo", "Effects"
_READ_LATER = "DropVar", "gensym", "new_jaxpr_eqn", "no_effects", "unsafe_get_axis_names_DO_NOT_USE"


def is_patch_needed(jax_version: str = jax.__version__, kfac_jax_version: str = _KFAC_JAX) -> bool:
    """Say whether these versions, such as "0.10.2" and "0.0.8", need any patch.

    Example:
        >>> is_patch_needed("0.9.1", "0.0.8"), is_patch_needed("0.12.0", "0.0.8")
        (False, True)
    """
    return _numbers(jax_version) >= (0, 9, 2) and _numbers(kfac_jax_version) <= (0, 0, 8)


@functools.cache
def import_kfac_jax() -> ModuleType:
    """Import kfac-jax such that it runs on this version of JAX; the same module every time.

    Raises:
        ImportError: If kfac-jax, or a package that it imports, fails; it says which and why.
    """
    moved = is_patch_needed() and _numbers(jax.__version__) >= (0, 11)
    try:
        with _lend_names() if moved else contextlib.nullcontext():
            import kfac_jax
    # Of any type: what is too old for this jax fails as it looks for names that jax had.
    except Exception as error:
        raise ImportError(_import_failure(error)) from error
    if moved:
        _patch_core()
    if is_patch_needed():
        kfac_jax.tag_graph_matcher.eval_jaxpr_eqn = _evaluate_equation
    return kfac_jax


def evaluate(equation: Any, inputs: list[Any]) -> list[Any]:
    """Compute the outputs of one equation of a traced function, on any version of JAX."""
    return import_kfac_jax().tag_graph_matcher.eval_jaxpr_eqn(equation, inputs)


def scan_parts(parameters: dict[str, Any]) -> tuple[int, int]:
    """Give how many of a scan's operands are constants, and how many are its carry."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    # Since jax 0.12 a tree of three parts.
    constants, carry, _ = parameters["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


def _evaluate_equation(equation: Any, inputs: list[Any]) -> list[Any]:
    """Compute the outputs of one equation of a traced function, as kfac-jax does one by one.

    Since jax 0.9.2 `Primitive.get_bind_params` returns the keyword arguments of `bind` alone, where
    it used to return a pair (functions, keyword arguments), which kfac-jax unpacks.
    """
    parameters = equation.primitive.get_bind_params(equation.params)
    with jex.source_info_util.user_context(equation.source_info.traceback):
        outputs = equation.primitive.bind(*inputs, **parameters)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _import_failure(error: Exception) -> str:
    """Say which package of those that kfac-jax imports failed, in which version, and the remedy."""
    modules = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    packages = [module.partition(".")[0] for module in modules]
    # The innermost that is neither Python's own nor jax, which only lacks what that looks for.
    others = [
        p for p in packages if p not in {*sys.stdlib_module_names, "jax", "jaxlib", "fisherjax"}
    ]
    name = (isinstance(error, ModuleNotFoundError) and error.name) or (others or ["kfac_jax"])[-1]
    package = name.partition(".")[0]
    found = importlib.metadata.packages_distributions().get(package, ())
    versions = [f"{one} {importlib.metadata.version(one)}" for one in found]
    install = (found or [package.replace("_", "-")])[0]
    return (
        f"kfac-jax {_KFAC_JAX}, which finds the layers of networks, could not be imported: package "
        f"{package} ({', '.join(versions) or 'of no installed distribution'}) fails on jax "
        f"{jax.__version__} with {type(error).__name__}: {error}. Try `pip install -U {install}`, "
        "or install a version of it that was made for this jax."
    )


@contextlib.contextmanager
def _lend_names() -> Iterator[None]:
    """Give `jax.core` the two names that kfac-jax reads while it is imported; then take them back.

    Since jax 0.11 they are in `jax.extend.core` alone. kfac-jax's modules can be patched only once
    they are imported, which is too late for these.
    """
    lent = [name for name in _READ_AT_IMPORT if not hasattr(jax.core, name)]
    for name in lent:
        setattr(jax.core, name, getattr(jex.core, name))
    try:
        yield
    finally:
        for name in lent:
            delattr(jax.core, name)


def _patch_core() -> None:
    """Show kfac-jax a `jax.core` as it was before jax 0.11, with the names it reads as it runs.

    Jaxpr and ClosedJaxpr are one class since, which takes no argument called `jaxpr`. And kfac-jax,
    which tells an open Jaxpr from a closed one by its class, would close a closed one again, and
    lose its constants.
    """
    from kfac_jax._src import layers_and_loss_tags, tag_graph_matcher, tracer
    from kfac_jax._src.utils import parallel

    def close(jaxpr: Any, consts: list[Any]) -> Any:
        return jex.core.ClosedJaxpr(jaxpr, consts)

    core = _view(jax.core, **{name: getattr(jex.core, name) for name in _READ_LATER})
    _set(parallel, core=core)
    for module in (layers_and_loss_tags, tag_graph_matcher):
        _set(module, jax=_view(jax, core=core))
    _set(tag_graph_matcher, to_closed_jaxpr=lambda jaxpr: jaxpr, ClosedJaxpr=close)
    _set(tracer, jex=_view(jex, core=_view(jex.core, ClosedJaxpr=close)))


def _set(module: ModuleType, **names: Any) -> None:
    vars(module).update(names)


def _view(module: ModuleType, **names: Any) -> ModuleType:
    """Return a module that has `names`, and for every other name what `module` has."""
    view = ModuleType(module.__name__)
    vars(view).update(names, __getattr__=functools.partial(getattr, module))
    return view


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release's first three numbers: (0, 10, 2) for "0.10.2.dev1"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
