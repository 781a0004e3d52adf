"""Merge adapters by any method, to which the changes that they make look like those of kernels."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import leaves, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.adapters import base, network
from fisherjax.adapters.base import Adapter
from fisherjax.adapters.merge import mean_factors
from fisherjax.algorithms.base import (
    Algorithm,
    Link,
    Report,
    as_sent,
    check_algorithm,
)
from fisherjax.fisher import Kronecker
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


@cached
def merge_products(
    algorithm: Algorithm[Report], model: Model, *, rank: int | None = None
) -> Algorithm[Report]:
    """Make an algorithm that merges clients' adapters by the changes D_i = scale B_i A_i they make.

    Clients send A_i and B_i, and what the algorithm sends beside its params, such as Kronecker
    factors, computed for the dense kernels at the base and the client's change. The server runs the
    algorithm on the changes, and takes the best adapter of a rank: in the metric `mean_factors` of
    Kronecker factors or Gram matrices if clients send them, else by least squares.

    Args:
        algorithm: A method that merges params to one model and keeps no state; if it runs a
            network, then one made for the model `dense`, such as `fedfisher(dense(model, start))`.
        model: The network with adapters, of `attach`.
        rank: Largest rank of the merged adapters; None (default) is that of the start, with which
            rounds can go on. A rank of the size of the kernels keeps all of the merged change.

    Returns:
        The algorithm, for params of `attach`. It has no `reduce`: products of sums are not sums of
        products, so that the server needs every update.

    Raises:
        ValueError: If the algorithm keeps state, encodes its updates, returns no single model, or
            was made for a network that trains other leaves.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> how = {"rank": 1, "key": jax.random.key(0)}
        >>> adapted, start = network.attach(model, {"w": jnp.eye(2)}, ["w"], **how)
        >>> method = merge_products(fj.algorithms.fedavg(), adapted)
        >>> one = start | {"adapters": {"w": Adapter(jnp.ones((1, 2)), jnp.ones((2, 1)), 2.0)}}
        >>> updates = fj.algorithms.Update(
        ...     {"params": fj.tree.stack([fj.leaves.trained(adapted, x) for x in (start, one)])},
        ...     method.kind,
        ...     frozen=("base/w", "adapters/w/scale"),
        ... )
        >>> print(network.merged(fj.merging.merge(method, start, updates)[0])["w"].round())
        [[2. 1.]
         [1. 2.]]
    """
    check_algorithm(algorithm)
    # The server has the start of the changes.
    is_plain = algorithm.link._replace(reads_start=False) == Link()
    if algorithm.gives != "model" or not is_plain or algorithm.decode is not as_sent:
        raise ValueError(
            "merge_products merges by methods that return one model, keep no state and send arrays "
            "as they are, such as fedavg, regmean, fedfisher and ties. Wrap its result to encode "
            "updates, merge_products(...) inside and the compression outside."
        )

    _check_targets(algorithm.model, model)
    if rank is not None:
        checks.count("rank", rank)

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        values, weights = received
        held = params["adapters"]
        template = _split(params["base"], params).trained
        if "params" in values:
            sent = values["params"]["adapters"].items()
            scaled = {name: x._replace(scale=held[name].scale) for name, x in sent}
            axes = {name: Adapter(0, 0, None) for name in scaled}  # pyright: ignore
            changes = jax.vmap(network.changes, (axes,))(scaled)
            values = values | {"params": leaves.replace(template, changes)}
        given = (values, weights) if algorithm.reduce is None else algorithm.reduce(values, weights)
        start = leaves.replace(template, network.changes(held))
        found, state, info = algorithm.aggregate(key, given, start, state, cohort)
        found, factors, new = tree.by_name(found), _factors(values), {}
        for name, like in held.items():
            change, own = found[network.kernel_of(name)], factors.get(name)
            new[name] = _as_adapter(rank, name.endswith("^T"), change, like, own, weights)
        return params | {"adapters": new}, state, info

    return algorithm._replace(
        summarize=_of_products(algorithm.summarize),
        aggregate=aggregate,
        reduce=None,
        kind=f"{algorithm.kind}, of adapters",
        model=model,
        gives="model" if rank is None else "wider model",
        link=Link(whole=True),
    )


@cached
def _of_products(summarize: Callable[..., tuple[dict, Any]]) -> Callable[..., tuple[dict, Any]]:
    """Return a `summarize` of clients with adapters, as of networks whose kernels they change.

    It depends on nothing else, so that methods with equal `summarize` still have equal ones.
    """

    def of_products(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        params, _, others = _split(network.merged(trained.whole), trained.params)
        start = trained.start
        if start is not None:
            whole = leaves.join(start, trained.statistics, trained.frozen)
            start = _split(network.merged(whole), start).trained
        seen = trained._replace(params=params, start=start, statistics=None, frozen=others)
        values, local = summarize(key, seen, examples, local)
        sent = {"params": trained.params} if "params" in values else {}
        return values | sent, local

    return of_products


def _split(base_params: Params, params: Any) -> leaves.Leaves:
    """Split params of the base into the kernels that are adapted and the others, as frozen."""
    adapted = {network.kernel_of(name) for name in params["adapters"]}
    others = [name for name in tree.names(base_params) if name not in adapted]
    return leaves.split_by_name(base_params, (), others)


def _check_targets(dense: Model | None, model: Model) -> None:
    """Check that a method's network trains exactly the kernels that are adapted."""
    checks.model(model)
    found = (re.fullmatch("adapters/(.*)/a", name, re.DOTALL) for name, _ in model.mask or ())
    adapted = {network.kernel_of(match[1]) for match in found if match}
    if not adapted:
        raise ValueError(
            "model has no adapters; expected the network that adapters.attach returns."
        )
    if dense is None:
        return
    trained = None if dense.mask is None else {name for name, chosen in dense.mask if chosen}
    if trained != adapted:
        raise ValueError(
            f"The algorithm was made for a network that trains {sorted(trained or ['all'])}, but "
            f"the adapters change {sorted(adapted)}; expected adapters.dense(model, start)."
        )


