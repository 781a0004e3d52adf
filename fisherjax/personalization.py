"""What a model becomes on clients it has not seen: fine-tuned on a part, tested on another."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import clients, metrics, training
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.clients import SPLIT, Federation, client_key, ids, rows_of, shuffled, view
from fisherjax.metrics import Performance
from fisherjax.typing import AnyArray, Array, Key, Model, Params


def personalize(
    model: Model,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    fractions: Sequence[float] = (0.0, 0.25, 0.5),
    **options: Any,
) -> list[Performance]:
    """Fine-tune a model on a part of each client's examples and test it on the other half.

    Every client's examples are shuffled once. The second half tests, whatever the fraction; of the
    first, a share f of all the client's examples trains, for each f of `fractions` from 0, the
    model as it stands, to 0.5. The federation holds clients that were held out, see
    `clients.select`; the options are those of `training.train`.

    Returns:
        For each fraction what every client reaches; average with `.mean()`.

    Raises:
        ValueError: If a fraction is out of range; and what `training.train` raises.

    Example:
        >>> import optax, fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> federation = fj.clients.federation((jnp.eye(4), jnp.array([0, 0, 1, 1])), [range(4)])
        >>> options = {"optimizer": optax.sgd(1.0), "epochs": 1, "batch_size": 2}
        >>> found = personalize(model, jnp.eye(4, 2), federation, key=jax.random.key(0), **options)
        >>> [own.sizes.tolist() for own in found]
        [[2], [2], [2]]

    Source: Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function space aggregation for
        federated learning at scale, TMLR 2024, section 5.
    """
    clients.check(federation)
    checks.key(key)
    for fraction in fractions:
        checks.number("A fraction", fraction)
        if fraction > 0.5:
            raise ValueError(f"A fraction is {fraction}; expected 0 to 0.5: the other half tests.")
    pool, test = halve(federation, key)
    found = []
    for fraction in fractions:
        # Nobody trains: one model for all, which need not be stacked.
        if fraction == 0:
            found.append(metrics.performance(model, params, test))
            continue
        # Only the sizes change, not the shapes: every fraction trains by the same program.
        own = pool._replace(sizes=(fraction * federation.sizes).astype(pool.sizes.dtype))
        models = training.train(model, params, own, key=key, **options).models
        found.append(metrics.performance(model, models, test, stacked=True))
    return found


@jit
def halve(federation: Federation, key: Key) -> tuple[Federation, Federation]:
    """Split every client's examples at random into halves, two federations of the same data.

    The second half has the odd example; the key is folded by client.

    Example:
        >>> federation = clients.federation((jnp.zeros(5), jnp.zeros(5)), [[0, 1, 2], [3, 4]])
        >>> [half.sizes.tolist() for half in halve(federation, jax.random.key(0))]
        [[1, 1], [2, 1]]
    """

    def rows(place: Array) -> tuple[AnyArray, Array]:
        own = client_key(key, SPLIT, ids(federation)[place])
        mixed, _ = rows_of(shuffled(own, view(federation, place)))
        # Rolled, not cut, as shapes cannot depend on a client's size: the second half comes first,
        # and the sizes hide what is behind it.
        return mixed, jnp.roll(mixed, -(federation.sizes[place] // 2))

    first, second = jax.lax.map(rows, jnp.arange(federation.num_clients))
    half = federation.sizes // 2
    pool = federation._replace(indices=first, sizes=half)
    return pool, federation._replace(indices=second, sizes=federation.sizes - half)
