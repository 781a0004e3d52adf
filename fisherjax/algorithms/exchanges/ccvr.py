"""Classifier calibration with virtual representations: tune the last layer on sampled features.

Luo, Chen, Hu, Zhang, Liang, Feng, No fear of heterogeneity: classifier calibration for federated
learning with non-IID data, NeurIPS 2021. Clients send moments of the features of each class, and
the server samples features of all classes, by their shares among all clients.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import _optimizers, likelihoods
from fisherjax._core import checks, linalg
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax._layers.layer import Layer, matrix, unpack
from fisherjax.algorithms.base import Algorithm, WeightedSum
from fisherjax.algorithms.exchanges._head_sums import head_mean, head_summary
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.typing import Array, Key, Model, Params

_SGD = optax.sgd(0.003, momentum=0.9)
_BATCH = 64


class CCVRReport(NamedTuple):
    """Report of the tuning.

    Attributes:
        before: Mean loss of the sampled features, in nats, at the received model.
        after: The same at the tuned model.
    """

    before: Array
    after: Array


@cached
def ccvr(
    model: Model,
    *,
    draws: int = 20_000,
    epochs: int = 3,
    optimizer: optax.GradientTransformation = _SGD,
    batch_size: int = 64,
    max_examples: int | None = None,
) -> Algorithm[CCVRReport]:
    """Make the exchange that tunes the last dense layer on features sampled from Gaussians.

        y ~ pi,   a ~ N(mu_y, S),   mu_c = E[a | c],   S = E[a a^T] - sum_c pi_c mu_c mu_c^T,
        V <- steps of the optimiser on -log p(y | V^T a), from the current V,

    where pi are the shares of the classes and a the inputs of that layer at the model that clients
    receive; if a is never negative, as behind a ReLU, samples are clipped at zero. Outputs are
    still logits. All other leaves stay the same: see `merging.exchange`. Clients send the same sums
    as for `analytic_head`, which disclose each client's label counts and class means to the server,
    unless secure aggregation adds them up.

    Args:
        model: The network, whose outputs are those of a dense layer, with the categorical
            likelihood.
        draws: Number of features that the server samples.
        epochs: Number of passes over them, in minibatches of 64 in a new order.
        optimizer: An optax optimiser (default SGD with step size 0.003 and momentum 0.9).
        batch_size: Minibatch size of the clients' pass.
        max_examples: Largest number of a client's examples in its sums; None (default) uses all.

    Returns:
        The algorithm. Updates are {"head": HeadSums}, of which the server needs only sums; it
        reports `CCVRReport`.

    Raises:
        ValueError: If a number is out of range or the likelihood is not categorical; on summarize,
            if the outputs are not exactly those of a dense layer (a softmax or a temperature
            follows, or its kernel is used elsewhere too), or the model's mask leaves that layer
            out.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.categorical)
        >>> x, y = jnp.array([[1.0, 0.0], [0.0, 1.0]] * 4), jnp.array([0, 1] * 4)
        >>> federation = fj.clients.federation((x, y), [range(5), range(5, 8)])
        >>> start, key = {"w": jnp.zeros((2, 2))}, jax.random.key(0)
        >>> merged, _, tuned = fj.merging.exchange(ccvr(model), start, federation, key=key)
        >>> bool((jnp.argmax(x @ merged["w"], 1) == y).all()), bool(tuned.after < tuned.before)
        (True, True)

    Source: the paper above, algorithm 1. Deviations: one covariance within classes for all classes,
        so that the sums need no matrix for each class; classes are sampled by their shares, not
        equally often; samples are clipped.
    """
    checks.model(model)
    if not likelihoods.is_categorical(model.likelihood):
        raise ValueError(
            "Features are sampled for classes, and the model's likelihood is another than the "
            "categorical one; expected that one or, of a loss of your own, likelihoods.custom("
            "loss, like=likelihoods.categorical) without a factor. Of the others, "
            "algorithms.analytic_head takes gaussian and bernoulli."
        )
    for name, value in (("draws", draws), ("epochs", epochs)):
        checks.count(name, value)
    checks.optimizer("optimizer", optimizer)

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del cohort
        template, layer = Template.of(params), sums.total.layer
        leaves = template.by_name(params)
        start = _matrix(layer, leaves)
        _optimizers.check("optimizer", optimizer, start)
        features, labels = _drawn(key, sums, draws)
        own, info = _tuned(optimizer, epochs, layer, start, features, labels, key)
        return template.restore(leaves | own), state, info

    return head_summary(model, aggregate, batch_size, max_examples)


_matrix = jit(matrix, static_argnums=0)


@partial(jit, static_argnums=2)
def _drawn(key: Key, total: WeightedSum, draws: int) -> tuple[Array, Array]:
    """Sample features [draws, a] and their classes [draws]."""
    sums, (which, noise) = head_mean(total), jax.random.split(jax.random.fold_in(key, 0))
    shares = sums.targets / sums.targets.sum()
    # Each position of a sequence counts.
    products, inputs = (x / sums.targets.sum() for x in (sums.products, sums.inputs))
    means = jnp.where(shares > 0, products / jnp.where(shares > 0, shares, 1), 0).T  # [C, a]
    between = jnp.einsum("c,ca,cb->ab", shares, means, means, precision=PRECISION)
    eigenvalues, vectors = linalg.eigh(inputs - between)
    root = jnp.sqrt(jnp.maximum(eigenvalues, 0))[:, None] * vectors.T
    labels = jax.random.categorical(which, jnp.log(shares), shape=(draws,))
    normal = jax.random.normal(noise, (draws, len(inputs)), inputs.dtype)
    features = means[labels] + jnp.matmul(normal, root, precision=PRECISION)
    features = jnp.where(sums.negative > 0, features, jnp.maximum(features, 0))
    if sums.layer.bias is not None:
        features = features.at[:, -1].set(1)
    return features, labels


@partial(jit, static_argnums=(0, 1, 2))
def _tuned(
    optimizer: optax.GradientTransformation,
    epochs: int,
    layer: Layer,
    value: Array,
    features: Array,
    labels: Array,
    key: Key,
) -> tuple[dict[str, Array], CCVRReport]:
    def loss(value: Array, features: Array, labels: Array) -> Array:
        z = features @ value
        return optax.softmax_cross_entropy_with_integer_labels(z, labels).mean()

    def step(carry: tuple, batch: Array) -> tuple[tuple, None]:
        value, state = carry
        of = partial(loss, features=features[batch], labels=labels[batch])
        arguments = _optimizers.loss_arguments(of, *jax.value_and_grad(of)(value))
        update = _optimizers.with_extra_args(optimizer).update
        updates, state = update(arguments["grad"], state, value, **arguments)
        return (optax.apply_updates(value, updates), state), None

    length = min(_BATCH, len(labels))
    number = len(labels) // length

    def batches_of(epoch: Array) -> Array:
        order = jax.random.permutation(jax.random.fold_in(key, epoch), len(labels))
        return order[: number * length].reshape(number, length)

    # A loop, since each permutation is a sort, which takes long to compile.
    batches = jax.lax.map(batches_of, jnp.arange(1, epochs + 1)).reshape(-1, length)
    before = loss(value, features, labels)
    (value, state), _ = jax.lax.scan(step, (value, optimizer.init(value)), batches)
    value = _optimizers.final_params(value, state)
    return unpack(layer, value), CCVRReport(before, loss(value, features, labels))
