"""FedFisher with K-FAC from sums of sketches, which do not disclose a client's factors.

Kronecker factors cannot be added up, but the server's operator is a sum: reordered (Van Loan and
Pitsianis, 1993), a layer of all clients is R = sum_i p_i vec(A_i) vec(G_i)^T, whose rank is at most
the number of clients. Sketches of R from both sides can be added up, and determine a matrix of
small rank.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks, linalg
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax._layers.layer import Layer
from fisherjax.algorithms._fisher_updates import fisher_summary, link_of, plain_sum, solve_sums
from fisherjax.algorithms.base import FISHER_EXAMPLES, Algorithm, weighted_sum
from fisherjax.fisher import Kronecker, KroneckerSum, automatic, kfac
from fisherjax.fisher.kinds import Kind
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.quadratic import Sums
from fisherjax.solvers.base import Info, Solver
from fisherjax.typing import Array, Centre, Key, Model, Params, Scalar

# Number of rows of the left sketch beyond the number of columns of the right one.
_EXTRA = 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Sketches:
    """Sums over clients with weights w_i, from which the server recovers its operator.

    Vectors u and v hold the triangles of A and G, off-diagonal entries times sqrt(2), or the
    diagonal of an A that is diagonal. A layer with groups has sketches of each, on a leading axis.

    Attributes:
        columns: Y = sum_i w_i u_i (v_i^T Omega), [size of u, k], by layer.
        rows: Z = sum_i w_i (Psi u_i) v_i^T, [k + 5, size of v], by layer.
        entries: sum_i w_i f_i, entries of leaves without Kronecker factors.
        product: sum_i w_i A_i V_i G_i, by block.
        mean: sum_i w_i V_i, or the plain sum over the clients with a weight, by block.
        weight: sum_i w_i.
        count: Number of clients with a weight, if `mean` is a plain sum; None otherwise.
        layers: Layers of the operators, static.
        template: Structure of params, static.
    """

    columns: dict[str, Array]
    rows: dict[str, Array]
    entries: dict[str, Array]
    product: dict[str, Array]
    mean: dict[str, Array]
    weight: Array
    count: Array | None
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    template: Template = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        """Describe the sums in one line."""
        return tree.describe("Sketches", self, f"of {tree.count(len(self.layers), 'layer')}")


@cached
def fedfisher_sketched(
    model: Model,
    *,
    terms: int = 5,
    seed: int = 0,
    fisher: Callable[..., Kronecker] = kfac,
    kind: Kind = automatic,
    damping: Scalar = Kronecker.default_damping,
    centre: Centre = "mean",
    solver: Solver | None = None,
    batch_size: int = 64,
    max_examples: int | None = FISHER_EXAMPLES,
) -> Algorithm[Info]:
    """Make FedFisher with K-FAC whose server needs only sums of sketches over clients.

        R = sum_i p_i u_i v_i^T,   Y = R Omega,   Z = Psi R,   R = Q (Psi Q)^+ Z,   Y = Q T,

    for each layer, where u and v are the triangles of A and G as vectors, and Omega [size of v, k]
    and Psi [k + 5, size of u] are drawn from a common seed. If k is at least the number of clients,
    the server recovers exactly sum_i p_i A_i (x) G_i, as k terms that are not the clients' own; if
    k is smaller, an approximation of rank k. Clients compute the same as for `fedfisher`; streaming
    or `secure_aggregation` adds up the result of `reduce` for each client.

    Args:
        model: The network and the likelihood of its outputs.
        terms: Rank k of the recovered operator; at least the number of clients for an exact one. A
            layer needs k times the triangle of A and k + 5 times that of G.
        seed: Seed of Omega and Psi; public.
        fisher: `fisher.kfac`, or a `functools.partial` of it.
        kind: As in `fedfisher`.
        damping: Damping in units of each block's mean eigenvalue, as in `fedfisher`. The recovered
            operator is indefinite by rounding errors, and more so with few terms; damping
            compensates that.
        centre: As in `fedfisher`.
        solver: Solver of the server's system (default `solvers.conjugate_gradients()`),
            preconditioned by the Kronecker product that is nearest to the operator.
        batch_size: Minibatch size of the Fisher pass.
        max_examples: As in `fedfisher`.

    Returns:
        The algorithm. Updates are those of `fedfisher`, of which the server needs only sums.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument has the wrong type; on merging, if updates have no Kronecker
            factors.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.zeros((2, 1))), [[0], [1]])
        >>> models, key = [jnp.zeros((2, 1)), jnp.ones((2, 1))], jax.random.key(0)
        >>> merged = []
        >>> for method in (fj.algorithms.fedfisher(model), fedfisher_sketched(model, terms=2)):
        ...     updates = fj.merging.summarize(method, models, federation, key=key)
        ...     merged.append(fj.merging.merge(method, models[0], updates)[0])
        >>> [[f"{x:.3f}" for x in own.ravel()] for own in merged]
        [['0.250', '0.750'], ['0.250', '0.750']]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, equation 7; Tropp, Yurtsever, Udell,
        Cevher, Practical sketching algorithms for low-rank matrix approximation, SIAM Journal on
        Matrix Analysis and Applications 2017, algorithm 4. Deviations: the first column of Omega
        and the first row of Psi are the identity, so that the first term is a mean of factors and
        not a difference; the other ones are Gaussian.
    """
    summarize, sent = fisher_summary(model, fisher, kind, batch_size, max_examples)
    checks.count("terms", terms)
    checks.instance("seed", seed, int, "an integer")
    checks.number("damping", damping)
    link = link_of(centre)
    merge_sums = solve_sums(solver, damping, centre)

    def reduce(updates: dict[str, Any], weights: Array) -> Sketches:
        checks.instance("the Fisher information", updates["fisher"], Kronecker, "that of kfac")
        plain = centre == "sum"
        return _sketched(terms, seed, plain, updates["fisher"], updates["params"], weights)

    def aggregate(key: Key, sums: Sketches, params: Params, state: Any, cohort: Array) -> tuple:
        return merge_sums(key, _recovered(seed, sums), params, state, cohort)

    return Algorithm(summarize, aggregate, reduce, kind=sent, model=model, link=link)


@partial(jit, static_argnums=(0, 1, 2))
def _sketched(
    terms: int, seed: int, plain: bool, fisher: Kronecker, params: Params, weights: Array
) -> Sketches:
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves((fisher, params)))
    # Products of a client without weight may overflow, and zero times infinity is NaN.
    present = tree.where(weights != 0, (fisher, params))
    fisher, params = jax.tree.map(lambda x: x.astype(dtype), present)
    blocks = jax.vmap(Kronecker.blocks)(fisher, params)
    columns, rows = {}, {}

    def sketch(number: int, factor: dict[str, Array]) -> tuple[Array, Array]:
        u, v = (jax.vmap(_packed)(factor[side]) for side in ("input", "output"))
        left, right = _projections(seed, number, terms, factor)
        weighted = u * weights.astype(dtype)[:, None]
        return (
            _product(weighted.T, _product(v, right.T)),
            _product(_product(weighted, left.T).T, v),
        )

    for number, (name, factor) in enumerate(fisher.factors.items()):
        one = partial(sketch, number)
        # Each group of a layer, the axis behind the clients, has sketches of its own.
        grouped = factor["output"].ndim == 4
        columns[name], rows[name] = jax.vmap(one, 1)(factor) if grouped else one(factor)
    added = (fisher.entries, jax.vmap(Kronecker.block_mv)(fisher, blocks))
    entries, product = tree.weighted_sum(added, weights)
    mean, weight = (plain_sum if plain else weighted_sum)(blocks, weights)
    known = weights.sum(), weight if plain else None, fisher.layers, fisher.template
    return Sketches(columns, rows, entries, product, mean, *known)


@partial(jit, static_argnums=0)
def _recovered(seed: int, sums: Sketches) -> Sums:
    weight = jnp.where(sums.weight > 0, sums.weight, 1)

    def mean(values: Any) -> Any:
        return jax.tree.map(lambda x: x / weight.astype(x.dtype), values)

    factors, number_of_terms = {}, 1
    for number, (name, columns) in enumerate(sums.columns.items()):
        number_of_terms = columns.shape[-1]
        # The operator depends on the range of Y, not on its scale.
        shape = sums.mean[name].shape
        of_group = partial(_terms, seed, number, shape[-2:])
        # The groups of a layer are behind the terms.
        of_layer = jax.vmap(of_group, out_axes=1) if len(shape) == 3 else of_group
        factors[name] = of_layer(columns, mean(sums.rows[name]))

    def first(entries: Array) -> Array:
        rest = jnp.zeros((number_of_terms - 1, *entries.shape), entries.dtype)
        return jnp.concatenate([entries[None], rest])

    # The first term holds the entries, because the terms are added.
    entries = jax.tree.map(first, mean(sums.entries))
    fisher = KroneckerSum(Kronecker(factors, entries, sums.layers, sums.template))
    centre = mean(sums.mean) if sums.count is None else sums.mean
    return Sums(fisher, mean(sums.product), centre, jnp.ones_like(sums.weight), sums.count)


def _terms(
    seed: int, number: int, shape: tuple[int, ...], columns: Array, rows: Array
) -> dict[str, Array]:
    """Recover a layer's terms A_j [k, a, a] and G_j [k, o, o] from its sketches.

    They are the singular vectors of R; the first term is the Kronecker product nearest to it.
    """
    (a, o), k = shape, columns.shape[-1]
    is_diagonal = len(columns) == a
    like = {"input": jnp.zeros((1, a) if is_diagonal else (1, a, a), columns.dtype)}
    left, _ = _projections(seed, number, k, like | {"output": jnp.zeros((1, o, o), columns.dtype)})
    # If R has a smaller rank than k, Q has columns of noise, and their rows are zero.
    range_ = linalg.orthonormal_basis(columns / tree.power_of_two(columns))
    # Scaled to one, because squares of tiny Fishers would underflow.
    unit = tree.power_of_two(rows)
    core = _product(linalg.pinv(_product(left, range_)), rows / unit)
    u, values, v = linalg.svd(core)
    size = jnp.sqrt(values)[:, None]
    inputs = jax.vmap(lambda x: x if is_diagonal else _unpacked(x, a))(_product(range_, u).T * size)
    outputs = jax.vmap(lambda x: _unpacked(x, o))(v * size)
    # The sign of a pair of singular vectors is arbitrary; with this one, the first pair is
    # definite.
    sign = jnp.where(jnp.trace(outputs, axis1=1, axis2=2) < 0, -1, 1).astype(v.dtype)
    inputs = inputs * sign.reshape(-1, *(1,) * (inputs.ndim - 1))
    outputs = outputs * sign[:, None, None] * unit
    rest = k - len(values)
    return {
        side: jnp.pad(x, [(0, rest), *[(0, 0)] * (x.ndim - 1)])
        for side, x in (("input", inputs), ("output", outputs))
    }


def _projections(
    seed: int, number: int, terms: int, factor: dict[str, Array]
) -> tuple[Array, Array]:
    """Draw a layer's Psi [k + 5, size of u] and the transpose of its Omega [k, size of v]."""
    # The barrier keeps the compiler from evaluating them at compile time, which is slow.
    key = jax.random.key(jax.lax.optimization_barrier(jnp.uint32(seed)))
    keys = jax.random.split(jax.random.fold_in(key, number))

    def drawn(key: Key, count: int, like: Array) -> Array:
        one = jnp.ones(like.shape[1:], like.dtype) if like.ndim == 2 else jnp.eye(like.shape[-1])
        first = _packed(one.astype(like.dtype))[None]
        return jnp.concatenate([first, jax.random.normal(key, (count - 1, first.size), like.dtype)])

    return drawn(keys[0], terms + _EXTRA, factor["input"]), drawn(keys[1], terms, factor["output"])


def _packed(factor: Array) -> Array:
    """Return the triangle of a symmetric matrix as a vector of the same norm; vectors unchanged."""
    if factor.ndim == 1:
        return factor
    root = jnp.sqrt(jnp.asarray(2, factor.dtype))
    return linalg.fold_triangle(
        jnp.where(jnp.eye(len(factor), dtype=bool), factor, root * factor)
    ).ravel()


def _unpacked(vector: Array, size: int) -> Array:
    """Return the symmetric matrix of a vector from `_packed`, its inverse."""
    matrix = linalg.unfold_triangle(vector.reshape((size + 1) // 2, -1))
    root = jnp.sqrt(jnp.asarray(0.5, vector.dtype))
    return jnp.where(jnp.eye(size, dtype=bool), matrix, root * matrix)


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=PRECISION)
