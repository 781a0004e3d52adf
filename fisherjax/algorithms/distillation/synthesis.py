"""Distillation without data: images that a teacher knows, and a student that learns from them.

An epoch draws images by a generator that is trained afresh, and teaches the student all images
until then. `algorithms.dense` plays as many as it is told.

Source: Zhang et al., DENSE, NeurIPS 2022, and its code. Deviation: images are kept as bytes, as
there, but a pixel is rounded to the nearest; that code cuts off what is behind the point, by which
its images are half a level of 255 darker on average than what its generator drew.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import leaves, nn, parallel, tree
from fisherjax._core.compiler import jit
from fisherjax.datasets import crop_and_flip
from fisherjax.typing import Array, Key, Model, Params

_NOISE = 256
_WHITE = 255  # images are kept as bytes
_TEMPERATURE = 20
_BORDER = 4  # pixels that a crop moves by
_RATES = ("adversarial", "learning_rate", "passes")


class Distillation(NamedTuple):
    """How DENSE draws and learns; as it stands as in FedFisher's experiments.

    Attributes:
        weighted: Whether the teacher is the mean of the clients' outputs by their weights.
        fresh: Whether the student begins from the model that the clients began from.
        adversarial: Weight of images on which teacher and student differ.
        learning_rate: Of the student.
        batch_size: Images of the student's minibatches; divides `images`.
        images: How many are drawn an epoch.
        steps: Of the generator, in every epoch.
        width: Channels of the generator, an even number; fewer take much less time.
        passes: Of the student over all images until then, in every epoch; the papers have one.
    """

    weighted: bool = True
    fresh: bool = False
    adversarial: float = 0.5
    learning_rate: float = 0.01
    batch_size: int = 256
    images: int = 256
    steps: int = 30
    width: int = 128
    passes: int = 1


FEDLPA_DISTILLATION = Distillation(
    weighted=False, fresh=True, adversarial=1.0, learning_rate=0.005, batch_size=64
)
"""As in FedLPA's experiments, where it takes 200 epochs."""


class Distilling(NamedTuple):
    """The work until now: the student, what it learns from, and how it went.

    Attributes:
        key: What the epochs' keys are folded from.
        epoch: How many are done.
        student: Its params.
        optimizer: The state of its optimiser.
        images: [epochs * images, H, W, C], bytes, rounded; those of epochs to come are zero.
        told: [epochs * images, 2, classes], what the teacher says of each and of its mirror image;
            nothing, [epochs * images, 0, classes], where images are cropped and it is asked anew.
        best: The params of the best score, or where there is none of the first epoch.
        score: The best score.
        losses: [epochs, 2], of the images that were kept and of the student on all until then.
    """

    key: Key
    epoch: Array
    student: Params
    optimizer: Any
    images: Array
    told: Array
    best: Params
    score: Array
    losses: Array


class Fixed(NamedTuple):
    """What an epoch is compiled for, as in `algorithms.dense`."""

    model: Model
    shape: tuple[int, int, int]
    how: Distillation
    normalize: Callable[[Array], Array]
    crop: bool


def begin(fixed: Fixed, key: Key, student: Params, epochs: int) -> Distilling:
    """Give the work before the first epoch."""
    how = fixed.how
    one = jnp.zeros((1, *fixed.shape), jnp.result_type(float))
    said = jax.eval_shape(lambda w, x: fixed.model.apply(w, fixed.normalize(x)), student, one)
    number, ways = epochs * how.images, 0 if fixed.crop else 2
    return Distilling(
        key=key,
        epoch=jnp.zeros((), jnp.int32),
        student=student,
        optimizer=_optimizer(how).init(leaves.trained(fixed.model, student)),
        images=jnp.zeros((number, *fixed.shape), jnp.uint8),
        told=jnp.zeros((number, ways, said.shape[-1]), said.dtype),
        best=student,
        score=jnp.full((), -jnp.inf, jnp.float32),
        losses=jnp.zeros((epochs, 2), jnp.float32),
    )


