"""Leaves that each client keeps to itself, for any algorithm.

A client trains all of its model, sends the leaves it shares, and goes on from everybody's shared
leaves and its own local ones, which are its local state in `rounds`: they are never sent, those
who sit a round out keep theirs, and they are sharded and saved like any state.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import leaves, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Report, check_algorithm, check_same_shapes
from fisherjax.fisher import Dense, Kronecker
from fisherjax.fisher.operators import Template
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalLeaves:
    """What a client keeps.

    Attributes:
        leaves: Its own, by name.
        algorithm: What the wrapped algorithm keeps.
        template: Static structure of params, of which the leaves are a part.
    """

    leaves: dict[str, Array]
    algorithm: Any
    template: Template = dataclasses.field(metadata={"static": True})


@cached
def keep_local(
    algorithm: Algorithm[Report], where: Callable[[str], bool] | frozenset[str]
) -> Algorithm[Report]:
    """Let every client keep the leaves that are picked out by name; the rest is merged.

    The server runs the algorithm on the shared leaves alone, and hands on the local ones of
    params as they are: what a client starts from that has not trained yet. A merge by curvature
    takes the shared leaves' part of each client's Fisher information, at its own local leaves.

    Args:
        algorithm: Any. A server's optimiser is wrapped around the result,
            `with_server_optimizer(keep_local(...), ...)`.
        where: Name of a leaf, as `tree.names` gives it, -> whether it is local; or the names of
            the local ones.

    Returns:
        The algorithm. Its updates are those of the wrapped one, of the shared leaves by name.

    Raises:
        TypeError: If an argument has the wrong kind.
        ValueError: If merged leaves have other shapes than the clients'; once params are known, if
            no leaf is local or every one is, or a layer that K-FAC treats as one would be torn
            apart.

    Example:
        >>> import fisherjax as fj
        >>> personal = keep_local(fj.algorithms.fedavg(), lambda name: name == "head")
        >>> models = [
        ...     {"body": jnp.zeros(1), "head": jnp.zeros(1)},
        ...     {"body": jnp.ones(1), "head": jnp.ones(1)},
        ... ]
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.zeros(2)), [[0], [1]])
        >>> sent = fj.merging.summarize(personal, models, federation, key=jax.random.key(0))
        >>> list(sent.values["params"])
        ['body']
        >>> merged, _, _ = fj.merging.merge(personal, models[0], sent)
        >>> print(merged["body"], merged["head"])
        [0.5] [0.]

    Source: Arivazhagan, Aggarwal, Singh, Choudhary, Federated learning with personalization layers,
        2019; Li, Jiang, Zhang, Kamp, Dou, FedBN, ICLR 2021; here for any algorithm. Pulls towards
        the start, as FedProx has, pull local leaves towards the client's own last ones.
    """
    if not isinstance(where, frozenset):
        checks.function("where", where, "lambda name: name.startswith('head')")
    return keep_chosen(algorithm, _by_name(where))


@cached
def keep_chosen(
    algorithm: Algorithm[Report], choose: Callable[[Params], Collection[str]]
) -> Algorithm[Report]:
    """Make `keep_local` of the leaves that a function of params, or of their shapes, names."""
    check_algorithm(algorithm)
    check_same_shapes(algorithm)

    def shared(params: Params) -> dict[str, Array]:
        return _split(choose, params)[0]

    def own(params: Params) -> dict[str, Array]:
        return _split(choose, params)[1]

    def init(params: Params, num_clients: int) -> Any:
        return algorithm.link.init(shared(params), num_clients)

    def init_client(params: Params) -> LocalLeaves:
        kept = algorithm.link.init_client(shared(params))
        if algorithm.model is not None and jax.tree.leaves(kept):
            raise ValueError(
                "This algorithm runs the network to summarize and keeps something on the clients; "
                "keep_local serves algorithms that do one of the two."
            )
        return LocalLeaves(own(params), kept, Template.of(params))

    def broadcast(params: Params, state: Any, place: Array | None) -> Any:
        return algorithm.link.broadcast(shared(params), state, place)

    def receive(message: Any, local: LocalLeaves) -> tuple[Params, Any]:
        start, extras = algorithm.link.receive(message, local.algorithm)
        # Corrections are of shared leaves: none for those that the server does not know.
        nothing = jax.tree.map(jnp.zeros_like, local.leaves)
        extras = _replace(extras, start, lambda x: local.template.restore(x | nothing))
        return local.template.restore(start | local.leaves), extras

    def summarize(
        key: Key, trained: Trained, examples: Examples, local: LocalLeaves
    ) -> tuple[dict[str, Any], LocalLeaves]:
        params, names = trained.params, tuple(shared(trained.params))

        def restricted(values: Any) -> Any:
            values = _replace(values, params, shared, lambda x: x.select(names))
            return _of_leaves(values, set(tree.names(params)), names)

        # What runs the network needs all of it.
        given = trained if algorithm.model is not None else restricted(trained)
        values, kept = algorithm.summarize(key, given, examples, local.algorithm)
        sent = restricted(values) if algorithm.model is not None else values
        return sent, dataclasses.replace(local, leaves=own(params), algorithm=kept)

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        merged, state, info = algorithm.aggregate(key, received, shared(params), state, cohort)
        return Template.of(params).restore(merged | own(params)), state, info

    return algorithm._replace(
        summarize=summarize,
        aggregate=aggregate,
        kind=f"{algorithm.kind}, of shared leaves",
        gives="model per client",
        link=algorithm.link._replace(
            init=init,
            init_client=init_client,
            broadcast=broadcast,
            receive=receive,
            # Of statistics, which no method sees, rounds keep them for each client.
            keeps=lambda statistics: {*choose(statistics)}.intersection(tree.names(statistics)),
        ),
    )


@cached
def _by_name(where: Callable[[str], bool] | frozenset[str]) -> Callable:
    # One object for one `where`: the algorithm is known by it.
    def choose(params: Params) -> set[str]:
        names = leaves.by_name(params)
        if not isinstance(where, frozenset):
            return {name for name in names if where(name)}
        if unknown := sorted(where.difference(names)):
            raise ValueError(
                f"`where` lists {unknown}, which are no leaves; expected some of {list(names)}."
            )
        return set(where)

    return choose


def _split(choose: Callable[[Params], Collection[str]], params: Params) -> tuple[dict, dict]:
    names, kept = tree.names(params), choose(params)
    chosen = [name in kept for name in names]
    # Perhaps only running statistics are kept, which are not trained.
    if all(chosen) or not kept:
        raise ValueError(
            f"`where` picks out {'every leaf' if all(chosen) else 'no leaf'} of {list(names)}; "
            "expected a predicate on names that is true of those that clients keep, and not of "
            "those that are merged."
        )
    own = list(zip(names, chosen, jax.tree.leaves(params), strict=True))
    shared, held = ({n: leaf for n, c, leaf in own if c is kept} for kept in (False, True))
    return shared, held


def _replace(
    values: Any, like: Any, on_params: Callable, on_operator: Callable | None = None
) -> Any:
    """Change whatever has the structure of params, and operators that know it, inside a pytree."""
    structure = jax.tree.structure(like)

    def is_operator(x: Any) -> bool:
        return on_operator is not None and isinstance(x, Kronecker | Dense)

    def is_params(x: Any) -> bool:
        return not is_operator(x) and jax.tree.structure(x) == structure

    def changed(x: Any) -> Any:
        if on_operator is not None and is_operator(x):
            return on_operator(x)
        return on_params(x) if is_params(x) else x

    return jax.tree.map(changed, values, is_leaf=lambda x: is_operator(x) or is_params(x))


def _of_leaves(values: Any, names: set[str], shared: tuple[str, ...]) -> Any:
    """Drop what belongs to local leaves from dicts by leaf name, such as Gram matrices."""
    if not isinstance(values, dict):
        return values
    # Some mark a kernel that is stored the other way round, "w^T".
    leaf_of = {key: str(key).removesuffix("^T") for key in values}
    if values and set(leaf_of.values()) <= names:
        return {key: x for key, x in values.items() if leaf_of[key] in shared}
    return {key: _of_leaves(x, names, shared) for key, x in values.items()}
