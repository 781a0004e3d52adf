"""DENSE's epoch written out, by networks for which nothing that is drawn matters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax.algorithms import Distillation, dense, fedavg
from fisherjax.algorithms.distillation import synthesis
from fisherjax.merging import merge

SHAPE, FEW = (8, 8, 1), Distillation(images=16, batch_size=8, steps=3, width=8)
# Of a rate so small the student stays, and the loss is that of all images.
STILL = FEW._replace(learning_rate=1e-20)
KEY = jax.random.key(1)


def constant(params, x):
    """Outputs that no image changes, but where `light` or `corner` is not zero."""
    brightest = x.reshape(len(x), -1).max(1, keepdims=True)
    light, corner = jax.lax.stop_gradient((params["light"], params["corner"]))
    seen = light * brightest + corner * x[:, 0, :1, 0]
    return params["outputs"] + seen * jnp.array([0.0, 1.0])


CONSTANT = fj.Model(constant, fj.likelihoods.categorical)


def outputs(first, second, light=0.0, corner=0.0):
    numbers = {"outputs": [first, second], "light": light, "corner": corner}
    return {name: np.array(number, "float32") for name, number in numbers.items()}


def distil(teachers, student, weights=None, model=CONSTANT, **options):
    """Teach a student that is given; two teachers and two epochs, so that programs are few."""
    teachers = teachers * 2 if len(teachers) == 1 else teachers
    sent = fj.algorithms.Update({"params": fj.tree.stack(teachers)}, fedavg().kind)
    key, how = options.pop("key", KEY), options.pop("how", FEW)._replace(fresh=True)
    algorithm = dense(model, shape=SHAPE, how=how, **{"epochs": 2} | options)
    return merge(algorithm, student, sent, weights, key=key)


def lit(x):
    """Normalise every pixel to the same number."""
    return jnp.full_like(x, 3.0)


def divergence(t, s):
    t, s = jax.nn.log_softmax(t), jax.nn.log_softmax(s)
    return (jnp.exp(t) * (t - s)).sum()


@pytest.mark.long
def test_the_student_descends_with_one_momentum_and_a_loss_of_softened_outputs():
    teachers = [outputs(3.0, -1.0), outputs(-2.0, 2.0)]
    says = 0.75 * teachers[0]["outputs"] + 0.25 * teachers[1]["outputs"]
    student, how = outputs(0.5, 1.0), FEW._replace(passes=2)
    expected, optimizer = student["outputs"], optax.sgd(how.learning_rate, momentum=0.9)
    state, losses = optimizer.init(expected), []
    for epoch in (1, 2):
        steps = []
        for _ in range(how.passes * epoch * 2):  # every image until then
            of = jax.value_and_grad(lambda s: 400 * divergence(says / 20, s / 20))
            value, gradient = of(expected)
            updates, state = optimizer.update(gradient, state)
            expected = optax.apply_updates(expected, updates)
            steps.append(value)
        losses.append(np.mean(steps[-epoch * 2 :]))
    merged, _, info = distil(teachers, student, [3.0, 1.0], how=how)
    np.testing.assert_allclose(merged["outputs"], expected, rtol=1e-4)
    np.testing.assert_allclose(info.distillation, losses, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("second", [1.0, -1.0])
def test_images_are_drawn_for_known_labels_and_where_the_student_differs(second):
    """Of equal outputs a label is worth log 2; they count as the first class."""
    teacher, student = outputs(0.0, 0.0), outputs(0.0, second)
    *_, info = distil([teacher], student)
    gap = divergence(teacher["outputs"], student["outputs"]) if second > 0 else 0.0
    np.testing.assert_allclose(info.synthesis[0], np.log(2) - 0.5 * gap, rtol=1e-5)


def test_labels_are_drawn_alike():
    *_, info = distil([outputs(0.0, 100.0)], outputs(0.0, 100.0))
    assert 0.2 < info.synthesis[0] / 100 < 0.8


@pytest.mark.long
def test_teacher_and_student_see_normalised_images():
    teacher, student = outputs(0.0, 0.0), outputs(0.0, 0.0, light=1.0)
    *_, info = distil([teacher], student, normalize=lit, how=STILL)
    gap = divergence(teacher["outputs"], jnp.array([0.0, 3.0]))
    np.testing.assert_allclose(info.synthesis, np.log(2) - 0.5 * gap, rtol=1e-5)
    softened = 400 * divergence(teacher["outputs"], jnp.array([0.0, 3.0]) / 20)
    np.testing.assert_allclose(info.distillation, softened, rtol=1e-3)


def test_the_student_learns_from_stored_bytes_as_numbers_from_0_to_1():
    *_, info = distil([outputs(0.0, 0.0)], outputs(0.0, 0.0, light=1.0), how=STILL)
    brightest = np.asarray(info.images[:16]).reshape(16, -1).max(1) / 255
    softened = [400 * divergence(np.zeros(2), np.array([0.0, x]) / 20) for x in brightest]
    np.testing.assert_allclose(info.distillation[0], np.mean(softened), rtol=1e-3)


def test_images_of_an_epoch_are_others_than_before_and_go_by_the_key():
    teachers = [outputs(1.0, 0.0), outputs(0.0, 1.0)]
    *_, info = distil(teachers, outputs(0.0, 0.0))
    *_, other = distil(teachers, outputs(0.0, 0.0), key=jax.random.key(7))
    images = [*np.split(np.asarray(info.images), 2), np.asarray(other.images)[:16]]
    assert all(own.any() for own in images)
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert (images[one] != images[two]).mean() > 0.5


@pytest.mark.slow
def test_another_width_is_another_generator():
    teacher = [outputs(1.0, 0.0)]
    narrow, wide = (
        np.asarray(distil(teacher, teacher[0], how=FEW._replace(width=width))[2].images)
        for width in (2, FEW.width)
    )
    assert (narrow != wide).mean() > 0.5


LINEAR = fj.Model(lambda w, x: x.reshape(len(x), -1) @ w, fj.likelihoods.categorical)
WEIGHTS = list(np.random.default_rng(0).normal(size=(2, 64, 3)).astype("float32"))


@pytest.fixture(scope="module")
def drawn():
    """What is drawn in 1, 4 and 9 steps, where images are the noise, whatever the generator."""

    def generate(made, noise, shape):
        return jax.nn.sigmoid(noise[:, : np.prod(shape)]).reshape(-1, *shape)

    start = np.zeros((64, 3), "float32")
    # Of a number that nothing else has: no program is there that was compiled without.
    how = FEW._replace(images=48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthesis.nn, "generate", generate)
        return [
            distil(WEIGHTS, start, model=LINEAR, how=how._replace(steps=steps), epochs=1)[2]
            for steps in (1, 4, 9)
        ]


@pytest.mark.slow
def test_the_best_images_are_kept(drawn):
    losses = [float(info.synthesis[0]) for info in drawn]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.slow
def test_noise_is_trained_too(drawn):
    still, *_, moved = (np.asarray(info.images, "int32") for info in drawn)
    assert np.abs(still - moved).max() >= 1


@pytest.mark.slow
def test_the_student_sees_crops_only_where_clients_did():
    given, found = ([outputs(0.0, 0.0)], outputs(0.0, 0.0, corner=1.0)), {}
    for crop in (False, True):
        *_, info = distil(*given, crop=crop, normalize=lit, how=STILL)
        found[crop] = info.distillation[0]
    whole = 400 * divergence(np.zeros(2), np.array([0.0, 3.0]) / 20)
    np.testing.assert_allclose(found[False], whole, rtol=1e-3)
    # The border that a crop brings in is zero.
    assert found[True] < 0.7 * whole
