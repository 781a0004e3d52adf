"""Networks with BatchNorm: they train as flax's own, and merge to the statistics of the mixture."""

from functools import partial

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, metrics, networks, rounds, training
from fisherjax.algorithms import TABLE

SIZES = (11, 5, 1, 0)
HOW = {"epochs": 3, "batch_size": 4}
SGD = optax.sgd(0.1, 0.9)


class Small(flax.linen.Module):
    """A dense layer, its BatchNorm, and a head."""

    @flax.linen.compact
    def __call__(self, inputs, train=False):
        hidden = flax.linen.Dense(6, param_dtype=float)(inputs)
        wide = {"param_dtype": float, "force_float32_reductions": False}
        norm = partial(flax.linen.BatchNorm, momentum=0.8, **wide)
        hidden = norm(use_running_average=not train)(hidden)
        return flax.linen.Dense(3, param_dtype=float)(jnp.tanh(hidden))


@pytest.fixture
def world(x64, key):
    """Four clients, one with one example, one with none; and a start."""
    source = np.random.default_rng(0)
    data = 2 + source.normal(size=(17, 4)), source.integers(0, 3, 17)
    federation = clients.federation(data, np.split(np.arange(17), np.cumsum(SIZES)[:-1]))
    start = networks.init(Small(), key, data[0])
    return federation, start, networks.model(Small(), start, fj.likelihoods.categorical)


@jax.jit
def _alone(params, stats, state, x, y):
    """One step by flax and optax."""

    def loss(params):
        given = {"params": params, "batch_stats": stats}
        z, new = Small().apply(given, x, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(z, y)
        return losses.mean(), new["batch_stats"]

    gradient, stats = jax.grad(loss, has_aux=True)(params)
    updates, state = SGD.update(gradient, state)
    return optax.apply_updates(params, updates), stats, state


@jax.jit
def _order(key, federation, place, epoch):
    own_key = clients.client_key(key, clients.TRAIN, place)
    shuffle_key, _ = jax.random.split(jax.random.fold_in(own_key, epoch))
    return clients.shuffled(shuffle_key, clients.view(federation, place)).indices


@jax.jit
def _judged(params, stats, x):
    return Small().apply({"params": params, "batch_stats": stats}, x)


@pytest.mark.long
def test_a_client_trains_as_by_flax_alone(world, key):
    """Whole and short minibatches, and every running statistic."""
    federation, start, model = world
    trained = training.train(model, start, federation, key=key, optimizer=SGD, **HOW)
    variables = jax.jit(Small().init)(key, federation.inputs[:1])
    begun = jax.jit(SGD.init)(variables["params"])
    apply = jax.jit(model.apply)
    inputs, targets = map(np.asarray, federation[:2])
    for place, size in enumerate(SIZES):
        params, stats = variables["params"], variables["batch_stats"]
        state = begun
        for epoch in range(3):
            order = np.asarray(_order(key, federation, place, epoch))[:size]
            for rows in np.split(order, range(4, size, 4)) if size else []:
                own = inputs[rows], targets[rows]
                params, stats, state = _alone(params, stats, state, *own)
        found = jax.tree.map(lambda leaf, i=place: np.asarray(leaf)[i], trained.params)
        chex.assert_trees_all_close(found["params"], params, rtol=1e-9, atol=1e-12)
        [(mean, second)] = [(x["mean"], x["second_moment"]) for x in found["moments"].values()]
        [expected] = stats.values()
        np.testing.assert_allclose(mean, expected["mean"], rtol=1e-9)
        np.testing.assert_allclose(second - mean**2, expected["var"], rtol=1e-9)
        # And judged by them.
        outputs = _judged(params, stats, inputs)
        np.testing.assert_allclose(apply(found, inputs), outputs, rtol=1e-9)


@pytest.mark.long
def test_clients_side_by_side_keep_statistics_of_their_own(world, key):
    federation, start, model = world
    options = {"key": key, "optimizer": SGD, **HOW}
    alone, beside = (
        training.train(model, start, federation, clients_per_chunk=chunk, **options).params
        for chunk in (1, 4)
    )
    chex.assert_trees_all_close(alone, beside, rtol=1e-9, atol=1e-12)


# The step of FedNova has another length than the mean's, for statistics too; OTFusion has no place
# for scales and shifts.
# One of those that average, that divide, that solve by conjugate gradients and layer by layer.
OFTEN = {"fedavg", "fisher_merge", "fedfisher_kfac", "regmean", "scaffold"}
MERGES = [name for name in TABLE if name not in ("fednova", "otfusion")]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in MERGES]
)
def test_every_merge_has_the_mean_and_the_variance_of_the_mixture(world, key, name, recwarn):
    federation, start, model = world
    method = algorithms.make(name, model)
    optimizer = method.optimizer(SGD)
    trained = training.train(model, start, federation, key=key, optimizer=optimizer, **HOW)
    updates = fj.merging.summarize(method, trained, federation, key=key)
    merged = fj.merging.merge(method, start, updates, federation.weights)[0]
    # Nothing is said of leaves that nobody trains.
    assert not [w for w in recwarn if "moments" in str(w.message)]
    given = networks.functions._variables
    [of_clients], [found] = (given(p)["batch_stats"].values() for p in (trained.params, merged))
    # RegMean counts every client once where it has no Gram matrix.
    counted = np.sign(SIZES) if name == "regmean" else np.array(SIZES)
    weights = counted / counted.sum()
    mean = weights @ of_clients["mean"]
    variance = weights @ (of_clients["var"] + (of_clients["mean"] - mean) ** 2)
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(found["var"], variance, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("fisher", [fj.fisher.diagonal, fj.fisher.full, fj.fisher.kfac])
def test_statistics_have_no_curvature_and_the_rest_has_its_own(world, fisher):
    """Curvature is that of the network whose statistics are constants."""
    federation, start, model = world
    examples = fj.Examples(federation.inputs)
    found = fisher(model, start, examples)

    def frozen(params, x):
        return model.apply({"params": params, "moments": start["moments"]}, x)

    expected = fisher(fj.Model(frozen, model.likelihood), start["params"], examples)
    draw = np.random.default_rng(0).normal
    vector = jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape)), start)
    multiply = jax.jit(type(found).mv)
    product = multiply(found, vector)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(product["moments"]))
    chex.assert_trees_all_close(
        product["params"], multiply(expected, vector["params"]), rtol=1e-9, atol=1e-12
    )
    whole = fj.fisher.vector_product(model, start, examples, vector)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(whole["moments"]))


