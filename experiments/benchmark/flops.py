"""FLOPs, counted in the traced program, and the rate that large matrix products reach here."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from experiments.benchmark.measure import Case
from experiments.benchmark.report import MATMUL


def count(function: Callable[..., Any], *arguments: Any) -> float:
    """Count the FLOPs of a function's matrix products, 2 m n k each; nothing else counts.

    The trace is counted without what no result needs, as compilers leave it out, so the number is
    the same on every backend. The body of a loop without a fixed number of rounds counts once.
    Convolutions must be patches (`fisherjax.nn`). Shapes do in place of arrays.

    Example:
        >>> count(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 5)))
        60.0
    """
    return _total(jax.make_jaxpr(function)(*arguments).jaxpr, _flops)


def traffic(function: Callable[..., Any], *arguments: Any) -> float:
    """Count the bytes that a function's matrix products read and write, each array once a product.

    What lies between the products is left out, as if it were fused into them: a floor.

    Example:
        >>> traffic(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 5)))
        124.0
    """
    return _total(jax.make_jaxpr(function)(*arguments).jaxpr, _bytes)


def _flops(product: Any) -> float:
    (contracted, _), _ = product.params["dimension_numbers"]
    summed = math.prod(product.invars[0].aval.shape[axis] for axis in contracted)
    return 2.0 * summed * math.prod(product.outvars[0].aval.shape)


def _bytes(product: Any) -> float:
    arrays = [v.aval for v in (*product.invars, *product.outvars)]
    return float(sum(x.size * x.dtype.itemsize for x in arrays))


def _total(jaxpr: Any, of_product: Callable[[Any], float]) -> float:
    needed, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    total = 0.0
    for equation in needed.eqns:
        name, values = equation.primitive.name, list(equation.params.values())
        total += of_product(equation) if name == "dot_general" else 0.0
        rounds = equation.params["length"] if name == "scan" else 1
        inner = filter(_is_jaxpr, jax.tree.leaves(values, is_leaf=_is_jaxpr))
        total += sum(rounds * _total(getattr(x, "jaxpr", x), of_product) for x in inner)
    return total


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")


def precisions() -> dict[str, Any]:
    """Return the precisions worth comparing here, with what `default_matmul_precision` calls them.

    JAX's default on a recent GPU rounds the factors of float32 products to TensorFloat-32.
    """
    if jax.default_backend() == "cpu":
        return {"default": None}
    return {"default": None, "float32": "float32", "TF32": "tensorfloat32"}


def matmul_cases(size: int | None) -> list[Case]:
    """Make the cases that measure the peak, one for each precision: products of n x n matrices."""
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    product = jax.jit(jnp.matmul)

    def case(name: str, precision: Any, dtype: Any) -> Case:
        x = jnp.ones((size, size), dtype)

        def run() -> Any:
            with jax.default_matmul_precision(precision):
                return product(x, x)

        return Case(f"{MATMUL} {size}, {name}", run, flops=2.0 * size**3, precision=name)

    cases = [case(name, precision, jnp.float32) for name, precision in precisions().items()]
    return [*cases, case("bfloat16", None, jnp.bfloat16)]
