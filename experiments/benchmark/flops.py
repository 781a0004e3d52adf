"""Count FLOPs in traced programs, and measure the rate of large matrix products.

XLA's own count (`cost_analysis`) counts the body of a loop once, whatever its number of rounds.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from experiments.benchmark.measure import Case
from experiments.benchmark.report import MATMUL


class Products(NamedTuple):
    """FLOPs of matrix products, 2 m n k each, and bytes, with each array once a product."""

    flops: float
    bytes: float
    highest: float  # those FLOPs that are asked for in the highest precision


def products(function: Callable[..., Any], *arguments: Any) -> Products:
    """Count the FLOPs of a function's matrix products and the bytes that they read and write.

    Other operations do not count, as if they were fused into the products, nor do products that no
    result needs. The numbers are the same on every backend. The body of a loop without a fixed
    number of rounds counts once. Convolutions must be patches (`fisherjax.nn`). Arguments may be
    shapes.

    Example:
        >>> products(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 5)))
        Products(flops=60.0, bytes=124.0, highest=0.0)
    """
    return Products(*_total(jax.make_jaxpr(function)(*arguments).jaxpr).tolist())


def _total(jaxpr: Any) -> np.ndarray:
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    total = np.zeros(3)
    for equation in needed.eqns:
        arrays = [v.aval for v in (*equation.invars, *equation.outvars)]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = math.prod(arrays[0].shape[axis] for axis in contracted)
            flops = 2 * summed * arrays[-1].size
            is_exact = jax.lax.Precision.HIGHEST in jax.tree.leaves(equation.params["precision"])
            moved = sum(x.size * x.dtype.itemsize for x in arrays)
            total += flops, moved, flops * is_exact
        rounds = equation.params["length"] if equation.primitive.name == "scan" else 1
        inner = jax.tree.leaves([*equation.params.values()], is_leaf=_is_jaxpr)
        total += sum(rounds * _total(getattr(x, "jaxpr", x)) for x in inner if _is_jaxpr(x))
    return total


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def precisions() -> dict[str, Any]:
    """Return the precisions to compare on this backend, with JAX's names of them.

    JAX's default on a recent GPU rounds the factors of float32 products to TensorFloat-32.
    """
    more = {"float32": "float32", "TF32": "tensorfloat32"}
    return {"default": None} | (more if jax.default_backend() != "cpu" else {})


def matmul_cases(size: int | None) -> list[Case]:
    """Return the cases that measure the peak: products of n x n matrices in each precision."""
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    product = jax.jit(jnp.matmul, static_argnames="precision")
    kinds = [(name, precision, jnp.float32) for name, precision in precisions().items()]
    cases = []
    for name, precision, dtype in [*kinds, ("bfloat16", None, jnp.bfloat16)]:
        x = jnp.ones((size, size), dtype)
        run = partial(product, x, x, precision=precision)
        cases.append(Case(f"{MATMUL} {size}, {name}", run, flops=2.0 * size**3, precision=name))
    return cases