@partial(jit, static_argnums=(0, 1))
def _as_adapter(
    rank: int | None,
    is_transposed: bool,
    change: Array,
    like: Adapter,
    factors: dict[str, Array] | None,
    weights: Array,
) -> Adapter:
    """Return the best adapter of a rank, or of that of another adapter, with its scale.

    It is the best in the metric of the clients' stacked factors, if there are any.
    """
    metric = None
    if factors is not None:
        clients = [{side: x[i] for side, x in factors.items()} for i in range(len(weights))]
        # The part of K-FAC's default damping, as in `merge`.
        metric = mean_factors(clients, weights, Kronecker.default_damping)
    size = like.a.shape[0] if rank is None else rank
    change = change.T if is_transposed else change
    best = base.truncate(base.from_product(change), size, metric)
    # A kernel that is smaller than the rank of its adapter.
    short = size - best.a.shape[0] if rank is None else 0
    a, b = jnp.pad(best.a, ((0, short), (0, 0))), jnp.pad(best.b, ((0, 0), (0, short)))
    return Adapter(a, b / like.scale, like.scale)


def _factors(values: Mapping[str, Any]) -> dict[str, dict[str, Array]]:
    """Return stacked factors by the name of the adapter, of a K-FAC Fisher or Gram matrices."""
    fisher, grams = values.get("fisher"), values.get("grams")
    factors = {}
    if isinstance(fisher, Kronecker):
        factors = {
            x.kernel + "^T" * x.is_transposed: fisher.factors[x.kernel]
            for x in fisher.layers
            if x.is_dense
        }
    elif isinstance(grams, Mapping):
        factors = {name: {"input": gram} for name, gram in grams.items()}
    # An adapter whose A reads what the network uses as outputs has the other side's factors.
    sides, swapped = {"input": "output", "output": "input"}, {}
    for name, own in factors.items():
        kernel = network.kernel_of(name)
        turned = {sides[side]: x for side, x in own.items()}
        swapped[kernel if name != kernel else kernel + "^T"] = turned
    return swapped | factors
