"""Compile the library's programs with the options of XLA that each backend needs.

**On a GPU** XLA compiles each matrix product many times over and keeps the fastest kernel. On an
H200 (jaxlib 0.11.2) that was half of the first call of a K-FAC pass over LeNet: 11.0 s, and 5.2 s
with XLA's first choice of kernels (`xla_gpu_autotune_level` 0), whose later calls took 44 ms in
place of 30: some 400 calls pay it back. For this reason programs that a merge runs a few times take
the first choice, and training, rounds and other long loops are autotuned.

**On a CPU** jaxlib 0.10.2 to 0.11.2 miscompile some programs. Since 0.10.2 XLA compiles groups of
operations on a CPU with YNNPACK, one "ynn fusion" per group. Up to 0.11.2, three kinds of such
fusions compute wrong numbers without any error. Versions up to 0.10.1 have no such fusions, and
0.12 compiles them correctly. The three kinds are:

* a batched product with one operand that is broadcast along the batch dimension, fused with the
  operation after it: a sum, a maximum or a pooling window (0.10.2 to 0.11.2);
* a sum of an array that is itself a broadcast: threads that share the sum overwrite each other's
  results, so that every call returns another number (0.10.2 to 0.11.2;
  https://github.com/tensorflow/tensorflow/issues/126812);
* a matrix times more than 32,768 vectors (float64: 16,384), followed by a sum (0.10.2 only;
  https://github.com/jax-ml/jax/issues/39103).

0.10.2 and 0.11.0 also crash when an array with seven or more axes is summed
(https://github.com/jax-ml/jax/issues/39257).

The library avoids them in three ways:

1. It contains no such programs itself: its convolution is a single product of patches
   (`nn.convolution`), which is as fast as a product in groups.
2. A user's network can still contain one, for instance attention with learned queries that are
   broadcast over the batch. Therefore `jit`, which compiles every program of the library, allows
   only single products to be compiled with YNNPACK on these versions. This is an option of each
   program: neither the environment nor any other program changes.
3. JAX refuses such options inside another transformation. When a user's own `jit`, `vmap` or `grad`
   calls a function of the library, the user's call decides how the program is compiled, and the
   first such call warns. `disable_faulty_fusion` sets the option for the whole process.

These versions are not excluded, because 0.10.2 is the newest one for Python 3.11 and most
environments have one of them. The option costs no time: on jaxlib 0.10.2, training, the K-FAC pass,
the merge and the accuracies of LeNet and the training of the CNN took 0.95 to 1.01 times as long
with it as without.
"""

import contextlib
import contextvars
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
import jaxlib
from jax.extend.core import jaxpr_as_fun

