"""DENSE: the server generates images, and distils the clients' models into one.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Zhang, DENSE: data-free one-shot federated learning, NeurIPS
2022, algorithm 1, as the baseline of the papers of FedFisher and FedLPA.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import leaves, likelihoods
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, averaging, check_algorithm
from fisherjax.algorithms.distillation import synthesis as distillation
from fisherjax.algorithms.distillation.synthesis import Distillation, Distilling, Fixed
from fisherjax.algorithms.stages import Stages
from fisherjax.solvers.base import as_partial
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


class DenseReport(NamedTuple):
    """Report of DENSE.

    Attributes:
        images: Generated images [n, H, W, C], as bytes.
        synthesis: Generator's loss of the images of each epoch, [epochs].
        distillation: Student's mean loss in each epoch, [epochs].
        score: Best score, a number.
    """

    images: Array
    synthesis: Array
    distillation: Array
    score: Array


@cached
def dense(
    model: Model,
    *,
    shape: tuple[int, int, int],
    start: Algorithm | None = None,
    epochs: int = 20,
    how: Distillation = Distillation(),  # noqa: B008  immutable
    normalize: Callable[[Array], Array] | None = None,
    crop: bool = False,
    score: Callable[[Params], Array] | None = None,
) -> Algorithm[DenseReport]:
    """Make DENSE, which distils the clients' models into one, on images that the server generates.

        t(x) = sum_i p_i z_i(x),   s(x) = z(x, W),
        G, v <- argmin CE(t(x), y) - a mean_n [argmax t != argmax s] KL(t || s),   x = G(v),
        W <- argmin T^2 KL(t / T || s / T) over all images so far,   T = 20,

    alternately, with a new generator G in each epoch and labels y drawn uniformly. The server needs
    only the models. Each epoch adds images to those that the student learns from, which are
    mirrored at random.

    Args:
        model: The network of clients and student, with the categorical likelihood.
        shape: Shape of an image, (H, W, C), where H and W are multiples of four.
        start: Method that makes the student's initial model from the clients' params, such as
            `fedfisher(model)`. The default is their weighted mean, or with `how.fresh` the model
            that they started from.
        epochs: Number of epochs of generating images and of learning from them.
        how: Hyperparameters, `Distillation()` or `FEDLPA_DISTILLATION`.
        normalize: Function from images with values from 0 to 1 to inputs of the network; the
            default is the identity, as in both papers' code.
        crop: Whether the student also learns from randomly cropped images, as for CIFAR-10.
        score: Function params -> scalar, higher is better, such as the accuracy on validation data.
            The merged model is the best student of all epochs, the first of equal ones; without a
            score it is the last student.

    Returns:
        The algorithm, whose `aggregate` is `Stages`, one per epoch: see `in_stages`. Updates are
        those of `start`; it reports `DenseReport`.

    Raises:
        ValueError: If an argument is out of range, the likelihood is not categorical, or updates
            contain no params; on merge, if the network has running statistics, or if the student
            diverges and there is no score.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x.reshape(len(x), -1) @ w, fj.likelihoods.categorical)
        >>> images = jnp.concatenate([jnp.zeros((2, 4, 4, 1)), jnp.ones((2, 4, 4, 1))])
        >>> federation = fj.clients.federation((images, jnp.array([0, 0, 1, 1])), [[0, 2], [1, 3]])
        >>> few = fj.algorithms.Distillation(images=8, steps=2, batch_size=4)
        >>> method = dense(model, shape=(4, 4, 1), epochs=2, how=few)
        >>> models = [jnp.zeros((16, 2)), jnp.ones((16, 2))]
        >>> sent = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
        >>> merged, _, info = fj.merging.merge(method, models[0], sent)
        >>> merged.shape, info.images.shape
        ((16, 2), (16, 4, 4, 1))

    Source: the paper above; constants from the experiments of Jhunjhunwala, Wang, Joshi, FedFisher,
        AISTATS 2024, and Liu et al., FedLPA, NeurIPS 2024. Both papers select an epoch, the first
        by validation data, the second by test data: `score`. Deviations: without the loss of
        BatchNorm's statistics, networks with them are refused; a "fresh" student starts from the
        clients' initial model, not from another random one; convolutions of the generator are
        computed on small images, see `nn`.
    """
    merge: Algorithm[Any] = averaging() if start is None else start
    _check(model, shape, merge, how)
    checks.count("epochs", epochs)
    for name, function in (("normalize", normalize), ("score", score)):
        if function is not None:
            checks.function(name, function, "a function of one argument")
    checks.instance("crop", crop, bool, "True or False")
    # As a pytree, its arrays become arguments of the compiled epoch rather than constants in it.
    evaluate = None if score is None else as_partial(score)
    fixed = Fixed(model, shape, how, normalize or _identity, crop)

    def begin(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> Distilling:
        values, weights = received
        _check_params(values)
        if how.fresh and start is None:
            student = params
        else:
            sums = received if merge.reduce is None else merge.reduce(values, weights)
            trained = leaves.trained(model, params)
            student, _, _ = merge.aggregate(key, sums, trained, state, cohort)
            student = leaves.join(student, params)
        student = jax.tree.map(lambda x, w: jnp.asarray(x, jnp.result_type(w)), student, params)
        return distillation.begin(fixed, key, student, epochs)

    def advance(received: Any, work: Distilling) -> Distilling:
        values, weights = received
        return distillation.epoch(fixed, evaluate, values["params"], weights, work)

    def finish(work: Distilling, state: Any) -> tuple[Params, Any, DenseReport]:
        params = work.best
        if score is None:
            _check_converged(work, how)
            params = work.student
        synthesis, distillation = work.losses.T
        return params, state, DenseReport(work.images, synthesis, distillation, work.score)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        if jax.tree.leaves(trained.statistics):
            raise ValueError(
                "This network has running statistics, as of BatchNorm, but this DENSE lacks the "
                "paper's loss for them; expected one without, such as networks.LeNet()."
            )
        return merge.summarize(key, trained, examples, local)

    link, stages = merge.link._replace(whole=True), Stages(epochs, begin, advance, finish)
    return merge._replace(
        summarize=summarize, aggregate=stages, reduce=None, model=model, link=link
    )


def _identity(images: Array) -> Array:
    return images


def _check(model: Model, shape: Any, start: Algorithm, how: Distillation) -> None:
    checks.model(model)
    if not likelihoods.is_categorical(model.likelihood):
        raise ValueError("DENSE draws labels: the model's likelihood must be the categorical one.")
    whole = isinstance(shape, tuple) and all(isinstance(x, int) and x > 0 for x in shape)
    if not (whole and len(shape) == 3 and shape[0] % 4 == shape[1] % 4 == 0):
        raise ValueError(
            f"shape is {shape}; expected that of an image, (height, width, channels), such as "
            "(28, 28, 1), with height and width multiples of four: the generator doubles twice."
        )
    check_algorithm(start)
    has_stages = isinstance(start.aggregate, Stages)
    if start.gives != "model" or has_stages:
        raise ValueError(
            f"start returns '{start.gives}'{', in stages' if has_stages else ''}; DENSE starts "
            "from one model that is merged in one stage: expected a start such as fedavg() or "
            "fedfisher(model)."
        )
    checks.instance("how", how, Distillation, "Distillation() or FEDLPA_DISTILLATION")
    for name in ("batch_size", "images", "steps", "width", "passes"):
        checks.count(f"how.{name}", getattr(how, name))
    if how.width % 2:
        raise ValueError(f"how.width is {how.width}; expected an even number, such as 32.")
    if how.images % how.batch_size:
        raise ValueError(
            f"how.batch_size is {how.batch_size}; expected a divisor of the {how.images} images "
            "of an epoch, such as 64."
        )
    checks.number("how.adversarial", how.adversarial)
    checks.positive("how.learning_rate", how.learning_rate)


def _check_converged(work: Distilling, how: Distillation) -> None:
    if checks.is_traced(work):
        return
    losses = np.asarray(work.losses[:, 1])
    diverged = np.flatnonzero(~np.isfinite(losses))
    if diverged.size:
        raise ValueError(
            f"DENSE's student diverged in epoch {diverged[0] + 1} of {len(losses)}: its loss is "
            f"{losses[diverged[0]]}. Lower how.learning_rate (now {how.learning_rate:g}), or pass "
            "a score, which selects the best student of all epochs."
        )


def _check_params(values: dict[str, Any]) -> None:
    if "params" not in values:
        raise ValueError(
            f"Clients sent {sorted(values)}; DENSE needs their params: expected a start whose "
            "clients send them, such as fedavg() or fedfisher(model)."
        )
