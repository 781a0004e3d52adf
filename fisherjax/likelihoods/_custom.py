"""Likelihoods of a loss that a user writes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._other_libraries import summary
from fisherjax.likelihoods._distributions import columns_of, over_examples
from fisherjax.typing import AnyArray, Array, ByPosition, Key, Likelihood


def _unknown(field: str, kinds: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise ValueError(
            f"This model's likelihood, of likelihoods.custom, has no {field}, which the kinds "
            f"{kinds} of the Fisher read; expected another kind, such as kind=fisher.empirical, or "
            f"likelihoods.custom(loss, {field}=...)."
        )

    return refuse


def _accept(shape: tuple[int, ...], y: Any) -> None:
    del shape, y


unknown = Likelihood(
    negative_log_likelihood=_unknown("loss", "empirical"),
    sample=_unknown("sample", "sampled"),
    factor=_unknown("factor", "true and curvature_propagation"),
    check=_accept,
)
"""What is not known of a loss: its functions raise an error that says which `custom` lacks."""


@cached
def custom(
    loss: Callable[[Array, Any], Any],
    like: Likelihood = unknown,
    *,
    sample: Callable[[Key, Array], Any] | None = None,
    factor: Callable[[Array], Array] | None = None,
    correct: Callable[[Array, Any], Any] | None = None,
) -> Likelihood:
    """Make a likelihood of your own loss.

    All functions take one output vector z [C], of an example or of a position of a sequence, and
    its target y; they are mapped over examples and positions, whose losses add up.

    * Training, `fisher.empirical` and the loss of metrics need the loss only.
    * `fisher.sampled` needs `sample`, as targets are drawn from the model.
    * `fisher.true` and `curvature_propagation`, also as `fisher.automatic`, need `factor`.
    * Accuracies need `correct`.

    What the functions return is checked by its shape and dtype where they are first used, and what
    `sample` draws also where the data's targets are.

    Args:
        loss: `(z, y) -> number`, the negative log-likelihood in nats, up to a constant.
        like: Likelihood that has the functions that are not given, and whose targets y are: with
            `categorical`, only the loss of classes is another. By default they are unknown.
        sample: `(key, z) -> y`, one draw of the target.
        factor: `z -> S [K, C]`, whose rows s_k have sum_k s_k s_k^T = E_y[g g^T], the expectation
            over the model's targets of the loss's gradients g with respect to z.
        correct: `(z, y) -> bool`, whether a prediction is correct.

    Raises:
        TypeError: If one is no function, or `like` no likelihood.
        ValueError: Where they are used, if one fails or returns anything else, or what is drawn
            does not fit the loss, the targets or `like`.

    Example:
        >>> from fisherjax.likelihoods import categorical, smoothed
        >>> share = 0.1
        >>> def label_smoothing(z, y):
        ...     log_p = jax.nn.log_softmax(z)
        ...     return -(1 - share) * log_p[y] - share * log_p.mean()
        >>> own = custom(label_smoothing, like=categorical)
        >>> z, y = jnp.array([[2.0, 0.0]]), jnp.array([0])
        >>> print(*(f"{x.negative_log_likelihood(z, y)[0]:.3f}" for x in (own, smoothed(share))))
        0.227 0.227
    """
    checks.function("loss", loss, "lambda z, y: optax.huber_loss(z, y).sum()")
    checks.instance("like", like, Likelihood, "one such as likelihoods.categorical")
    for name, function, example in (
        ("sample", sample, "lambda key, z: jax.random.poisson(key, jnp.exp(z))"),
        ("factor", factor, "lambda z: jnp.diag(jnp.exp(z / 2))"),
        ("correct", correct, "lambda z, y: z.argmax() == y"),
    ):
        if function is not None:
            checks.function(name, function, example)

    def fits(shape: tuple[int, ...], y: AnyArray) -> None:
        like.check(shape, y)
        _check_custom(loss, shape, y)

    def check(shape: tuple[int, ...], y: AnyArray) -> None:
        fits(shape, y)
        if sample is not None:
            _check_like_data(draw, shape, y)

    def draw(key: Key, z: Array) -> Array:
        each = jax.random.split(key, z.shape[:-1])
        y = _mapped(partial(_called, "sample(key, z)", sample), z.ndim - 1)(each, z)
        try:
            fits(z.shape, y)
        except (TypeError, ValueError) as error:
            # Errors of other types derived from these may take other arguments.
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"What sample(key, z) draws is no target: {error}") from error
        return y

    def columns(z: Array) -> Array | ByPosition:
        return columns_of(_mapped(partial(_factor, factor), z.ndim - 1)(z).swapaxes(-1, -2))

    given: dict[str, Any] = {}
    if sample is not None:
        given["sample"] = draw
    if factor is not None:
        given |= {"factor": columns, "combine": None}
    if correct is not None:
        given["correct"] = lambda z, y: _mapped(partial(_correct, correct), z.ndim - 1)(z, y)
    return like._replace(
        negative_log_likelihood=lambda z, y: over_examples(_mapped(loss, z.ndim - 1)(z, y)),
        check=check,
        **given,
    )


def _called(call: str, function: Any, *given: Any) -> Array:
    """Call a user's function of one output vector, and return what it returns as an array."""
    of = " and ".join(f"shape {jnp.shape(x)} and dtype {jnp.result_type(x)}" for x in given)
    try:
        found = function(*given)
    # The user's function may raise an error of any type.
    except Exception as error:
        raise ValueError(
            f"{call} failed on arguments of {of} ({summary(error)}); expected a function of one "
            "example or position, with its arguments in this order."
        ) from error
    if not isinstance(found, (jax.Array, np.ndarray, np.generic, int, float)):
        raise ValueError(
            f"{call} returned {checks.kind_of(found)} for arguments of {of}; expected an array."
        )
    return jnp.asarray(found)


