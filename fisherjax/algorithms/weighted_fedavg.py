"""Weighted FedAvg: a model for each client, the mean of models weighted by similarity.

Huang, Shi, Cai, Suzuki, Understanding convergence and generalization in federated learning through
feature learning theory, ICLR 2024, its practical method.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.caching import cached, name_of
from fisherjax._stacked import copies
from fisherjax.algorithms.base import FISHER_EXAMPLES, Algorithm, Link, check_pass
from fisherjax.algorithms.exchanges._head_sums import head_sums
from fisherjax.clients import draw
from fisherjax.fisher import Kronecker, Operator
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


@cached
def weighted_fedavg(
    model: Model,
    *,
    temperature: float = 1.0,
    fisher: Callable[..., Operator] | None = None,
    batch_size: int = 64,
    max_examples: int | None = FISHER_EXAMPLES,
) -> Algorithm[Array]:
    """Make Weighted FedAvg: each client gets the mean of all models, weighted by similarity.

        s_kl = softmax_l(cos(p_k, p_l) / tau),    W_k <- sum_l s_kl W_l,

    where the prototype p_k is the mean input of the last layer for each class, and zero for a class
    that the client does not have. With `fisher`, the similarity is that of Fisher information,
    seen as one long vector. The mean is over the clients of the cohort; other clients keep their
    model.

    Args:
        model: The network; prototypes need a classifier whose last layer is dense.
        temperature: tau (default 1). Prototypes behind a ReLU have cosines between 0 and 1, so that
            at 1 the weights differ at most by a factor e, nearly FedAvg with equal weights, which
            is the limit of large tau. In the limit of small tau, each client keeps its own model.
        fisher: Structure of the Fisher information to compare instead of prototypes,
            `fisher.diagonal`, `fisher.kfac` or a `partial` of one (default None).
        batch_size: Minibatch size of the pass for prototypes or Fisher information.
        max_examples: Largest number of a client's examples in that pass; None uses all.

    Returns:
        The algorithm. Updates are {"params": W_k, "prototypes": p_k [C, features]}, or with
        `fisher` {"params": W_k, "fisher": F_k}. The state is the models [M, ...], which
        `Federated.models` returns too; `params` are their mean by numbers of examples. It reports
        s [K, K].

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.categorical)
        >>> method, eye = weighted_fedavg(model, temperature=0.01), jnp.eye(2)
        >>> values = {"params": {"w": jnp.array([[[0.0]], [[4.0]]])}, "prototypes": eye[:, None]}
        >>> updates = fj.algorithms.Update(values, method.kind)
        >>> start = {"w": jnp.zeros((1, 1))}
        >>> merged, own, _ = fj.merging.merge(method, start, updates)
        >>> print(merged["w"].ravel(), own["w"].ravel())
        [2.] [0. 4.]

    Source: the paper above, which defines neither the prototype of a class without examples, nor
        the model of a client that does not participate in a round. A client without any examples is
        similar to no client, and gets the plain mean. Fisher information instead of prototypes is
        this library's.
    """
    checks.model(model)
    checks.positive("temperature", temperature)
    if fisher is not None:
        checks.function("fisher", fisher, "fisher.diagonal")
    check_pass(batch_size, max_examples)

    def broadcast(params: Params, state: Params, place: Array) -> Params:
        del params
        return jax.tree.map(lambda x: x[place], state)

    def summarize(
        key: Key, trained: Trained, examples: Examples, local: Any
    ) -> tuple[dict[str, Any], Any]:
        if fisher is not None:
            how = {"key": key, "batch_size": batch_size, "max_examples": max_examples}
            computed = fisher(model, trained.whole, examples, **how)
            return {"params": trained.params, "fisher": computed}, local
        examples = draw(key, examples, max_examples)
        sums = head_sums(model, batch_size, trained.whole, examples)
        # E[a y^T] / E[y] are class means; the last row of products belongs to the bias, if any.
        features, share = sums.products[: sums.layer.rows].T, sums.targets[:, None]
        means = jnp.where(share > 0, features / jnp.where(share > 0, share, 1), 0)
        return {"params": trained.params, "prototypes": means}, local

    def shares(values: dict[str, Any], weights: Array) -> Array:
        cosines = _cosines(values["fisher" if fisher else "prototypes"])
        return jax.nn.softmax(cosines / temperature, where=weights > 0, axis=1)

    def aggregate(key: Key, received: tuple, params: Params, state: Params, cohort: Array) -> tuple:
        del key, params
        values, weights = received
        similarity = shares(values, weights)
        # The params of a client without weight may not be finite.
        sent = tree.where(weights > 0, values["params"])
        means = jax.vmap(lambda row: tree.weighted_sum(sent, row))(similarity)
        models = jax.tree.map(lambda x, new: x.at[cohort].set(new.astype(x.dtype)), state, means)
        return tree.weighted_sum(sent, weights), models, similarity

    return Algorithm(
        summarize,
        aggregate,
        kind=f"params and {name_of(fisher) + ' Fisher' if fisher else 'prototypes'}",
        model=model,
        gives="model per client",
        link=Link(init=copies, broadcast=broadcast, personal=True, mix=shares),
    )


def _cosines(compared: Any) -> Array:
    """Compute the cosines [K, K] between the clients' values, each as one long vector.

    Kronecker products are never formed: <A (x) G, B (x) H> = <A, B> <G, H>.
    """
    is_product, found = isinstance(compared, Kronecker), []
    if is_product:
        grouped = {layer.kernel for layer in compared.layers if layer.groups}
        for name, factor in compared.factors.items():
            one = tuple(factor.values())
            found.append(jax.vmap(_product, 1)(one) if name in grouped else _product(one))
    rest = compared.entries if is_product else compared
    found += [_product((leaf,)) for leaf in jax.tree.leaves(rest)]
    # Scaled to one, because squares of small curvature underflow. Sizes are [M], or [groups, M].
    largest = jnp.stack([size.reshape(-1, size.shape[-1]).max(0) for size, _ in found]).max(0)
    largest = jnp.where(largest > 0, largest, 1)
    scaled = [(size / largest, inner) for size, inner in found]
    products = [size[..., None] * size[..., None, :] * inner for size, inner in scaled]
    inner = sum(x.sum(0) if x.ndim == 3 else x for x in products)
    norms = jnp.sqrt(jnp.diagonal(inner))
    return inner / jnp.where(norms > 0, norms, 1)[:, None] / jnp.where(norms > 0, norms, 1)


def _product(arrays: tuple[Array, ...]) -> tuple[Any, Any]:
    """Return the sizes [K] of products of stacked arrays, and their inner products in these."""
    return math.prod(map(_size, arrays)), math.prod(map(_inner, arrays))


def _size(stacked: Array) -> Array:
    return jnp.abs(stacked).reshape(len(stacked), -1).max(1)


def _inner(stacked: Array) -> Array:
    """Compute inner products [K, K], each in units of the largest entries of both clients."""
    flat = stacked.reshape(len(stacked), -1)
    size = _size(stacked)[:, None]
    unit = flat / jnp.where(size > 0, size, 1)
    return jnp.matmul(unit, unit.T, precision="highest")
