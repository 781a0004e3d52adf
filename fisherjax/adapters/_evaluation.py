"""Evaluate a network with low-rank changes of its kernels, without forming the changed kernels."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from fisherjax import leaves
from fisherjax._core import compat
from fisherjax.adapters.base import Adapter
from fisherjax.fisher.operators import PRECISION
from fisherjax.typing import Array, Params

_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}


class Changed(NamedTuple):
    """A kernel [n, m] and the factors [n, r] and [m, r] of its change."""

    kernel: Array
    left: Array
    right: Array

    @classmethod
    def by(cls, kernel: Array, adapter: Adapter, is_transposed: bool) -> "Changed":
        """Return a kernel [inputs, outputs], or its transpose, with the change of an adapter."""
        sides = jnp.asarray(adapter.a.T), jnp.asarray(adapter.b * adapter.scale)
        return cls(kernel, *(sides[::-1] if is_transposed else sides))

    def whole(self) -> Array:
        """Return the changed kernel."""
        return self.kernel + jnp.matmul(self.left, self.right.T, precision=PRECISION)


def evaluate(function: Callable, params: Params, changes: Mapping[str, Changed], *rest: Any) -> Any:
    """Evaluate function(params, *rest) with changes of some leaves of params, by name.

    A product with a changed kernel adds two thin products. Another operation with it, such as the
    lookup of a row or a loop around it, forms the changed kernel.
    """
    program, shape = jax.make_jaxpr(function, return_shape=True)(params, *rest)
    changed = jax.tree.leaves(
        leaves.replace(params, dict(changes)), is_leaf=lambda x: isinstance(x, Changed)
    )
    found = _run(program.jaxpr, program.consts, [*changed, *jax.tree.leaves(rest)])
    # A function that returns a kernel, as among running statistics, returns that of the base.
    found = [x.kernel if isinstance(x, Changed) else x for x in found]
    return jax.tree.unflatten(jax.tree.structure(shape), found)


def _run(jaxpr: Any, constants: list[Any], arguments: list[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        values |= dict(zip(equation.outvars, _results(equation, operands), strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _results(equation: Any, operands: list[Any]) -> list[Any]:
    places = [i for i, x in enumerate(operands) if isinstance(x, Changed)]
    name, settings = equation.primitive.name, equation.params
    if places and name in _CALLS:
        inner = settings.get("jaxpr", settings.get("call_jaxpr"))
        # The body of a rematerialised function is an open jaxpr, without constants.
        body, constants = getattr(inner, "jaxpr", inner), getattr(inner, "consts", [])
        return _run(body, constants, operands)
    if places and name == "transpose" and tuple(settings["permutation"]) == (1, 0):
        kernel, left, right = operands[0]
        return [Changed(kernel.T, right, left)]
    if len(places) == 1 and name == "dot_general" and _is_plain(settings, places[0]):
        return [_product(equation, operands, places[0])]
    operands = [x.whole() if isinstance(x, Changed) else x for x in operands]
    return compat.evaluate(equation, operands)


def _is_plain(settings: Mapping[str, Any], place: int) -> bool:
    """Return whether a product contracts one axis of the kernel, and has no batch axes."""
    contracted, batch = settings["dimension_numbers"]
    return len(contracted[place]) == 1 and not batch[place]


def _product(equation: Any, operands: list[Any], place: int) -> Array:
    """Multiply by the kernel, and by its change from the contracted side to the other one."""
    kernel, *factors = operands[place]
    [result] = compat.evaluate(
        equation, [kernel if i == place else x for i, x in enumerate(operands)]
    )
    contracted, _ = equation.params["dimension_numbers"]
    axis = contracted[place][0]
    near, far, other = factors[axis], factors[1 - axis], operands[1 - place]
    where = contracted[1 - place][0]
    how = {"precision": equation.params["precision"]}
    # [..., r], with the axes of the other operand in their order.
    thin = jnp.tensordot(other, near.astype(other.dtype), ((where,), (0,)), **how)
    change = jnp.tensordot(thin, far.astype(other.dtype), ((thin.ndim - 1,), (1,)), **how)
    # The kernel's axis comes first in the result if the kernel is the first operand.
    return result + jnp.moveaxis(change, -1, 0 if place == 0 else -1).astype(result.dtype)
