"""Patch kfac-jax 0.0.8, so that it runs on current JAX and always traces the same program.

kfac-jax 0.0.8, the newest release, is older than three changes of JAX, and on every version it
writes the equations of a program in the order of addresses in memory. It also imports distrax, and
with it TensorFlow Probability, for distributions that nothing here asks for; they are imported when
something does. The patches change only the modules of kfac-jax; `jax` gets two names while kfac-jax
is imported and loses them afterwards. No other file touches the internals of kfac-jax. A test in
`tests/core/test_compat.py` fails once a newer kfac-jax needs no patch; then remove this file.
"""

import collections
import contextlib
import functools
import importlib
import importlib.metadata
import re
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.core
import jax.extend as jex
import jax.extend.core
import jax.extend.source_info_util

_KFAC_JAX = importlib.metadata.version("kfac-jax")
_DISTRAX = "distrax"
# Names that kfac-jax reads from jax.core, but that jax 0.11 has only in jax.extend.core.
_READ_AT_IMPORT = "DebugInfo", "Effects"
_READ_LATER = "DropVar", "gensym", "new_jaxpr_eqn", "no_effects", "unsafe_get_axis_names_DO_NOT_USE"


def is_patch_needed(jax_version: str = jax.__version__, kfac_jax_version: str = _KFAC_JAX) -> bool:
    """Return whether kfac-jax fails without a patch, for versions such as "0.10.2" and "0.0.8".

    Example:
        >>> is_patch_needed("0.9.1", "0.0.8"), is_patch_needed("0.12.0", "0.0.8")
        (False, True)
    """
    return _numbers(jax_version) >= (0, 9, 2) and _numbers(kfac_jax_version) <= (0, 0, 8)


@functools.cache
def import_kfac_jax() -> ModuleType:
    """Import kfac-jax and patch it for this version of JAX; every call returns the same module.

    Raises:
        ImportError: If kfac-jax, or a package that it imports, fails; the message names both.
    """
    moved = is_patch_needed() and _numbers(jax.__version__) >= (0, 11)
    try:
        with _names_at_import() if moved else contextlib.nullcontext(), _without_distrax():
            import kfac_jax
    # A package that is too old for this jax may raise an error of any type.
    except Exception as error:
        raise ImportError(_import_failure(error)) from error
    if moved:
        _patch_core()
    if is_patch_needed():
        kfac_jax.tag_graph_matcher.eval_jaxpr_eqn = _evaluate_equation
    if _numbers(_KFAC_JAX) <= (0, 0, 8):
        _patch_order()
    return kfac_jax


def evaluate(equation: Any, inputs: list[Any]) -> list[Any]:
    """Compute the outputs of one equation of a traced function, on any version of JAX."""
    return import_kfac_jax().tag_graph_matcher.eval_jaxpr_eqn(equation, inputs)