# These versions are released, so the private names of JAX that this file uses cannot change.
IS_AFFECTED = (0, 10, 2) <= jaxlib.version.__version_info__[:3] < (0, 12)
_NAME = "xla_cpu_experimental_ynn_fusion_type"
FLAG = f"--{_NAME}=individual_dot"
_CPU_OPTIONS = {_NAME: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
_AUTOTUNE = "xla_gpu_autotune_level"
_GPU_OPTIONS = {_AUTOTUNE: 0}
CURE = (
    "call fisherjax.devices.disable_faulty_fusion() before JAX computes anything, or set "
    f"XLA_FLAGS={FLAG}, or install jaxlib 0.12 (Python 3.12 or later) or 0.10.1"
)

# True while a program of the library is traced: functions that it calls become a part of it.
_WITHIN: contextvars.ContextVar[bool] = contextvars.ContextVar("fisherjax_within", default=False)


Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")
Result = TypeVar("Result", covariant=True)


class Compiled(Protocol[Arguments, Result]):
    """A compiled function, which has the arguments of the original one."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Run the function."""
        ...

    def lower(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> jax.stages.Lowered:
        """Return the program for these arguments before it is compiled."""
        ...


def jit(
    function: Callable[Arguments, Returned], *, autotune: bool = False, **settings: Any
) -> Compiled[Arguments, Returned]:
    """Compile a function as `jax.jit` does, with the options that the backend needs.

    Args:
        function: The function to compile.
        autotune: Whether the compiler of a GPU tries several kernels for each matrix product. Only
            programs that run hundreds of times win by it. What XLA_FLAGS says of it holds for all.
        **settings: Keyword arguments of `jax.jit`.

    Returns:
        The compiled function. It can be called and has a method `lower`, but no other attributes of
        a function that `jax.jit` returns.

    Example:
        >>> float(jit(lambda x: x + 1)(1.0))
        2.0
    """
    plain = jax.jit(function, **settings)
    on_cpu = jax.jit(function, compiler_options=_CPU_OPTIONS, **settings) if IS_AFFECTED else plain
    on_gpu = plain if autotune else jax.jit(function, compiler_options=_GPU_OPTIONS, **settings)

    def select() -> Any:
        backend = jax.default_backend()
        if not _is_outermost():
            _warn_where_needed(backend)
            return plain
        if backend == "gpu" and _AUTOTUNE not in os.environ.get("XLA_FLAGS", ""):
            return on_gpu
        # Other backends may refuse an option of the CPU compiler.
        return on_cpu if backend == "cpu" else plain

    def run(*args: Any, **kwargs: Any) -> Any:
        compiled = select()
        with _within():
            return compiled(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        compiled = select()
        with _within():
            return compiled.lower(*args, **kwargs)

    wrapper: Any = functools.wraps(function)(run)
    wrapper.lower = lower
    return wrapper


def eval_shape(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return the shapes of a function's results as `jax.eval_shape` does, without compiling it."""
    with _within():
        return jax.eval_shape(function, *args, **kwargs)


def trace_once(function: Callable, *args: Any) -> tuple[Callable, Any]:
    """Trace a function for arguments of these shapes; return it as traced, and its results' shapes.

    A loop over sums starts from zeros of the shapes of its body's results. To ask for the shapes
    and then to trace the body would run the network's Python code twice, which takes most of the
    time of a first call whose programs are in the persistent cache.

    Example:
        >>> double, shape = trace_once(lambda x: 2 * x, jax.ShapeDtypeStruct((), "float32"))
        >>> float(double(1.0)), shape.shape
        (2.0, ())
    """
    with _within():
        equations, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    flat, structure = jaxpr_as_fun(equations), jax.tree.structure(shapes)

    def traced(*args: Any) -> Any:
        return structure.unflatten(flat(*jax.tree.leaves(args)))

    return traced, shapes


def disable_faulty_fusion() -> None:
    """Set the XLA flag for the whole process; see `devices.disable_faulty_fusion`."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not IS_AFFECTED or _NAME in flags:
        return
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "JAX has already started and no longer reads XLA_FLAGS. Call "
            "fisherjax.devices.disable_faulty_fusion() before JAX computes anything, or set "
            f"XLA_FLAGS={FLAG} before Python starts."
        )
    os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


@contextlib.contextmanager
def _within() -> Iterator[None]:
    token = _WITHIN.set(True)
    try:
        # The library adds numbers of several dtypes and ranks, whatever JAX forbids the user's own.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    finally:
        _WITHIN.reset(token)


def _is_outermost() -> bool:
    """Return whether no transformation is active: only then does JAX accept compiler options."""
    from jax._src import core

    return core.trace_state_clean()


def _warn_where_needed(backend: str) -> None:
    is_safe = not IS_AFFECTED or backend != "cpu" or _NAME in os.environ.get("XLA_FLAGS", "")
    if not is_safe and not _WITHIN.get():
        _warn_once()


@functools.cache
def _warn_once() -> None:
    # The warning names the user's line, the first one outside this package. Code that `exec` runs
    # may have no module name.
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("fisherjax."):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "A function of fisherjax is called inside your own jit, vmap, grad or loop, but jaxlib "
        f"{jaxlib.version.__version__} miscompiles some programs on a CPU without an error "
        f"(products with a broadcast operand, sums of broadcasts). To be safe, {CURE}.",
        stacklevel=level,
    )