def _correct(correct: Any, z: Array, y: Array) -> Array:
    found = _called("correct(z, y)", correct, z, y)
    if found.shape or found.dtype != bool:
        raise ValueError(
            f"correct(z, y) returned shape {found.shape} and dtype {found.dtype} for an output "
            f"vector of shape {z.shape}; expected one boolean. Compare in it, as z.argmax() == y, "
            "and join the outputs by .all()."
        )
    return found


def _factor(factor: Any, z: Array) -> Array:
    found = _called("factor(z)", factor, z)
    fits = found.ndim == 2 and found.shape[0] > 0 and found.shape[1] == len(z)
    if not fits or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(
            f"factor(z) returned shape {found.shape} and dtype {found.dtype} for an output vector "
            f"of shape {z.shape}; expected a floating-point matrix [K, {len(z)}] with a row of "
            "that length for each of K >= 1 terms of E[g g^T], as jnp.diag(jnp.exp(z / 2)) is."
        )
    return found


def _check_like_data(draw: Callable, shape: tuple[int, ...], y: AnyArray) -> None:
    """Check that draws have the shape of the data's targets, and are integers if these are."""
    z = jax.ShapeDtypeStruct(shape, jnp.result_type(float))
    drawn = jax.eval_shape(draw, jax.eval_shape(jax.random.key, 0), z)
    both_whole = [not jnp.issubdtype(x.dtype, jnp.floating) for x in (y, drawn)]
    if drawn.shape != tuple(y.shape) or both_whole == [True, False]:
        raise ValueError(
            f"sample(key, z) draws targets of shape {drawn.shape[len(shape) - 1 :]} and dtype "
            f"{drawn.dtype}, but those of the data have shape {tuple(y.shape)[len(shape) - 1 :]} "
            f"and dtype {y.dtype}; expected draws like the data."
        )


def _mapped(function: Any, axes: int) -> Callable[..., Array]:
    """Map a function over so many leading axes of its arguments."""
    return function if axes == 0 else jax.vmap(_mapped(function, axes - 1))


def _check_custom(loss: Callable, shape: tuple[int, ...], y: AnyArray) -> None:
    axes = len(shape) - 1
    if y.shape[:axes] != tuple(shape[:-1]):
        raise ValueError(
            f"The outputs have shape {tuple(shape)} and the targets {tuple(y.shape)}; expected one "
            f"target for each output vector, [{', '.join(map(str, shape[:-1]))}, ...]."
        )
    z = jax.ShapeDtypeStruct(tuple(shape[-1:]), jnp.result_type(float))
    given = z, jax.ShapeDtypeStruct(y.shape[axes:], tree.shape_of(y).dtype)
    found = jax.eval_shape(partial(_called, "loss(z, y)", loss), *given)
    if found.shape or not jnp.issubdtype(found.dtype, jnp.floating):
        raise ValueError(
            f"loss(z, y) returned shape {found.shape} and dtype {found.dtype} for an output vector "
            f"of shape {given[0].shape} and a target of shape {given[1].shape}; expected one "
            "floating-point number. Sum over the outputs in it."
        )