def scan_parts(parameters: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a scan are constants, and how many are its carry."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    # Since jax 0.12 the parameters hold a tree of three parts instead.
    constants, carry, _ = parameters["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


def _evaluate_equation(equation: Any, inputs: list[Any]) -> list[Any]:
    """Compute the outputs of one equation of a traced function; replaces kfac-jax's function.

    Since jax 0.9.2, `Primitive.get_bind_params` returns only the keyword arguments of `bind`. It
    used to return a pair (functions, keyword arguments), which kfac-jax unpacks.
    """
    parameters = equation.primitive.get_bind_params(equation.params)
    with jex.source_info_util.user_context(equation.source_info.traceback):
        outputs = equation.primitive.bind(*inputs, **parameters)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _import_failure(error: Exception) -> str:
    """Return a message with the package that failed to import, its version and the remedy."""
    modules = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    packages = [module.partition(".")[0] for module in modules]
    # The innermost package is to blame, except Python's own modules and jax, which only lacks a
    # name that the package looks for.
    ours = {*sys.stdlib_module_names, "jax", "jaxlib", "fisherjax"}
    others = [package for package in packages if package not in ours]
    name = (isinstance(error, ModuleNotFoundError) and error.name) or (others or ["kfac_jax"])[-1]
    package = name.partition(".")[0]
    distributions = importlib.metadata.packages_distributions().get(package, ())
    versions = [f"{one} {importlib.metadata.version(one)}" for one in distributions]
    install = (distributions or [package.replace("_", "-")])[0]
    return (
        f"kfac-jax {_KFAC_JAX}, which finds the layers of networks, could not be imported: package "
        f"{package} ({', '.join(versions) or 'of no installed distribution'}) fails on jax "
        f"{jax.__version__} with {type(error).__name__}: {error}. Try `pip install -U {install}`, "
        "or install a version of it that supports this jax."
    )


@contextlib.contextmanager
def _names_at_import() -> Iterator[None]:
    """Add to `jax.core` the two names that kfac-jax reads while it is imported; then remove them.

    Since jax 0.11 they are only in `jax.extend.core`. kfac-jax's modules can be patched only after
    they are imported, which is too late for these names.
    """
    added = [name for name in _READ_AT_IMPORT if not hasattr(jax.core, name)]
    for name in added:
        setattr(jax.core, name, getattr(jex.core, name))
    try:
        yield
    finally:
        for name in added:
            delattr(jax.core, name)


@contextlib.contextmanager
def _without_distrax() -> Iterator[None]:
    """Let kfac-jax import distrax only when a distribution is asked of one of its losses.

    Importing it takes two thirds of the time that kfac-jax takes, and TensorFlow Probability fails
    to import on a new JAX before anything else does.
    """
    if _DISTRAX in sys.modules or "kfac_jax" in sys.modules or _numbers(_KFAC_JAX) > (0, 0, 8):
        yield
        return
    # Classes of that name serve in annotations, which Python evaluates at once.
    sys.modules[_DISTRAX] = stand_in = _module(_DISTRAX, lambda name: type(name, (), {}))
    try:
        yield
    finally:
        if sys.modules.get(_DISTRAX) is stand_in:
            del sys.modules[_DISTRAX]
    from kfac_jax._src import loss_functions

    later = _module(_DISTRAX, lambda name: getattr(importlib.import_module(_DISTRAX), name))
    _set(loss_functions, distrax=later)


def _patch_core() -> None:
    """Replace `jax.core` in kfac-jax's modules by one with the names that jax 0.11 removed.

    Since jax 0.11, Jaxpr and ClosedJaxpr are one class, which takes no argument called `jaxpr`.
    kfac-jax distinguishes open and closed jaxprs by their class; without the patch it would close a
    closed one again and lose its constants.
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


def _patch_order() -> None:
    """Let kfac-jax keep the variables of a traced function in the order of its equations.

    It collects the variables at layers in a set, and maps variables to values in a dict whose keys
    are their addresses, which JAX sorts. Both orders decide where equations stand, so that every
    process would trace another program, which no cache of compiled programs contains.
    """
    from kfac_jax._src import tracer

    _set(tracer, set=_set_in_order, VarMap=SimpleNamespace(create=collections.OrderedDict))


def _set_in_order(members: Iterable[Hashable] = ()) -> AbstractSet:
    """Return a set whose members stay in order; an empty set has all the methods of `set`."""
    return dict.fromkeys(members).keys() or set()


def _set(module: ModuleType, **names: Any) -> None:
    vars(module).update(names)


def _view(module: ModuleType, **names: Any) -> ModuleType:
    """Return a module with these names, which looks up all other names in `module`."""
    view = _module(module.__name__, functools.partial(getattr, module))
    _set(view, **names)
    return view


def _module(name: str, look_up: Callable[[str], Any]) -> ModuleType:
    """Return a module whose names are looked up by a function."""
    module = ModuleType(name)
    _set(module, __getattr__=look_up)
    return module


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version: (0, 10, 2) for "0.10.2.dev1"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
