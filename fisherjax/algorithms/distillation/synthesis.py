"""Distillation without data: generate images for a teacher, and train a student on them.

Each epoch trains a new generator, generates images, and trains the student on all images so far.
`algorithms.dense` runs the epochs.

Source: Zhang et al., DENSE, NeurIPS 2022, and its code. Deviation: images are stored as bytes, as
there, but pixels are rounded to the nearest level; that code truncates them, which makes its images
half a level of 255 darker on average than the output of the generator.
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
_WHITE = 255  # images are stored as bytes
_TEMPERATURE = 20
_BORDER = 4  # largest shift of a crop, in pixels
_RATES = ("adversarial", "learning_rate", "passes")


class Distillation(NamedTuple):
    """Hyperparameters of DENSE; the defaults are those of FedFisher's experiments.

    Attributes:
        weighted: Whether the teacher weights the clients' outputs by the clients' weights.
        fresh: Whether the student starts from the model that the clients started from.
        adversarial: Weight of the generator's loss that favours images on which teacher and student
            differ.
        learning_rate: Step size of the student.
        batch_size: Minibatch size of the student, a divisor of `images`.
        images: Number of images that each epoch generates.
        steps: Number of steps of the generator in each epoch.
        width: Number of channels of the generator, even; fewer are much faster.
        passes: Number of passes of the student over all images so far in each epoch; the papers
            use one.
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
"""Hyperparameters of FedLPA's experiments, which run 200 epochs."""


