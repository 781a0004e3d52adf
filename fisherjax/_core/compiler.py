"""Keep the library right on jaxlib 0.10.2 to 0.11.2, whose CPU compiler miscompiles some programs.

Since jaxlib 0.10.2 XLA hands groups of operations on a CPU to YNNPACK, one "ynn fusion" a group.
Up to 0.11.2 three kinds of such fusions give wrong numbers without any error (0.10.1 and older
versions have no such fusions, 0.12 has them right):

* a product with a batch dimension of which one operand is a broadcast along that dimension, fused
  with what follows: a sum, a maximum, a window of pooling (0.10.2 to 0.11.2);
* a sum over an array that is itself a broadcast, divided among threads that overwrite each other's
  results, so that every call gives another number (0.10.2 to 0.11.2;
  https://github.com/tensorflow/tensorflow/issues/126812);
* a matrix times more than 32,768 vectors (float64: 16,384), followed by a sum (0.10.2 only;
  https://github.com/jax-ml/jax/issues/39103).

0.10.2 and 0.11.0 also crash where an array of seven or more axes is summed
(https://github.com/jax-ml/jax/issues/39257).

What is done about it, and why:

1. The library itself does not write such programs: its convolution is a single product of patches
   (`nn.convolution`), which is as fast as the product in groups that it was.
2. That does not help a network that somebody else wrote, for instance one whose attention has
   learned queries, broadcast over the batch. So `jit`, which compiles every program of the
   library, allows only single products to go to YNNPACK on these versions. It is an option of each
   program: neither the environment nor any other program changes.
3. JAX refuses such options inside another transformation. Where a function of the library is called
   inside a user's own `jit`, `vmap` or `grad`, whoever compiles that program decides, and the first
   such call warns. `disable_faulty_fusion` then makes the choice for the whole process.

Excluding the versions would have been simpler. But 0.10.2 is the newest that Python 3.11 has, so
that most environments hold one of them. And the option costs nothing: with and without it in turn,
on jaxlib 0.10.2, training, the K-FAC pass, the merge and the accuracies of LeNet and the training
of the CNN took 0.95 to 1.01 times as long.
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

# The versions are all released: names in JAX's private modules that this file uses cannot change.
IS_AFFECTED = (0, 10, 2) <= jaxlib.version.__version_info__[:3] < (0, 12)
_NAME = "xla_cpu_experimental_ynn_fusion_type"
FLAG = f"--{_NAME}=individual_dot"
_OPTIONS = {_NAME: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
CURE = (
    "call fisherjax.devices.disable_faulty_fusion() before JAX computes anything, or set "
    f"XLA_FLAGS={FLAG}, or install jaxlib 0.12 (Python 3.12 or later) or 0.10.1"
)

# True while a program of the library is traced: what it calls is compiled as a part of it.
_WITHIN: contextvars.ContextVar[bool] = contextvars.ContextVar("fisherjax_within", default=False)


Given = ParamSpec("Given")
Returned = TypeVar("Returned")
Result = TypeVar("Result", covariant=True)


class Compiled(Protocol[Given, Result]):
    """A compiled function, called and lowered with the arguments of the function it was made of."""

    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Compute the result."""
        ...

    def lower(self, *args: Given.args, **kwargs: Given.kwargs) -> jax.stages.Lowered:
        """Return the program for these arguments, not yet compiled."""
        ...


def jit(function: Callable[Given, Returned], **settings: Any) -> Compiled[Given, Returned]:
    """Compile a function as `jax.jit` does, without fusions that this version gets wrong.

    Args:
        function: What to compile.
        **settings: Those of `jax.jit`.

    Returns:
        The compiled function. On affected versions it is called and lowered like that of `jax.jit`,
        and has nothing else of it.

    Example:
        >>> float(jit(lambda x: x + 1)(1.0))
        2.0
    """
    plain = jax.jit(function, **settings)
    if not IS_AFFECTED:
        return plain
    careful = jax.jit(function, compiler_options=_OPTIONS, **settings)

    def chosen() -> Any:
        if _is_outermost() and _is_on_cpu():
            return careful
        _warn_where_needed()
        return plain

    def run(*args: Any, **kwargs: Any) -> Any:
        compiled = chosen()
        with _within():
            return compiled(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        compiled = chosen()
        with _within():
            return compiled.lower(*args, **kwargs)

    either: Any = functools.wraps(function)(run)
    either.lower = lower
    return either


def eval_shape(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Compute the shapes of a function's results as `jax.eval_shape` does; nothing is compiled."""
    with _within():
        return jax.eval_shape(function, *args, **kwargs)


def disable_faulty_fusion() -> None:
    """Set the XLA flag for the whole process; see `devices.disable_faulty_fusion`."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not IS_AFFECTED or _NAME in flags:
        return
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "JAX has begun already, and no longer reads XLA_FLAGS. Call "
            "fisherjax.devices.disable_faulty_fusion() before JAX computes anything, or set "
            f"XLA_FLAGS={FLAG} before Python starts."
        )
    os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


@contextlib.contextmanager
def _within() -> Iterator[None]:
    token = _WITHIN.set(True)
    try:
        yield
    finally:
        _WITHIN.reset(token)


def _is_outermost() -> bool:
    """Check that no transformation is under way: JAX takes options of such a program alone."""
    from jax._src import core

    return core.trace_state_clean()


def _is_on_cpu() -> bool:
    # Other backends may refuse an option of the CPU's.
    return jax.default_backend() == "cpu"


def _warn_where_needed() -> None:
    if not _WITHIN.get() and _NAME not in os.environ.get("XLA_FLAGS", "") and _is_on_cpu():
        _warn_once()


@functools.cache
def _warn_once() -> None:
    # The line that is named is the first outside this package, where the user called it; what
    # `exec` runs may be in no module.
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("fisherjax."):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "A function of fisherjax is called inside your own jit, vmap, grad or loop, and jaxlib "
        f"{jaxlib.version.__version__} miscompiles some programs on a CPU without an error "
        f"(products with a broadcast operand, sums of broadcasts). To be safe, {CURE}.",
        stacklevel=level,
    )