def _optimizer(how: Distillation) -> optax.GradientTransformation:
    return optax.sgd(how.learning_rate, momentum=0.9)


def epoch(
    fixed: Fixed, evaluate: Callable | None, stacked: Params, weights: Array, work: Distilling
) -> Distilling:
    """Draw images, and teach the student all images until then."""
    how, present = fixed.how, weights > 0
    votes = weights if how.weighted else present / present.sum()
    # What does not change shapes is no constant of the program: other numbers need no other one.
    plain = how._replace(weighted=True, fresh=False, **dict.fromkeys(_RATES, 0))
    rates = tuple(getattr(how, name) for name in _RATES)
    return _epoch(fixed._replace(how=plain), evaluate, stacked, votes, rates, work)


@partial(jit, static_argnums=0)
def _epoch(
    fixed: Fixed,
    evaluate: Callable | None,
    stacked: Params,
    votes: Array,
    rates: tuple[Any, Any, Any],
    work: Distilling,
) -> Distilling:
    how = fixed.how._replace(**dict(zip(_RATES, rates, strict=True)))
    fixed, number = fixed._replace(how=how), work.epoch
    synthesis_key, student_key = jax.random.split(jax.random.fold_in(work.key, number))
    # Who has no weight is not asked, however large it is.
    stacked = tree.keep(votes > 0, stacked)

    # In turn on a CPU, where that takes two thirds of the time.
    chunk, still = parallel.chunk_size(None, len(votes)), work.student

    def teacher(x: Array) -> Array:
        # What nobody trains is the student's.
        outputs = jax.lax.map(
            lambda own: fixed.model.apply(leaves.join(own, still), x), stacked, batch_size=chunk
        )
        return jnp.tensordot(votes.astype(outputs.dtype), outputs, 1)

    images, kept = _synthesized(fixed, synthesis_key, teacher, work.student)
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=number * how.images, axis=0)
    work = work._replace(images=put(work.images, images), epoch=number + 1)
    if not fixed.crop:
        ways = [teacher(_shown(fixed, images, jnp.full(len(images), way))) for way in (False, True)]
        work = work._replace(told=put(work.told, jnp.stack(ways, 1).astype(work.told.dtype)))
    student, optimizer, loss = _distilled(fixed, student_key, teacher, work)
    value = jnp.zeros((), work.score.dtype)
    if evaluate is not None:
        value = jnp.asarray(evaluate(student), work.score.dtype)
    # Strictly, so that the first of equal scores stays; NaN is passed over.
    better = value > work.score
    return work._replace(
        student=student,
        optimizer=optimizer,
        best=jax.tree.map(lambda new, old: jnp.where(better, new, old), student, work.best),
        score=jnp.where(better, value, work.score),
        losses=work.losses.at[number].set(jnp.stack([kept, loss]).astype(work.losses.dtype)),
    )


def _synthesized(
    fixed: Fixed, key: Key, teacher: Callable[[Array], Array], student: Params
) -> tuple[Array, Array]:
    """Train a fresh generator and its noise; give the best images, as bytes, and their loss."""
    how, optimizer = fixed.how, optax.adam(1e-3, b1=0.5, b2=0.999)
    noise_key, label_key, generator_key, view_key = jax.random.split(key, 4)
    noise = jax.random.normal(noise_key, (how.images, _NOISE))
    view = crop_and_flip(fixed.normalize, padding=_BORDER)
    classes = jax.eval_shape(teacher, jnp.zeros((1, *fixed.shape))).shape[-1]
    labels = jnp.sort(jax.random.randint(label_key, (how.images,), 0, classes))

    def loss(made: tuple[nn.Generator, Array], key: Key) -> tuple[Array, Array]:
        images = nn.generate(*made, fixed.shape)
        x = view(key, images)
        t, s = teacher(x), fixed.model.apply(student, x)
        known = optax.softmax_cross_entropy_with_integer_labels(t, labels).mean()
        differ = t.argmax(1) != s.argmax(1)
        return known - how.adversarial * (differ * _divergence(t, s)).mean(), images

    def step(number: Array, carry: tuple) -> tuple:
        made, state, best, lowest = carry
        of = jax.value_and_grad(loss, has_aux=True)
        (value, images), gradient = of(made, jax.random.fold_in(view_key, number))
        updates, state = optimizer.update(gradient, state)
        better = value < lowest
        best = jnp.where(better, jnp.round(images * _WHITE).astype(jnp.uint8), best)
        return optax.apply_updates(made, updates), state, best, jnp.where(better, value, lowest)

    made = nn.init_generator(generator_key, _NOISE, fixed.shape, how.width), noise
    best = jnp.zeros((how.images, *fixed.shape), jnp.uint8)
    carry = made, optimizer.init(made), best, jnp.full((), math.inf, jnp.result_type(float))
    *_, best, lowest = jax.lax.fori_loop(0, how.steps, step, carry)
    return best, lowest


