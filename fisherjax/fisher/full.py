"""Compute the full Fisher information, as a dense matrix or as its product with a vector."""

import jax
import jax.numpy as jnp

from fisherjax import leaves
from fisherjax._core import checks
from fisherjax._core.batches import take
from fisherjax._layers.reading import check_examples
from fisherjax.fisher import _passes, kinds
from fisherjax.fisher._columns import blocks, sum_over_columns
from fisherjax.fisher.operators import Dense, Template, ravel, widen
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params


def full(
    model: Model,
    params: Params,
    examples: Examples,
    *,
    kind: kinds.Kind = kinds.automatic,
    key: Key | None = None,
    batch_size: int = 64,
    max_examples: int | None = None,
) -> Dense:
    """Compute the Fisher information as a dense matrix [d, d], for small networks.

        F = sum_n w_n J_n^T S_n S_n^T J_n / sum_n w_n,    in at least float32.

    The arguments and errors are those of `fisher.diagonal`. A minibatch holds gradients [K, B, d],
    with at most 16 columns.

    Returns:
        The operator, which acts on the trained leaves as one vector.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> params, x = {"w": jnp.ones((2, 1))}, jnp.array([[1.0, 2.0]])
        >>> print(fj.fisher.full(model, params, fj.Examples(x)).matrix)
        [[1. 2.]
         [2. 4.]]

    Source: Martens, New insights and perspectives on the natural gradient method, JMLR 2020,
        section 8.
    """
    params = checks.arrays(params)
    plan = _passes.check(model, params, examples, kind, key, batch_size, max_examples)
    return _passes.run(_sums, plan, params, examples, key)


def _sums(apply: Apply, params: Params, x: Array, w: Array, factor: _passes.Factor) -> Dense:
    def gradients(example: Array, some: Array) -> Array:
        _, pullback = jax.vjp(lambda p: apply(p, take(example, None))[0], params)
        return jax.vmap(lambda s: ravel(pullback(s)[0]))(some)

    def products(some: Array) -> Array:
        # [B, few, d]; a gradient of the minibatch's mean would mix examples.
        g = widen(jax.vmap(gradients)(x, jnp.moveaxis(some, 0, 1)))
        # Only one factor carries the weight: [d, B * few] times [B * few, d].
        heavy = (g * w[:, None, None].astype(g.dtype)).reshape(-1, g.shape[-1])
        return jnp.matmul(heavy.T, g.reshape(-1, g.shape[-1]), precision="highest")

    check_examples(apply, params, x)
    matrix = sum_over_columns(products, factor(apply(params, x)))
    return Dense(matrix, Template.of(params))


def vector_product(
    model: Model,
    params: Params,
    examples: Examples,
    vector: Params,
    *,
    kind: kinds.Kind = kinds.true,
    key: Key | None = None,
    batch_size: int = 256,
) -> Params:
    """Multiply a vector by the Fisher information without forming it, by one jvp and one vjp.

        F v = sum_n w_n J_n^T S_n S_n^T J_n v / sum_n w_n.

    The other arguments and errors are those of `fisher.diagonal`. With the same key, sampled kinds
    multiply by the same matrix. The default kind is `true`, which costs no more than others here,
    also for sequences.

    Args:
        model: The network and its likelihood.
        params: A pytree of floating arrays.
        examples: The examples.
        vector: v, with the structure and shapes of params or of `leaves.trained(model, params)`.
        kind: The output-gradient estimator.
        key: Random key, for kinds that draw.
        batch_size: Number of examples in a minibatch (default 256).

    Returns:
        F v, with the structure and shapes of the vector and the dtypes of params; zero for leaves
        that are not trained.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> params, x = {"w": jnp.ones((2, 1))}, jnp.array([[1.0, 2.0]])
        >>> print(fj.fisher.vector_product(model, params, fj.Examples(x), params)["w"].T)
        [[3. 6.]]

    Source: Schraudolph, Fast curvature matrix-vector products for second-order gradient descent,
        Neural Computation 2002.
    """
    params = checks.arrays(params)
    plan = _passes.check(model, params, examples, kind, key, batch_size)
    vector = checks.arrays(vector, "vector")
    trained = leaves.trained(model, params)
    given, expected = Template.of(vector), Template.of(params)
    if given not in (expected, Template.of(trained)):
        raise ValueError(
            f"vector has leaves of shapes {given.shapes}; expected those of params, "
            f"{expected.shapes}, in the same structure. Pass a vector like params or like "
            "leaves.trained(model, params)."
        )
    chosen = leaves.trained(model, vector) if given == expected else vector
    product = _passes.run(_product_sums, plan, params, examples, key, chosen)
    product = jax.tree.map(lambda x, like: x.astype(jnp.result_type(like)), product, trained)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return leaves.join(product, zeros) if given == expected else product


def _product_sums(
    apply: Apply, point: tuple[Params, Params], x: Array, w: Array, factor: _passes.Factor
) -> Params:
    params, vector = point
    check_examples(apply, params, x)
    # Forward by J, then S S^T on the outputs, then backward by J^T.
    z, jv = jax.jvp(lambda p: apply(p, x), (params,), (vector,))
    s = blocks(factor(z))
    cotangent = jnp.einsum("kbpc,kbpe,bpe,b->bpc", s, s, jv.reshape(s.shape[1:]), w.astype(s.dtype))
    _, pullback = jax.vjp(lambda p: apply(p, x), params)
    return pullback(cotangent.reshape(z.shape))[0]
