"""FedOV: clients learn what they do not know, and vote only as far as they know.

Diao, Li, He, Towards addressing label skews in one-shot federated learning, ICLR 2023. A network
has one output more than there are classes, the last: unknown.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import leaves, likelihoods, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Link
from fisherjax.algorithms.distillation._outliers import make_outliers
from fisherjax.training import Trained
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params


class Voters(NamedTuple):
    """What FedOV reports of the stacked models that it gives.

    Attributes:
        clients: [V] whose they are, places among all clients.
    """

    clients: Array


def _known_only(shape: tuple[int, ...], y: Array) -> None:
    # Without the last output: nobody labels an example as unknown.
    likelihoods.categorical.check((*shape[:-1], shape[-1] - 1), y)


# Outputs are log-probabilities already, or while training minus the loss of every label.
_OPEN = likelihoods.categorical._replace(
    negative_log_likelihood=lambda z, y: -jnp.take_along_axis(z, y[..., None], -1)[..., 0],
    check=_known_only,
)


@cached
def open_set(
    model: Model,
    normalize: Callable[[Array], Array] | None = None,
    *,
    steps: int = 5,
    step: float = 0.002,
) -> Model:
    """Make the model that FedOV's clients train: it takes corrupted images for unknown.

        l = CE(z(x), y) + CE(z(x'), u) + CE(z(x) without z_y, u) + CE(z(x''), u)

    is the loss of an example, u the last of C + 1 outputs z: an image is its class y, and of the
    others rather unknown; x', the image corrupted in one of five ways, is unknown, and so is x'',
    made of it by steps that raise CE(z(x''), u), each by +-step in every pixel.

    Training takes l of every label from `apply_train`, as outputs -l [B, C + 1], for which
    B (C + 1)^2 numbers are in memory; elsewhere outputs are log-probabilities.

    Args:
        model: `apply(params, images [B, H, W, channels]) -> logits [B, C + 1]` of floating images
            as `normalize` gives them, with H = W even, at least 6. So works
            `networks.apply_fn(module, normalize)` with `datasets.normalizer`, which takes floats
            as they are. The likelihood is the categorical one.
        normalize: From stored images to floats; None takes floats. The paper divides by 255 only.
        steps: How many steps up lead from x' to x''.
        step: Of each, in the units of the normalised images.

    Returns:
        The model to give `training.train`; its targets are the C classes.

    Raises:
        ValueError: If the model trains by itself already, as with BatchNorm or dropout, or has
            another likelihood, or a number is out of range; on use, if there are fewer than 3
            outputs, or inputs are no such images.
        TypeError: On use, if inputs are not floats and nothing normalises them.

    Example:
        >>> import fisherjax as fj
        >>> plain = fj.Model(lambda w, x: x.reshape(len(x), -1) @ w, fj.likelihoods.categorical)
        >>> model = open_set(plain, lambda x: x / 255.0)
        >>> params, images = jnp.zeros((64, 3)), jnp.zeros((2, 8, 8, 1), jnp.uint8)
        >>> print(model.apply(params, images)[0].round(2))
        [-1.1 -1.1 -1.1]
        >>> z, _ = jax.jit(model.apply_train)(params, images, jax.random.key(0), jnp.ones(2))
        >>> print(model.likelihood.negative_log_likelihood(z, jnp.array([0, 1])).round(2))
        [3.99 3.99]

    Source: the paper above and its code. Deviations: no mixtures of features, whose loss the code
        adds with weight 0.01 only where no example is paired with one of its own label, as hardly
        ever happens with 64 examples of two classes; x'' is not projected, as it cannot leave the
        projection's ball of radius 0.5.
    """
    _check_plain(model)
    if model.likelihood is not likelihoods.categorical:
        raise ValueError(
            "FedOV's loss is made of cross-entropies: the model's likelihood must be "
            "likelihoods.categorical, and labels are not smoothed."
        )
    if normalize is not None:
        checks.function("normalize", normalize, "datasets.normalizer(dataset)")
    checks.count("steps", steps)
    checks.positive("step", step)

    def ready(inputs: Array) -> Array:
        return jnp.asarray(inputs if normalize is None else normalize(inputs))

    def apply(params: Params, inputs: Array) -> Array:
        return jax.nn.log_softmax(_open_outputs(model.apply, params, ready(inputs)))

    def apply_train(params: Params, inputs: Array, key: Key, weights: Array) -> tuple[Array, None]:
        del weights  # what they leave out is left out of the loss
        images = ready(inputs)
        outliers = make_outliers(key, images)
        harder = _adversarial(model.apply, params, outliers, steps, step)
        # All at once: one pass of three times the minibatch.
        every = jnp.concatenate([images, outliers, harder])
        own, *unknown = jnp.split(_open_outputs(model.apply, params, every), 3)
        unsure = jnp.asarray(sum(_unknown_loss(z) for z in unknown))
        return -(_label_losses(own) + unsure[:, None]), None

    return model._replace(apply=apply, likelihood=_OPEN, apply_train=apply_train)


def _check_plain(model: Model) -> None:
    checks.model(model)
    if model.apply_train is not None:
        raise ValueError(
            "The model has an apply_train already, for BatchNorm, dropout or augmentation; "
            "expected one that trains by apply alone, as FedOV puts its own there."
        )


def _open_outputs(apply: Apply, params: Params, images: Array) -> Array:
    z = apply(params, images)
    if z.ndim != 2 or z.shape[-1] < 3:
        raise ValueError(
            f"apply returned outputs of shape {z.shape}; expected [B, C + 1], of at least two "
            "classes and of unknown. Give the network one output more than there are classes."
        )
    return z


def _unknown_loss(z: Array) -> Array:
    """Compute CE(z, u), [B]."""
    return -jax.nn.log_softmax(z)[:, -1]


def _label_losses(z: Array) -> Array:
    """Compute CE(z, y) + CE(z without z_y, u) of every label y, [B, C + 1]."""
    others = jnp.where(jnp.eye(z.shape[-1], dtype=bool), -jnp.inf, z[:, None, :])
    # Summed anew without each, because log(1 - p_y) of a sure network is that of rounding.
    return jax.nn.logsumexp(others, axis=-1) - z[:, -1:] - jax.nn.log_softmax(z)


def _adversarial(apply: Apply, params: Params, images: Array, steps: int, step: float) -> Array:
    """Move every pixel by steps of a fixed size that raise CE(z, u); no gradient passes."""
    # Stopped before the loop, which otherwise is differentiated in vain.
    params, images = jax.lax.stop_gradient((params, images))

    def loss(x: Array) -> Array:
        return _unknown_loss(_open_outputs(apply, params, x)).sum()

    def up(x: Array, _: None) -> tuple[Array, None]:
        return x + step * jnp.sign(jax.grad(loss)(x)), None

    return jax.lax.scan(up, images, None, length=steps)[0]


@cached
def voting(model: Model, quorum: int | None = None) -> Model:
    """Make the model of several: the vote of those that know an input best.

        log v(c | x) = log mean_{i in Q(x)} p_i(c | x),   c = 1 .. C

    with p_i the softmax of all C + 1 outputs of model i, and Q(x) the models with the lowest
    p_i(unknown | x). A model that does not know has little to say: it gives all to unknown.

    Args:
        model: The network of one client, with C + 1 outputs: the one given to `open_set`, or what
            that made.
        quorum: How many models vote on an input; None is all.

    Returns:
        A model whose params are stacked, leaves [V, ...], such as those that `fedov` merges to:
        `metrics.accuracy(voting(model), stacked, test)`. Its outputs are [B, C].

    Raises:
        ValueError: If the likelihood is no categorical one or the quorum is out of range; on use,
            if there are fewer models than it, or fewer than 3 outputs.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: jnp.log(x @ w), fj.likelihoods.categorical)
        >>> stacked, x = jnp.array([[[0.8, 0.1, 0.1]], [[0.1, 0.2, 0.7]]]), jnp.ones((1, 1))
        >>> print(*(f"{v:.2f}" for v in jnp.exp(voting(model).apply(stacked, x))[0]))
        0.45 0.15
        >>> print(*(f"{v:.2f}" for v in jnp.exp(voting(model, quorum=1).apply(stacked, x))[0]))
        0.80 0.10

    Source: the paper above, section 3, where a vote is the sum.
    """
    _check_classes(model)
    if quorum is not None:
        checks.count("quorum", quorum)

    def apply(stacked: Params, inputs: Array) -> Array:
        number = jax.tree.leaves(stacked)[0].shape[0]
        checks.stacked(stacked, number)
        if quorum is not None and quorum > number:
            raise ValueError(f"quorum is {quorum}; expected at most the {number} models.")
        # In turn: the activations of one model only are in memory.
        z = jax.lax.map(lambda params: _open_outputs(model.apply, params, inputs), stacked)
        votes = jax.nn.log_softmax(z)
        chosen = number if quorum is None else quorum
        if chosen < number:
            _, best = jax.lax.top_k(-votes[..., -1].T, chosen)  # [B, quorum]
            votes = jnp.take_along_axis(votes, best.T[..., None], axis=0)
        return jax.nn.logsumexp(votes[..., :-1], axis=0) - np.log(chosen)

    return Model(apply, likelihoods.categorical)


def _check_classes(model: Model) -> None:
    checks.model(model)
    if not likelihoods.is_categorical(model.likelihood):
        raise ValueError(
            "Clients vote on classes: the model's likelihood must be a categorical one, as that of "
            "open_set(model) is."
        )


@cached
def fedov(model: Model) -> Algorithm[Voters]:
    """Make FedOV, whose merged model is the clients' models, stacked, for a vote.

        W = (W_i) over clients of p_i > 0,   predictions by `voting(model)` at W.

    Weights say only who is left out. Clients train `open_set(model)`, best from initial models of
    their own. `distilled` makes one model of it.

    Args:
        model: The network of one client, with C + 1 outputs: the one given to `open_set`, or what
            that made.

    Returns:
        The algorithm. Updates are {"params": W_i}. The merged leaves are [V, ...], so that rounds
        cannot go on from them. It reports `Voters`.

    Raises:
        ValueError: If the likelihood is no categorical one; on a merge, if the clients' leaves have
            other shapes than params.
        TypeError: On a merge under `jit`: who is left out is found on the host.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.arange(2)), [[0], [1], [0]])
        >>> models, key = [n * jnp.ones((2, 3)) for n in range(3)], jax.random.key(0)
        >>> sent = fj.merging.summarize(fedov(model), models, federation, key=key)
        >>> stacked, _, voters = fj.merging.merge(fedov(model), models[0], sent, [1, 0, 1])
        >>> stacked.shape, voters.clients.tolist()
        ((2, 2, 3), [0, 2])

    Source: the paper above, algorithm 1.
    """
    _check_classes(model)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        del key, examples
        return {"params": trained.params}, local

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key
        if checks.is_traced(received):
            raise TypeError(
                "FedOV finds on the host which clients have weight: call merging.merge outside of "
                "jit and vmap, and not in rounds."
            )
        updates, weights = received
        one = jax.tree.map(lambda leaf: leaf[0], updates["params"])
        trained = leaves.trained(model, params)
        if tree.shapes(one) != tree.shapes(trained):
            raise ValueError(
                f"Clients have leaves of shapes {tree.shapes(one)}, but params has "
                f"{tree.shapes(trained)}. Pass the params of the network that the clients trained."
            )
        present = np.flatnonzero(np.asarray(weights) > 0)
        stacked = jax.tree.map(lambda leaf: leaf[present], updates["params"])
        # A vote runs all of them: what nobody trains is there for each.
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(present), *jnp.shape(x))), params)
        stacked = leaves.join(stacked, copies)
        return stacked, state, Voters(jnp.asarray(cohort)[present])

    kind = "params of an open set"
    link = Link(whole=True)
    return Algorithm(summarize, aggregate, kind=kind, model=model, gives="votes", link=link)