def _distilled(
    fixed: Fixed, key: Key, teacher: Callable[[Array], Array], work: Distilling
) -> tuple[Params, Any, Array]:
    """Teach the student all images; give it, its optimiser and the last pass's mean loss."""
    how, optimizer = fixed.how, _optimizer(fixed.how)
    apply, trained = leaves.bind_untrained(fixed.model, work.student)
    # Those to come are last in every order, and no step comes to them.
    drawn = jnp.arange(len(work.images)) < work.epoch * how.images
    steps = work.epoch * how.images // how.batch_size

    def lesson(key: Key, rows: Array) -> tuple[Array, Array]:
        images = work.images[rows]
        if fixed.crop:
            x = crop_and_flip(fixed.normalize, padding=_BORDER)(key, _pixels(images))
            return x, teacher(x)
        # All clients together are much larger than the student: what they said is looked up.
        mirrored = jax.random.bernoulli(key, 0.5, rows.shape)
        return _shown(fixed, images, mirrored), work.told[rows, mirrored.astype(int)]

    def loss(student: Params, x: Array, t: Array) -> Array:
        s = apply(student, x)
        return _TEMPERATURE**2 * _divergence(t / _TEMPERATURE, s / _TEMPERATURE).mean()

    def once(number: Array, carry: tuple) -> tuple:
        order_key, view_key = jax.random.split(jax.random.fold_in(key, number))
        order = jnp.argsort(jnp.where(drawn, jax.random.uniform(order_key, drawn.shape), jnp.inf))

        def step(number: Array, carry: tuple) -> tuple:
            student, state, total = carry
            rows = jax.lax.dynamic_slice_in_dim(order, number * how.batch_size, how.batch_size)
            x, told = lesson(jax.random.fold_in(view_key, number), rows)
            value, gradient = jax.value_and_grad(loss)(student, x, told)
            updates, state = optimizer.update(gradient, state, student)
            return optax.apply_updates(student, updates), state, total + value

        student, state, _ = carry
        zero = jnp.zeros((), jnp.result_type(float))
        return jax.lax.fori_loop(0, steps, step, (student, state, zero))

    carry = trained, work.optimizer, jnp.zeros((), jnp.result_type(float))
    student, state, total = jax.lax.fori_loop(0, how.passes, once, carry)
    return leaves.join(student, work.student), state, total / steps


def _pixels(images: Array) -> Array:
    """Give numbers from 0 to 1 for bytes."""
    return images.astype(jnp.result_type(float)) / _WHITE


def _shown(fixed: Fixed, images: Array, mirrored: Array) -> Array:
    """Give what the network takes for images, as they are or left to right."""
    images = _pixels(images)
    return fixed.normalize(jnp.where(mirrored[:, None, None, None], images[:, :, ::-1], images))


def _divergence(t: Array, s: Array) -> Array:
    """KL(softmax t || softmax s) of every row, in nats."""
    logs = jax.nn.log_softmax(t)
    return (jnp.exp(logs) * (logs - jax.nn.log_softmax(s))).sum(-1)
