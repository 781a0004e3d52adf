"""DENSE: a student learns what a teacher says of images that the server draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.tree_util import Partial

import fisherjax as fj
from fisherjax.algorithms import FEDLPA_DISTILLATION, Distillation, dense, fedavg, in_stages
from fisherjax.merging import merge, summarize

SHAPE, FEW = (8, 8, 1), Distillation(images=32, batch_size=16, steps=3, width=16)
MODULE = fj.networks.MLP(features=(16,))
MODEL = fj.Model(fj.networks.apply_fn(MODULE), fj.likelihoods.categorical)
KEY = jax.random.key(1)


# Epochs are as many everywhere, but for what more of them find: another number is another program.
def method(epochs=3, model=MODEL, **options):
    return dense(model, shape=SHAPE, epochs=epochs, **{"how": FEW} | options)


@pytest.fixture(scope="module")
def world():
    """Two clients of five digits each, trained from one start: what they sent, weights, start."""
    train, _ = fj.datasets.load("digits")
    inputs = train.inputs.astype("float32") / 16
    rows = [np.flatnonzero(train.targets < 5), np.flatnonzero(train.targets >= 5)]
    federation = fj.clients.federation((inputs, train.targets), rows)
    start = fj.networks.init(MODULE, jax.random.key(0), inputs)
    how = {"optimizer": optax.sgd(0.1, 0.9), "epochs": 3, "batch_size": 64}
    trained = fj.training.train(MODEL, start, federation, key=KEY, **how)
    return summarize(method(), trained, federation, key=KEY), federation.weights, start


def run(algorithm, world, **changes):
    sent, weights, start = world
    return merge(algorithm, start, sent, changes.pop("weights", weights), key=KEY, **changes)


def same(one, other, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), one, other)


def leaves_equal(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


@pytest.mark.long
def test_equal_clients_get_their_model_back(world):
    sent, weights, start = world
    equal = jax.tree.map(lambda x: jnp.stack([x[0], x[0]]), sent)
    merged, _, info = merge(method(), start, equal, weights, key=KEY)
    same(merged, jax.tree.map(lambda x: x[0], sent.values["params"]), atol=1e-5)
    np.testing.assert_allclose(info.distillation, 0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [Distillation(), FEDLPA_DISTILLATION])
def test_the_student_learns_and_the_generator_finds_what_the_teacher_knows(world, settings):
    settings = settings._replace(images=32, batch_size=16, width=16)
    *_, info = run(method(8, how=settings), world)
    assert info.distillation[-1] < 0.7 * info.distillation[0]
    *_, idle = run(method(how=settings._replace(steps=FEW.steps)), world)
    assert info.synthesis[0] < idle.synthesis[0] - 0.05
    *_, longer = run(method(8, how=settings._replace(passes=3)), world)
    assert (longer.distillation < info.distillation).all()
    assert info.images.dtype == jnp.uint8
    assert len(np.unique(np.asarray(info.images).reshape(len(info.images), -1), axis=0)) > 250


@pytest.mark.long
def test_without_steps_that_count_the_student_is_what_it_began_from(world):
    still = FEW._replace(learning_rate=1e-20)
    sent, _, start = world
    kfac = fj.algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal)
    same(run(method(how=still), world)[0], run(fedavg(), world)[0], rtol=1e-5)
    same(run(method(how=still._replace(fresh=True)), world)[0], start, rtol=1e-5)
    ones = jax.tree.map(jnp.ones_like, sent.values["params"])
    curved = fj.algorithms.Update(sent.values | {"fisher": fj.fisher.Diagonal(ones)}, kfac.kind)
    own = curved, *world[1:]
    for fresh in (False, True):  # a start that is named is where it begins
        algorithm = method(how=still._replace(fresh=fresh), start=kfac)
        same(run(algorithm, own)[0], run(kfac, own)[0], rtol=1e-5)


@pytest.mark.long
def test_who_has_no_weight_has_no_influence(world):
    sent, _, start = world
    for weighted in (True, False):
        algorithm = method(how=FEW._replace(weighted=weighted))
        huge = jax.tree.map(lambda x: x.at[1].multiply(1e20), sent)
        one, _, _ = merge(algorithm, start, huge, [1.0, 0.0], key=KEY)
        alone = jax.tree.map(lambda x: x[:1], sent)
        same(one, merge(algorithm, start, alone, key=KEY)[0], atol=1e-5)


def test_the_teacher_is_weighted_or_plain(world):
    plain = method(how=FEW._replace(weighted=False, fresh=True))
    shifted = run(plain, world, weights=[3.0, 1.0])[0]
    same(shifted, run(plain, world)[0], atol=1e-6)
    weighted = method(how=FEW._replace(fresh=True))
    assert not leaves_equal(run(weighted, world, weights=[3.0, 1.0])[0], shifted)
    same(run(weighted, world, weights=[1.0, 1.0])[0], shifted, atol=1e-5)


def test_killed_and_resumed_it_ends_equal_in_every_bit(world):
    algorithm, kept = method(), {}

    def stop(done, work):
        kept["last"] = done, jax.tree.map(jnp.copy, work)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(in_stages(algorithm, stop), world)
    went_on = []
    resumed = in_stages(algorithm, lambda done, _: went_on.append(done), lambda _: kept["last"])
    whole = run(in_stages(algorithm, lambda *_: None), world)
    assert leaves_equal(run(resumed, world), whole)
    assert went_on == [3]
    # One loop of all stages is the same to rounding.
    same(run(algorithm, world)[0], whole[0], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("crop", [False, True])
def test_what_the_teacher_says_is_kept_for_each_image_and_its_mirror(world, crop):
    sent, _, _ = world
    works, how = [], FEW._replace(weighted=False)
    algorithm = method(epochs=2, how=how, crop=crop, normalize=halved)
    run(in_stages(algorithm, lambda _, work: works.append(work)), world)
    first, last = works
    if crop:  # a crop is another image in every pass
        assert last.told.shape == (64, 0, 10)
        return
    images, apply = last.images / 255, jax.vmap(MODEL.apply, (0, None))
    for way, x in enumerate([images, images[:, :, ::-1]]):
        said = apply(sent.values["params"], halved(x)).mean(0)
        np.testing.assert_allclose(last.told[:, way], said, atol=1e-4)
    np.testing.assert_array_equal(first.told[32:], 0)


def halved(images):
    return images / 2


@pytest.mark.slow
def test_seeds_run_side_by_side(world):
    sent, weights, start = world
    algorithm, cohort = method(), jnp.arange(2)

    def one(key):
        return algorithm.aggregate(key, (sent.values, weights), start, (), cohort)[0]

    keys = jax.random.split(KEY, 2)
    together = jax.jit(jax.vmap(one))(keys)
    for place, key in enumerate(keys):
        same(jax.tree.map(lambda x, at=place: x[at], together), one(key), atol=1e-4)
    assert not leaves_equal(*(jax.tree.map(lambda x, at=i: x[at], together) for i in range(2)))


def nearness(params, scale, goal):
    distances = jax.tree.map(lambda x, y: jnp.abs(x - y).sum(), params, goal)
    return -scale * sum(jax.tree.leaves(distances))


@pytest.mark.long
def test_a_score_chooses_the_first_of_the_best(world):
    students = []
    run(in_stages(method(), lambda _, work: students.append(work.student)), world)

    def chosen(scale):  # by how near a student is to that of the second epoch
        score = Partial(nearness, scale=jnp.array(scale), goal=students[1])
        return run(method(score=score), world)

    merged, _, info = chosen(1.0)
    assert leaves_equal(merged, students[1])
    assert info.score == 0
    assert leaves_equal(chosen(0.0)[0], students[0])
    # Where nothing is a number, what it began from.
    assert leaves_equal(chosen(jnp.nan)[0], run(fedavg(), world)[0])


@pytest.mark.long
def test_leaves_that_are_not_trained_stay(world):
    sent, weights, start = world
    masked = MODEL._replace(mask={"dense1": {"kernel": True}, "dense2": {"kernel": False}})
    params = sent.values["params"]
    params = {"dense1": params["dense1"], "dense2": {"kernel": None}}
    sent = dataclasses.replace(sent, values={"params": params}, frozen=("dense2/kernel",))
    merged, _, _ = merge(method(model=masked), start, sent, weights, key=KEY)
    assert leaves_equal(merged["dense2"], start["dense2"])
    assert not leaves_equal(merged["dense1"], run(fedavg(), world)[0]["dense1"])


def test_a_student_that_diverges_is_told_of_with_its_epoch_and_rate(world):
    wild = method(how=FEW._replace(learning_rate=1e30))
    with pytest.raises(ValueError, match=r"diverged in epoch 1 of 3: .*learning_rate \(now 1e\+30"):
        run(in_stages(wild, lambda *_: None), world)


def test_another_merge_compiles_nothing(world, compilations):
    algorithm = method()
    run(in_stages(algorithm, lambda *_: None), world)
    with compilations() as count:
        run(in_stages(dense(MODEL, shape=SHAPE, epochs=3, how=FEW), lambda *_: None), world)
    assert count() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": (8, 8)}, r"shape is \(8, 8\); expected that of an image"),
        ({"shape": (10, 8, 1)}, "multiples of four"),
        ({"epochs": 0}, "epochs is 0"),
        ({"how": FEW._replace(batch_size=5)}, "a divisor of the 32 images"),
        ({"how": FEW._replace(steps=0)}, "how.steps is 0"),
        ({"how": FEW._replace(width=7)}, "how.width is 7; expected an even number"),
        ({"how": FEW._replace(learning_rate=0)}, "how.learning_rate is 0"),
        ({"how": FEW._replace(adversarial=-1)}, "how.adversarial is -1"),
        ({"start": fj.algorithms.weighted_fedavg(MODEL)}, "start returns 'model per client'"),
        ({"start": fj.algorithms.fedper("dense0")}, "start returns 'model per client'"),
        ({"start": fj.algorithms.pfnm(MODEL)}, "start returns 'wider model'"),
        ({"start": fj.algorithms.fedov(fj.algorithms.open_set(MODEL))}, "start returns 'votes'"),
        ({"start": method()}, "start returns 'model', in stages"),
        ({"model": MODEL._replace(likelihood=fj.likelihoods.gaussian)}, "categorical"),
    ],
)
def test_bad_options_are_refused(options, said):
    given = {"model": MODEL, "shape": SHAPE, "epochs": 2, "how": FEW} | options
    with pytest.raises(ValueError, match=said):
        dense(given.pop("model"), **given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start": fj.algorithms.natural_gradient(MODEL)}, "sequence of 3"),
        ({"how": None}, "how is a NoneType"),
        ({"crop": 1}, "crop is an int"),
        ({"score": 3}, "score is"),
        ({"normalize": "no"}, "normalize is"),
        ({"start": dense}, "algorithm is a function"),
    ],
)
def test_options_of_another_kind_are_refused(options, said):
    with pytest.raises(TypeError, match=said):
        method(**options)


def test_updates_without_models_and_running_statistics_are_refused(world):
    sent, weights, start = world
    nova = method(start=fj.algorithms.fednova())
    steps = fj.algorithms.Update({"direction": sent.values["params"]}, nova.kind)
    with pytest.raises(ValueError, match="DENSE needs their params"):
        merge(nova, start, steps, weights)
    normed = fj.training.Trained(start, statistics={"mean": jnp.zeros(3)})
    with pytest.raises(ValueError, match="running statistics"):
        method().summarize(KEY, normed, None, ())
    with pytest.raises(ValueError, match="one stage"):
        in_stages(fedavg(), lambda *_: None)
