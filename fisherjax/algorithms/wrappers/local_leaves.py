"""Leaves that each client keeps to itself, for any algorithm.

A client trains all of its model, sends its shared leaves, and continues from the merged shared
leaves and its own local ones. The local leaves are its local state in `rounds`: they are never
sent, clients that do not participate in a round keep theirs, and they are sharded and saved like
any other state.
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
    """Local state of a client.

    Attributes:
        leaves: Local leaves, by name.
        algorithm: Local state of the wrapped algorithm.
        template: Static structure of params, to which the leaves belong.
    """

    leaves: dict[str, Array]
    algorithm: Any
    template: Template = dataclasses.field(metadata={"static": True})


@cached
def keep_local(
    algorithm: Algorithm[Report], where: Callable[[str], bool] | frozenset[str]
) -> Algorithm[Report]:
    """Make an algorithm whose clients keep some leaves; the other leaves are merged.

    The server runs the algorithm on the shared leaves alone. It leaves the local ones of params as
    they are: clients that have not trained yet start from them. A merge by curvature uses the part
    of each client's Fisher information for the shared leaves, at its own local leaves.

    Args:
        algorithm: Any algorithm. Apply a server's optimiser to the result,
            `with_server_optimizer(keep_local(...), ...)`.
        where: Function that returns whether the leaf of a name, as in `tree.names`, is local; or
            the names of the local leaves.

    Returns:
        The algorithm. Its updates are those of `algorithm` for the shared leaves, by name.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If merged leaves have other shapes than the clients'; when params are first
            seen, if no leaf or every leaf is local, or if a layer that K-FAC treats as one would be
            split.

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
        2019; Li, Jiang, Zhang, Kamp, Dou, FedBN, ICLR 2021; here for any algorithm. A proximal
        term, as of FedProx, keeps local leaves near the client's own last ones.
    """
    if not isinstance(where, frozenset):
        checks.function("where", where, "lambda name: name.startswith('head')")
    return keep_chosen(algorithm, _by_name(where))


@cached
def keep_chosen(
    algorithm: Algorithm[Report], choose: Callable[[Params], Collection[str]]
) -> Algorithm[Report]:
    """Make `keep_local` of the leaves whose names a function of params, or of shapes, returns."""
    check_algorithm(algorithm)
    check_same_shapes(algorithm)

    def shared(params: Params) -> dict[str, Array]:
        return _split(choose, params)[0]

    def local_part(params: Params) -> dict[str, Array]:
        return _split(choose, params)[1]

    def init(params: Params, num_clients: int) -> Any:
        return algorithm.link.init(shared(params), num_clients)

    def init_client(params: Params) -> LocalLeaves:
        kept = algorithm.link.init_client(shared(params))
        if algorithm.model is not None and jax.tree.leaves(kept):
            raise ValueError(
                "This algorithm runs the network in summarize and has a local state on clients; "
                "keep_local accepts algorithms that do at most one of the two."
            )
        return LocalLeaves(local_part(params), kept, Template.of(params))

    def broadcast(params: Params, state: Any, place: Array | None) -> Any:
        return algorithm.link.broadcast(shared(params), state, place)

    def receive(message: Any, local: LocalLeaves) -> tuple[Params, Any]:
        start, extras = algorithm.link.receive(message, local.algorithm)
        # The server corrects shared leaves only: corrections of local ones are zero.
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

        # An algorithm that runs the network needs all leaves.
        visible = trained if algorithm.model is not None else restricted(trained)
        values, kept = algorithm.summarize(key, visible, examples, local.algorithm)
        sent = restricted(values) if algorithm.model is not None else values
        return sent, dataclasses.replace(local, leaves=local_part(params), algorithm=kept)

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        merged, state, info = algorithm.aggregate(key, received, shared(params), state, cohort)
        return Template.of(params).restore(merged | local_part(params)), state, info

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
            # Algorithms do not see statistics: rounds store the local ones of each client.
            keeps=lambda statistics: {*choose(statistics)}.intersection(tree.names(statistics)),
        ),
    )


@cached
def _by_name(where: Callable[[str], bool] | frozenset[str]) -> Callable:
    # Cached, because equal arguments must give the same algorithm.
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
    # `not kept`, because the local leaves may be running statistics only, which are not trained.
    if all(chosen) or not kept:
        raise ValueError(
            f"`where` selects {'every leaf' if all(chosen) else 'no leaf'} of {list(names)}; "
            "expected a predicate on names that is true for the leaves that clients keep, and "
            "false for those that are merged."
        )
    triples = list(zip(names, chosen, jax.tree.leaves(params), strict=True))
    shared, local = ({n: leaf for n, c, leaf in triples if c is side} for side in (False, True))
    return shared, local


def _replace(
    values: Any, like: Any, on_params: Callable, on_operator: Callable | None = None
) -> Any:
    """Apply functions to subtrees with the structure of params, and to operators, in a pytree."""
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
    """Drop entries of local leaves from dicts by leaf name, such as Gram matrices."""
    if not isinstance(values, dict):
        return values
    # Names of transposed kernels end in "^T".
    leaf_of = {key: str(key).removesuffix("^T") for key in values}
    if values and set(leaf_of.values()) <= names:
        return {key: x for key, x in values.items() if leaf_of[key] in shared}
    return {key: _of_leaves(x, names, shared) for key, x in values.items()}
