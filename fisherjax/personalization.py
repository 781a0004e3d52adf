"""Personalize a model on held-out clients: fine-tune it on some of their data, test on others."""

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
    """Fine-tune a model on a part of each client's examples, and test it on the other half.

    Every client's examples are shuffled once and divided into halves. The second half is always
    the test set. The training set is the beginning of the first half.

    Args:
        model: Network and likelihood.
        params: Params of the model before fine-tuning.
        federation: Data of clients that were held out, see `clients.select`.
        key: Random key, folded by client.
        fractions: Sizes of the training set, as fractions of all examples of a client, from 0 (no
            fine-tuning) to 0.5.
        **options: Other arguments of `training.train`.

    Returns:
        For each fraction, the loss and accuracy on every client; average them by `.mean()`.

    Raises:
        ValueError: If a fraction is out of range, or `training.train` raises it.

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
            raise ValueError(
                f"A fraction is {fraction}; expected 0 to 0.5, as the other half is for tests."
            )
    pool, test = halve(federation, key)
    found = []
    for fraction in fractions:
        # Without training, all clients share one model, which need not be stacked.
        if fraction == 0:
            found.append(metrics.performance(model, params, test))
            continue
        # Sizes change, but not shapes, so that all fractions run the same program.
        own = pool._replace(sizes=(fraction * federation.sizes).astype(pool.sizes.dtype))
        models = training.train(model, params, own, key=key, **options).models
        found.append(metrics.performance(model, models, test, stacked=True))
    return found


@jit
def halve(federation: Federation, key: Key) -> tuple[Federation, Federation]:
    """Partition every client's examples at random into two federations of half the size.

    Of an odd number of examples, the second federation has one more. The key is folded by client.

    Example:
        >>> federation = clients.federation((jnp.zeros(5), jnp.zeros(5)), [[0, 1, 2], [3, 4]])
        >>> [half.sizes.tolist() for half in halve(federation, jax.random.key(0))]
        [[1, 1], [2, 1]]
    """

    def rows(place: Array) -> tuple[AnyArray, Array]:
        client = client_key(key, SPLIT, ids(federation)[place])
        mixed, _ = rows_of(shuffled(client, view(federation, place)))
        # Shapes cannot depend on a client's size. So the second half is rolled to the front, and
        # the sizes exclude the rest.
        return mixed, jnp.roll(mixed, -(federation.sizes[place] // 2))

    first, second = jax.lax.map(rows, jnp.arange(federation.num_clients))
    half = federation.sizes // 2
    pool = federation._replace(indices=first, sizes=half)
    return pool, federation._replace(indices=second, sizes=federation.sizes - half)
