"""FedOV: the loss of every label, what is destroyed, the vote, and the student made of it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax.algorithms.distillation._open_set import _adversarial, open_set
from fisherjax.algorithms.distillation._outliers import (
    _blurred,
    _cut,
    _erased,
    _rotated,
    _stretched,
)
from fisherjax.algorithms.distillation._outliers import make_outliers as one_by_one
from fisherjax.algorithms.distillation.fedov import fedov, voting
from fisherjax.algorithms.distillation.student import distilled

IMAGES = np.random.default_rng(0).random((6, 8, 8, 2), np.float32)
KEY = jax.random.key(3)


def apply(params, x):
    x = x.reshape(len(x), -1)
    return jnp.tanh(x @ params["a"]) @ params["b"] + params["c"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)
# Compiled in one piece: as in training, and faster than each operation by itself.
make_outliers = jax.jit(one_by_one)
adversarial = jax.jit(lambda params, x: _adversarial(apply, params, x, 5, 0.002))


def drawn(seed, inputs=128, outputs=4):
    source = np.random.default_rng(seed)
    shapes = {"a": (inputs, 12), "b": (12, outputs), "c": (outputs,)}
    return {n: source.normal(size=s).astype(np.float32) / 3 for n, s in shapes.items()}


outputs_of = jax.jit(apply)


@jax.jit
def cross_entropy(z, y):
    labels = jnp.full(len(z), y) if np.ndim(y) == 0 else y
    return optax.softmax_cross_entropy_with_integer_labels(z, labels)


@jax.jit
def unknown_loss(params, x):
    return cross_entropy(apply(params, x), 3)


# -- the loss ------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_loss_of_every_label_is_the_sum_of_four_cross_entropies():
    params, model = drawn(0), open_set(MODEL)
    outputs, new = jax.jit(model.apply_train)(params, IMAGES, KEY, np.ones(6, np.float32))
    assert outputs.shape == (6, 4)
    assert new is None
    broken = make_outliers(KEY, IMAGES)
    harder = adversarial(params, broken)
    z = np.asarray(outputs_of(params, IMAGES))
    loss = jax.jit(model.likelihood.negative_log_likelihood)
    for y in range(3):
        # Unknown has one place less without the class.
        others = np.asarray(cross_entropy(np.delete(z, y, axis=1), 2))
        whole = np.asarray(cross_entropy(z, y)) + others
        whole += sum(np.asarray(unknown_loss(params, x)) for x in (broken, harder))
        found = loss(outputs, np.full(6, y))
        np.testing.assert_allclose(found, whole, rtol=1e-5)


@pytest.mark.long
def test_it_is_finite_and_has_a_slope_where_the_network_is_sure():
    model = open_set(fj.Model(lambda w, x: x[:, 0, 0, :1] * w, fj.likelihoods.categorical))
    sure = jnp.array([90.0, 0.0, -50.0])

    def loss(w):
        z, _ = model.apply_train(w, jnp.ones((1, 6, 6, 1)), KEY, jnp.ones(1))
        return model.likelihood.negative_log_likelihood(z, jnp.array([0]))[0]

    value, slope = jax.jit(jax.value_and_grad(loss))(sure)
    # At x = 1 of the last two outputs, 0 and -50, the second is taken for unknown at a loss of 50.
    assert value > 50
    assert np.isfinite(slope).all()
    assert slope[1] > 0.9
    assert slope[2] < -0.9


def test_outputs_elsewhere_are_log_probabilities_with_the_categorical_fisher():
    params, model = drawn(0), open_set(MODEL)
    found = jax.jit(model.apply)(params, IMAGES)
    expected = jax.jit(lambda w, x: jax.nn.log_softmax(apply(w, x)))(params, IMAGES)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    labels = np.arange(6) % 3
    losses = model.likelihood.negative_log_likelihood(found, labels)
    np.testing.assert_allclose(losses, cross_entropy(found, labels), rtol=1e-5)
    assert fj.likelihoods.is_categorical(model.likelihood)


def test_steps_up_raise_the_loss_of_unknown_and_go_no_further_than_they_can():
    params, before = drawn(0), IMAGES
    moved = np.asarray(adversarial(params, before))
    assert (unknown_loss(params, moved) > unknown_loss(params, before)).all()
    assert np.abs(moved - before).max() <= 5 * 0.002 + 1e-6
    assert np.abs(moved - before).max() > 4.9 * 0.002


@pytest.mark.long
def test_no_gradient_passes_through_the_steps():
    params, broken = drawn(0), make_outliers(KEY, IMAGES)
    fixed = adversarial(params, broken)
    labels = np.arange(6) % 3

    def whole(w):
        z = apply(w, IMAGES)
        others = jnp.where(jax.nn.one_hot(labels, 4) > 0, -jnp.inf, z)
        unknown = jax.nn.logsumexp(others, axis=1) - z[:, 3]
        return (
            cross_entropy(z, labels) + unknown + unknown_loss(w, broken) + unknown_loss(w, fixed)
        ).mean()

    model = open_set(MODEL)

    def loss(w):
        z, _ = model.apply_train(w, IMAGES, KEY, np.ones(6, np.float32))
        return model.likelihood.negative_log_likelihood(z, labels).mean()

    pair = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(whole))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *pair)


@pytest.mark.long
def test_stored_images_are_normalised_once():
    stored = (255 * IMAGES).astype(np.uint8)
    plain, scaled = open_set(MODEL), open_set(MODEL, lambda x: x / np.float32(255))
    params, ready = drawn(0), stored / np.float32(255)
    np.testing.assert_allclose(
        jax.jit(scaled.apply)(params, stored), jax.jit(plain.apply)(params, ready), rtol=1e-6
    )
    pair = (
        jax.jit(model.apply_train)(params, x, KEY, np.ones(6, np.float32))[0]
        for model, x in ((scaled, stored), (plain, ready))
    )
    np.testing.assert_allclose(*pair, rtol=1e-5)


def test_equal_arguments_give_one_model():
    assert open_set(MODEL, steps=2) is open_set(MODEL, steps=2)
    assert voting(MODEL) is voting(MODEL, None)
    assert fedov(MODEL) is fedov(MODEL)


# -- what is destroyed ---------------------------------------------------------------------------


def test_destroying_keeps_shape_and_range_and_depends_on_the_key():
    own = np.random.default_rng(1).random((7, *IMAGES.shape), np.float32)
    keys = jax.random.split(KEY, 7)
    found = np.stack([make_outliers(*pair) for pair in zip(keys, own, strict=True)])
    assert found.shape == own.shape
    assert found.dtype == own.dtype
    assert found.min() >= 0
    assert found.max() <= 1 + 1e-5
    # Nearly every image has changed, by more than a little.
    away = np.abs(found - own).mean((2, 3, 4))
    assert (away > 0.02).mean() > 0.9
    assert away.mean() > 0.1
    np.testing.assert_array_equal(found[0], make_outliers(keys[0], own[0]))
    assert (found[0] != make_outliers(keys[1], own[0])).any()


def test_each_image_has_its_own_draw():
    same = np.broadcast_to(IMAGES[:1], IMAGES.shape)
    found = [np.asarray(make_outliers(key, same)) for key in jax.random.split(KEY, 7)]
    assert np.mean([len(np.unique(images.reshape(6, -1), axis=0)) for images in found]) > 3


def many(way, image, number=40):
    keys = jax.random.split(KEY, number)
    return np.asarray(jax.jit(jax.vmap(lambda key: way(key, jnp.asarray(image))))(keys))


@pytest.mark.long
def test_erasing_blackens_a_third_to_a_half():
    shares = (many(_erased, np.ones((28, 28, 1), np.float32)) == 0).mean((1, 2, 3))
    # To the rounding of a side.
    assert shares.min() > 0.28
    assert shares.max() < 0.55
    assert shares.std() > 0.02
    kept = many(_erased, IMAGES[0])
    assert (np.isclose(kept, IMAGES[0]) | (kept == 0)).all()


def test_blurring_keeps_what_is_constant_and_smooths_one_way_more():
    np.testing.assert_allclose(many(_blurred, np.ones((8, 8, 1), np.float32)), 1, rtol=1e-5)
    point = np.zeros((28, 28, 1), np.float32)
    point[14, 14] = 1
    found = many(_blurred, point)[..., 0]
    np.testing.assert_allclose(found.sum((1, 2)), 1, rtol=1e-5)
    widths = {((x.sum(1) > 0).sum(), (x.sum(0) > 0).sum()) for x in found}
    for pair in widths:
        assert any(a in (3, 5, 7, 9) and b in (1, 3, 5) for a, b in (pair, pair[::-1]))
    assert len(widths) > 8


def test_stretching_shows_a_part_in_its_order():
    ramp = np.broadcast_to(np.arange(28, dtype=np.float32)[:, None, None], (28, 28, 1))
    found = many(_stretched, ramp)[:, :, 0, 0]
    assert (np.diff(found) >= -1e-3).all()
    # A rectangle of 10 to 33 % and of sides 3:4 to 4:3 is 0.27 to 0.67 high.
    heights = np.ptp(found, axis=1) + 1
    assert heights.min() >= 7
    assert heights.max() <= 19


@pytest.mark.parametrize("way", [_cut, _rotated])
def test_cutting_and_rotating_only_move_pixels(way):
    image = np.arange(64, dtype=np.float32).reshape(8, 8, 1)
    found = many(way, image)
    assert np.isin(found, image).all()
    assert (found != image).any((1, 2, 3)).all()
    if way is _rotated:
        np.testing.assert_array_equal(
            np.sort(found.reshape(40, -1)), np.tile(np.arange(64), (40, 1))
        )
        # The halves stay apart, and half of the rows are as they were.
        left = found[:, :, :4].reshape(40, -1)
        assert (np.sort(left) == np.sort(image[:, :4].ravel())).all()
        assert ((found == image).all((2, 3)).sum(1) == 4).all()


# -- the vote ------------------------------------------------------------------------------------


def vote(models, quorum=None):
    stacked = jax.tree.map(lambda *x: np.stack(x), *models)
    return np.exp(jax.jit(voting(MODEL, quorum).apply)(stacked, IMAGES))


def known(params):
    powers = np.exp(outputs_of(params, IMAGES))
    return (powers / powers.sum(1, keepdims=True))[:, :-1]


def test_identical_clients_say_what_one_of_them_says():
    for quorum in (None, 1, 2):
        np.testing.assert_allclose(vote([drawn(0)] * 3, quorum), known(drawn(0)), rtol=1e-5)


@pytest.mark.parametrize("quorum", [None, 2])
def test_the_order_of_clients_does_not_matter(quorum):
    models = [drawn(seed) for seed in range(4)]
    other = [models[i] for i in (2, 0, 3, 1)]
    np.testing.assert_allclose(vote(models, quorum), vote(other, quorum), rtol=1e-5)


def test_the_vote_is_the_mean_of_those_that_know_most():
    models = [drawn(seed) for seed in range(4)]
    every = np.stack([known(model) for model in models])
    np.testing.assert_allclose(vote(models), every.mean(0), rtol=1e-5)
    order = np.argsort(-every.sum(-1), axis=0)
    for quorum in (1, 3):
        chosen = np.take_along_axis(every, order[:quorum, :, None], axis=0)
        np.testing.assert_allclose(vote(models, quorum), chosen.mean(0), rtol=1e-5)
    assert len(set(order[0])) > 1


def test_the_open_model_votes_as_the_network_does():
    stacked = fj.tree.stack([drawn(seed) for seed in range(3)])
    pair = (jax.jit(voting(model).apply)(stacked, IMAGES) for model in (MODEL, open_set(MODEL)))
    np.testing.assert_allclose(*pair, rtol=1e-5)


@pytest.mark.long
def test_clients_without_weight_have_no_influence():
    models = [drawn(seed) for seed in range(3)]
    federation = fj.clients.federation((IMAGES, np.arange(6) % 3), [[0, 1], [2, 3], [4, 5]])
    sent = fj.merging.summarize(fedov(MODEL), models, federation, key=KEY)
    stacked, _, info = fj.merging.merge(fedov(MODEL), models[0], sent, [5, 0, 1])
    np.testing.assert_array_equal(info.clients, [0, 2])
    jax.tree.map(lambda x, *own: np.testing.assert_array_equal(x, own), stacked, *models[::2])
    outputs = np.exp(jax.jit(voting(MODEL).apply)(stacked, IMAGES))
    np.testing.assert_allclose(outputs, vote(models[::2]), rtol=1e-6)
    # Nor has one that diverged, if it is dropped.
    models[1] = jax.tree.map(lambda x: x * np.nan, models[1])
    sent = fj.merging.summarize(fedov(MODEL), models, federation, key=KEY)
    with pytest.warns(UserWarning, match="Left out.* client 1"):
        kept = fj.merging.merge(fedov(MODEL), models[0], sent, on_nonfinite="drop")[0]
    jax.tree.map(np.testing.assert_array_equal, kept, stacked)


# -- trained, and distilled ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    """Two clients of five digits each, trained, and the test images."""
    train, test = fj.datasets.load("digits")
    model = open_set(fj.Model(apply, fj.likelihoods.categorical), fj.datasets.normalizer(train))
    rows = [np.flatnonzero(train.targets < 5), np.flatnonzero(train.targets >= 5)]
    federation = fj.clients.federation(train, rows)
    how = {"optimizer": optax.adam(1e-2), "epochs": 25, "batch_size": 64}
    start = drawn(0, inputs=64, outputs=11)
    trained = fj.training.train(model, start, federation, key=KEY, **how)
    return model, trained, test


@pytest.mark.long
def test_clients_know_what_they_do_not_know(digits):
    model, trained, test = digits
    z = fj.metrics.logits(model, trained.params, test.inputs, stacked=True)
    unknown = np.exp(z[..., -1])
    for client, own in enumerate((test.targets < 5, test.targets >= 5)):
        assert unknown[client][own].mean() < unknown[client][~own].mean() - 0.2
    accuracy = fj.metrics.accuracy(
        voting(model), trained.params, fj.Examples(test.inputs, test.targets)
    )
    alone = fj.metrics.accuracy(
        model, trained.params, fj.Examples(test.inputs, test.targets), stacked=True
    )
    assert accuracy > 0.75 > 0.51 > alone.max()


@pytest.mark.long
def test_the_students_divergence_from_the_vote_falls(digits):
    model, trained, test = digits
    voters = voting(model)
    inputs = fj.datasets.normalizer(test)(test.inputs)[:180]
    student, start = MODEL, drawn(1, inputs=64, outputs=10)
    how = {"key": KEY, "optimizer": optax.adam(1e-2), "epochs": 40}
    params, info = distilled(voters, trained.params, student, start, inputs, **how)
    assert info.after < 0.3 * info.before
    powers = np.exp(jax.jit(voters.apply)(trained.params, inputs))
    target, own = powers / powers.sum(1, keepdims=True), np.exp(outputs_of(params, inputs))
    found = (target * np.log(target / own * own.sum(1, keepdims=True))).sum(1).mean()
    np.testing.assert_allclose(info.after, found, rtol=1e-4)


@pytest.mark.long
def test_a_student_with_a_frozen_layer_comes_back_with_it():
    voters, stacked = voting(MODEL), fj.tree.stack([drawn(0), drawn(1)])
    mask = {"a": False, "b": True, "c": True}
    student, start = MODEL._replace(mask=mask), drawn(2, outputs=3)
    how = {"key": KEY, "optimizer": optax.sgd(0.1), "epochs": 9}
    params, info = distilled(voters, stacked, student, start, IMAGES, **how)
    np.testing.assert_array_equal(params["a"], start["a"])
    assert info.after < info.before


# -- what is refused -----------------------------------------------------------------------------


def test_what_fedov_cannot_do_is_refused():
    params, model = drawn(0), open_set(MODEL)
    with pytest.raises(ValueError, match="has an apply_train already"):
        open_set(MODEL._replace(apply_train=lambda w, x, key, weights: (apply(w, x), None)))
    with pytest.raises(ValueError, match="labels are not smoothed"):
        open_set(fj.Model(apply, fj.likelihoods.smoothed(0.1)))
    with pytest.raises(ValueError, match=r"step is 0; expected a positive"):
        open_set(MODEL, step=0)
    with pytest.raises(ValueError, match="steps is 0"):
        open_set(MODEL, steps=0)
    with pytest.raises(TypeError, match="normalize is 255"):
        open_set(MODEL, 255)
    for shape in ((6, 64), (6, 8, 7, 1), (6, 7, 7, 1), (6, 4, 4, 1)):
        with pytest.raises(ValueError, match="even for their halves"):
            one_by_one(KEY, jnp.ones(shape))
    with pytest.raises(TypeError, match="dtype uint8; expected floats"):
        model.apply_train(params, jnp.ones((6, 8, 8, 2), jnp.uint8), KEY, np.ones(6, np.float32))
    with pytest.raises(ValueError, match="one output more than there are classes"):
        model.apply(drawn(0, outputs=2), IMAGES)
    federation = fj.clients.federation((IMAGES, np.arange(6) % 4), [range(6)])
    how = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 2}
    with pytest.raises(ValueError, match="labels of 3 outputs"):
        fj.training.train(model, params, federation, key=KEY, **how)


def test_what_cannot_vote_is_refused():
    stacked = fj.tree.stack([drawn(0), drawn(1)])
    for quorum in (0, 1.5, True):
        with pytest.raises(ValueError, match="quorum is"):
            voting(MODEL, quorum)
    with pytest.raises(ValueError, match="quorum is 3; expected at most the 2 models"):
        voting(MODEL, 3).apply(stacked, IMAGES)
    with pytest.raises(ValueError, match="leading axis"):
        voting(MODEL).apply(stacked | {"c": jnp.ones((3, 4))}, IMAGES)
    for make in (voting, fedov):
        with pytest.raises(ValueError, match="must be a categorical one"):
            make(fj.Model(apply, fj.likelihoods.gaussian))


@pytest.mark.long
def test_what_cannot_be_merged_or_distilled_is_refused():
    federation = fj.clients.federation((IMAGES, np.arange(6) % 3), [[0, 1], [2, 3]])
    sent = fj.merging.summarize(fedov(MODEL), [drawn(0)] * 2, federation, key=KEY)
    with pytest.raises(ValueError, match=r"but params has .*'c': \(5,\)"):
        fj.merging.merge(fedov(MODEL), drawn(0, outputs=5), sent)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda sent: fj.merging.merge(fedov(MODEL), drawn(0), sent)[0])(sent)
    with pytest.raises(ValueError, match="of an open set', but this algorithm merges"):
        fj.merging.merge(fj.algorithms.fedavg(), drawn(0), sent)
    stacked = fj.tree.stack([drawn(0)] * 2)
    with pytest.raises(ValueError, match=r"\(6, 4\); expected that of the vote, \(6, 3\)"):
        distilled(voting(MODEL), stacked, MODEL, drawn(0), IMAGES, key=KEY)
    with pytest.raises(ValueError, match="data set is empty"):
        distilled(voting(MODEL), stacked, MODEL, drawn(0, outputs=3), IMAGES[:0], key=KEY)