@pytest.mark.long
def test_rounds_go_on_from_the_averaged_statistics(world, key):
    federation, start, model = world
    experiment = rounds.federated(model, algorithms.fedavg(), cohort=4, optimizer=SGD, **HOW)
    state = experiment.init(start, 4)
    played = list(rounds.run(experiment, state, federation, key=key, rounds=2))
    (first, done), (second, _) = played
    mean = jax.tree.map(lambda x: np.tensordot(federation.weights, x, 1), done.trained.params)
    chex.assert_trees_all_close(first.params, mean, rtol=1e-6)
    pairs = zip(*map(jax.tree.leaves, (first.params, second.params)), strict=True)
    assert all(np.any(np.asarray(a) != np.asarray(b)) for a, b in pairs)


@pytest.mark.slow
def test_networks_of_the_papers_learn_with_it(key):
    """At evaluation an image's outputs do not depend on the others of its minibatch."""
    train, _ = fj.datasets.load("digits")
    images = np.kron(train.inputs[:200], np.ones((1, 2, 2, 1), np.uint8))
    network = networks.NormedCNN()
    normalize = fj.datasets.normalizer(train)
    params = networks.init(network, key, images)
    model = networks.model(network, params, fj.likelihoods.categorical, normalize=normalize)
    federation = clients.federation((images, train.targets[:200]), [np.arange(200)])
    options = {"optimizer": optax.sgd(0.05, 0.9), "epochs": 5, "batch_size": 32}
    trained = training.train(model, params, federation, key=key, **options)
    own = jax.tree.map(lambda x: x[0], trained.params)
    assert metrics.performance(model, own, federation).accuracy[0] > 0.9
    both = model.apply(own, images[:2])
    np.testing.assert_allclose(model.apply(own, images[:1]), both[:1], rtol=1e-4, atol=1e-5)


class Deaf(flax.linen.Module):
    """Always by the running statistics."""

    @flax.linen.compact
    def __call__(self, inputs):
        return flax.linen.BatchNorm(use_running_average=True)(inputs)


def test_a_network_that_cannot_be_told_that_it_trains_is_refused(key):
    params = networks.init(Deaf(), key, np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"Deaf keeps running statistics.*train=False"):
        networks.model(Deaf(), params, fj.likelihoods.categorical)


def test_equal_models_are_one_object_to_the_compiler(world):
    _, start, model = world
    again = networks.model(Small(), start, fj.likelihoods.categorical)
    assert hash(again) == hash(model)
    assert again == model