class Distilling(NamedTuple):
    """State of the distillation between epochs.

    Attributes:
        key: Key from which the keys of the epochs are folded.
        epoch: Number of completed epochs.
        student: Params of the student.
        optimizer: State of the student's optimiser.
        images: Images [epochs * images, H, W, C], as rounded bytes; zero for later epochs.
        told: Teacher's outputs [epochs * images, 2, classes] for each image and its mirror image;
            empty, [epochs * images, 0, classes], if images are cropped, because the teacher is
            then evaluated on each crop.
        best: Params with the best score; without scores, those of the first epoch.
        score: The best score.
        losses: Losses [epochs, 2], of the generator for the selected images, and of the student on
            all images so far.
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
    """Static arguments of a compiled epoch, as in `algorithms.dense`."""

    model: Model
    shape: tuple[int, int, int]
    how: Distillation
    normalize: Callable[[Array], Array]
    crop: bool


def begin(fixed: Fixed, key: Key, student: Params, epochs: int) -> Distilling:
    """Return the state before the first epoch."""
    how = fixed.how
    one = jnp.zeros((1, *fixed.shape), jnp.result_type(float))
    outputs = jax.eval_shape(lambda w, x: fixed.model.apply(w, fixed.normalize(x)), student, one)
    number, ways = epochs * how.images, 0 if fixed.crop else 2
    return Distilling(
        key=key,
        epoch=jnp.zeros((), jnp.int32),
        student=student,
        optimizer=_optimizer(how).init(leaves.trained(fixed.model, student)),
        images=jnp.zeros((number, *fixed.shape), jnp.uint8),
        told=jnp.zeros((number, ways, outputs.shape[-1]), outputs.dtype),
        best=student,
        score=jnp.full((), -jnp.inf, jnp.float32),
        losses=jnp.zeros((epochs, 2), jnp.float32),
    )


def _optimizer(how: Distillation) -> optax.GradientTransformation:
    return optax.sgd(how.learning_rate, momentum=0.9)


def epoch(
    fixed: Fixed, evaluate: Callable | None, stacked: Params, weights: Array, work: Distilling
) -> Distilling:
    """Run an epoch: generate images, and train the student on all images so far."""
    how, present = fixed.how, weights > 0
    votes = weights if how.weighted else present / present.sum()
    # Numbers that change no shapes are arguments of the compiled program, not constants of it.
    plain = how._replace(weighted=True, fresh=False, **dict.fromkeys(_RATES, 0))
    rates = tuple(getattr(how, name) for name in _RATES)
    return _epoch(fixed._replace(how=plain), evaluate, stacked, votes, rates, work)


@partial(jit, static_argnums=0, autotune=True)
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
    # The params of a client without weight must not matter, however large they are.
    stacked = tree.where(votes > 0, stacked)

    # Clients one after another on a CPU, where that takes two thirds of the time.
    chunk, frozen = parallel.chunk_size(None, len(votes)), work.student

    def teacher(x: Array) -> Array:
        # Leaves that are not trained are the student's.
        outputs = jax.lax.map(
            lambda one: fixed.model.apply(leaves.join(one, frozen), x), stacked, batch_size=chunk
        )
        return jnp.tensordot(votes.astype(outputs.dtype), outputs, 1)

    images, kept = _generate_images(fixed, synthesis_key, teacher, work.student)
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=number * how.images, axis=0)
    work = work._replace(images=put(work.images, images), epoch=number + 1)
    if not fixed.crop:
        ways = [teacher(_inputs(fixed, images, jnp.full(len(images), x))) for x in (False, True)]
        work = work._replace(told=put(work.told, jnp.stack(ways, 1).astype(work.told.dtype)))
    student, optimizer, loss = _train_student(fixed, student_key, teacher, work)
    value = jnp.zeros((), work.score.dtype)
    if evaluate is not None:
        value = jnp.asarray(evaluate(student), work.score.dtype)
    # Strictly greater, so that the first of equal scores is kept and NaN is skipped.
    better = value > work.score
    return work._replace(
        student=student,
        optimizer=optimizer,
        best=jax.tree.map(lambda new, old: jnp.where(better, new, old), student, work.best),
        score=jnp.where(better, value, work.score),
        losses=work.losses.at[number].set(jnp.stack([kept, loss]).astype(work.losses.dtype)),
    )


def _generate_images(
    fixed: Fixed, key: Key, teacher: Callable[[Array], Array], student: Params
) -> tuple[Array, Array]:
    """Train a new generator and its noise; return the best images, as bytes, and their loss."""
    how, optimizer = fixed.how, optax.adam(1e-3, b1=0.5, b2=0.999)
    noise_key, label_key, generator_key, view_key = jax.random.split(key, 4)
    noise = jax.random.normal(noise_key, (how.images, _NOISE))
    view = crop_and_flip(fixed.normalize, padding=_BORDER)
    classes = jax.eval_shape(teacher, jnp.zeros((1, *fixed.shape))).shape[-1]
    labels = jnp.sort(jax.random.randint(label_key, (how.images,), 0, classes))

    def loss(pair: tuple[nn.Generator, Array], key: Key) -> tuple[Array, Array]:
        images = nn.generate(*pair, fixed.shape)
        x = view(key, images)
        t, s = teacher(x), fixed.model.apply(student, x)
        known = optax.softmax_cross_entropy_with_integer_labels(t, labels).mean()
        differ = t.argmax(1) != s.argmax(1)
        return known - how.adversarial * (differ * _divergence(t, s)).mean(), images

    def step(number: Array, carry: tuple) -> tuple:
        pair, state, best, lowest = carry
        of = jax.value_and_grad(loss, has_aux=True)
        (value, images), gradient = of(pair, jax.random.fold_in(view_key, number))
        updates, state = optimizer.update(gradient, state)
        better = value < lowest
        best = jnp.where(better, jnp.round(images * _WHITE).astype(jnp.uint8), best)
        return optax.apply_updates(pair, updates), state, best, jnp.where(better, value, lowest)

    pair = nn.init_generator(generator_key, _NOISE, fixed.shape, how.width), noise
    best = jnp.zeros((how.images, *fixed.shape), jnp.uint8)
    carry = pair, optimizer.init(pair), best, jnp.full((), math.inf, jnp.result_type(float))
    *_, best, lowest = jax.lax.fori_loop(0, how.steps, step, carry)
    return best, lowest


def _train_student(
    fixed: Fixed, key: Key, teacher: Callable[[Array], Array], work: Distilling
) -> tuple[Params, Any, Array]:
    """Train the student on all images; return it, its optimiser and the last pass's mean loss."""
    how, optimizer = fixed.how, _optimizer(fixed.how)
    apply, trained = leaves.bind_untrained(fixed.model, work.student)
    # Images of later epochs are last in each order, and no step reaches them.
    exists = jnp.arange(len(work.images)) < work.epoch * how.images
    steps = work.epoch * how.images // how.batch_size

    def minibatch(key: Key, rows: Array) -> tuple[Array, Array]:
        images = work.images[rows]
        if fixed.crop:
            x = crop_and_flip(fixed.normalize, padding=_BORDER)(key, _pixels(images))
            return x, teacher(x)
        # Outputs of the teacher are stored, because all clients together are much larger than the
        # student.
        mirrored = jax.random.bernoulli(key, 0.5, rows.shape)
        return _inputs(fixed, images, mirrored), work.told[rows, mirrored.astype(int)]

    def loss(student: Params, x: Array, t: Array) -> Array:
        s = apply(student, x)
        return _TEMPERATURE**2 * _divergence(t / _TEMPERATURE, s / _TEMPERATURE).mean()

    def one_pass(number: Array, carry: tuple) -> tuple:
        order_key, view_key = jax.random.split(jax.random.fold_in(key, number))
        order = jnp.argsort(jnp.where(exists, jax.random.uniform(order_key, exists.shape), jnp.inf))

        def step(number: Array, carry: tuple) -> tuple:
            student, state, total = carry
            rows = jax.lax.dynamic_slice_in_dim(order, number * how.batch_size, how.batch_size)
            x, target = minibatch(jax.random.fold_in(view_key, number), rows)
            value, gradient = jax.value_and_grad(loss)(student, x, target)
            updates, state = optimizer.update(gradient, state, student)
            return optax.apply_updates(student, updates), state, total + value

        student, state, _ = carry
        zero = jnp.zeros((), jnp.result_type(float))
        return jax.lax.fori_loop(0, steps, step, (student, state, zero))

    carry = trained, work.optimizer, jnp.zeros((), jnp.result_type(float))
    student, state, total = jax.lax.fori_loop(0, how.passes, one_pass, carry)
    return leaves.join(student, work.student), state, total / steps


def _pixels(images: Array) -> Array:
    """Convert bytes to floats from 0 to 1."""
    return images.astype(jnp.result_type(float)) / _WHITE


def _inputs(fixed: Fixed, images: Array, mirrored: Array) -> Array:
    """Convert bytes to inputs of the network, mirrored from left to right where asked for."""
    images = _pixels(images)
    return fixed.normalize(jnp.where(mirrored[:, None, None, None], images[:, :, ::-1], images))


def _divergence(t: Array, s: Array) -> Array:
    """Compute KL(softmax t || softmax s) of each row, in nats."""
    logs = jax.nn.log_softmax(t)
    return (jnp.exp(logs) * (logs - jax.nn.log_softmax(s))).sum(-1)
