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
from tests.methods import SOME_SLOW

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
        found = jax.tree.map(lambda leaf, i=place: np.asarray(leaf)[i], trained.models)
        chex.assert_trees_all_close(found["params"], params, rtol=1e-9, atol=1e-12)
        chex.assert_trees_all_close(networks.to_flax(found)["batch_stats"], stats, rtol=1e-9)
        # And judged by them.
        outputs = _judged(params, stats, inputs)
        np.testing.assert_allclose(apply(found, inputs), outputs, rtol=1e-9)


@pytest.mark.long
def test_clients_side_by_side_keep_statistics_of_their_own(world, key):
    federation, start, model = world
    options = {"key": key, "optimizer": SGD, **HOW}
    alone, beside = (
        training.train(model, start, federation, clients_per_chunk=chunk, **options).models
        for chunk in (1, 4)
    )
    chex.assert_trees_all_close(alone, beside, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", SOME_SLOW)
def test_merged_statistics_are_those_of_the_mixture(world, key, name, recwarn):
    """The law that the registry calls statistics."""
    federation, start, model = world
    method = algorithms.make(name, model)
    optimizer = method.optimizer(SGD)
    trained = training.train(model, start, federation, key=key, optimizer=optimizer, **HOW)
    holds = "statistics" in algorithms.METHODS[name].laws
    try:
        updates = fj.merging.summarize(method, trained, federation, key=key)
    except ValueError:  # it has no place for scales and shifts
        assert not holds
        return
    merged = fj.merging.merge(method, start, updates, federation.weights)[0]
    # Nothing is said of leaves that nobody trains.
    assert not [w for w in recwarn if "moments" in str(w.message)]
    given = networks.to_flax
    [of_clients], [found] = (given(p)["batch_stats"].values() for p in (trained.models, merged))
    weights = np.array(SIZES) / np.sum(SIZES)
    mean = weights @ of_clients["mean"]
    variance = weights @ (of_clients["var"] + (of_clients["mean"] - mean) ** 2)
    assert holds  # whatever the method: the server's half averages them
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
    product = multiply(found, fj.leaves.trained(model, vector))
    assert not jax.tree.leaves(product["moments"])
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
    mean = jax.tree.map(lambda x: np.tensordot(federation.weights, x, 1), done.trained.models)
    chex.assert_trees_all_close(first.params, mean, rtol=1e-6)
    before, after = map(fj.tree.by_name, (first.params, second.params))
    stay = {name for name in before if not np.any(np.asarray(before[name]) != after[name])}
    assert stay == {"moments/BatchNorm_0/shift"}


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
    own = jax.tree.map(lambda x: x[0], trained.models)
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


# Mean and standard deviation of a column, and how far clients lie apart in these.
COLUMNS = {
    "plain": (0, 1, 1),
    "a year": (2000, 5, 1),
    "2000 +- 0.5": (2000, 0.5, 1),
    "kelvin": (300, 0.1, 0.5),
    "1e6 +- 1": (1e6, 1, 2),
    "small": (0, 1e-3, 1),
    "-1e4 +- 3": (-1e4, 3, 0.3),
}
MOMENTUM = 0.9


WIDE = partial(flax.linen.BatchNorm, param_dtype=float, force_float32_reductions=False)


class First(flax.linen.Module):
    """BatchNorm of raw columns, and a head."""

    axis: int = -1
    by_name: bool = False
    fast: bool = True  # flax's E[x^2] - E[x]^2

    @flax.linen.compact
    def __call__(self, inputs, train=False):
        how = {"axis": self.axis, "momentum": MOMENTUM, "use_fast_variance": self.fast}
        norm = WIDE(not train, **how)
        hidden = norm(x=inputs) if self.by_name else norm(inputs)
        return flax.linen.Dense(2, param_dtype=float)(jnp.tanh(hidden).reshape(len(inputs), -1))


def _columns(number, client=0.0):
    source = np.random.default_rng(0)
    columns = [
        source.normal(mean + client * apart * std, std, number)
        for mean, std, apart in COLUMNS.values()
    ]
    return np.stack(columns, 1).astype(np.float32)


def _running(batches):
    """Compute flax's running statistics in float64."""
    mean, var = 0.0, 1.0
    for batch in batches.astype(float):
        mean = MOMENTUM * mean + (1 - MOMENTUM) * batch.mean(0)
        var = MOMENTUM * var + (1 - MOMENTUM) * batch.var(0)
    return mean, var


def _scanned(model, params, batches):
    ones = jnp.ones(batches.shape[1])
    step = lambda p, x: (model.apply_train(p, x, None, ones)[1], None)  # noqa: E731
    return jax.jit(lambda p, x: jax.lax.scan(step, p, x)[0])(params, batches)


def _model(start, module=None, **how):
    module = First() if module is None else module
    return networks.model(module, start, fj.likelihoods.categorical, **how)


@pytest.mark.parametrize("seen", ["rows", "one row", "zeros", "shapes"])
def test_running_statistics_of_raw_columns_are_those_in_float64(key, seen):
    """At least as near as flax's own, at every scale, wherever they are counted from."""
    batches = _columns(300 * 32).reshape(300, 32, -1)
    inputs = {
        "rows": batches[0],
        "one row": batches[0][:1],
        "zeros": np.zeros_like(batches[0]),
        "shapes": jax.ShapeDtypeStruct(batches[0].shape, np.float32),
    }[seen]
    start = networks.init(First(), key, inputs)
    found = networks.to_flax(_scanned(_model(start), start, batches))["batch_stats"]
    variables = First().init(key, batches[0])

    def step(stats, x):
        given = {"params": variables["params"], "batch_stats": stats}
        return First().apply(given, x, train=True, mutable=["batch_stats"])[1]["batch_stats"], None

    flax_own = jax.jit(lambda s, x: jax.lax.scan(step, s, x)[0])(variables["batch_stats"], batches)
    mean, var = _running(batches)

    def error(stats):
        stats = stats["BatchNorm_0"]
        return abs(stats["mean"] - mean) / var**0.5, abs(stats["var"] - var) / var

    (off, spread), (flax_off, flax_spread) = error(found), error(flax_own)
    assert (off <= flax_off + 1e-4).all()
    assert (spread <= flax_spread + 1e-4).all()
    # Zeros and shapes say nothing of where columns lie: minibatch means are rounded to the columns'
    # last digit, and their variances are off by its square.
    assert (spread < (1e-3 if "row" in seen else 2e-2)).all()


@pytest.mark.parametrize("wide", [False, True])
def test_a_mean_of_leaves_has_the_variance_of_the_mixture_at_every_scale(request, key, wide):
    """Of raw columns in float32 too, relative to the variance."""
    if wide:
        request.getfixturevalue("x64")
    start = networks.init(First(), key, _columns(32))
    model, weights = _model(start), np.array([0.5, 0.2, 0.3])
    own = [_scanned(model, start, _columns(6400, i).reshape(200, 32, -1)) for i in range(3)]
    stacked = fj.tree.stack(own)
    merged = networks.to_flax(fj.tree.weighted_sum(stacked, jnp.asarray(weights)))["batch_stats"]
    # Each client's mean as it keeps it: a sum with the shift would be rounded.
    kept = {k: np.asarray(x, float) for k, x in stacked["moments"]["BatchNorm_0"].items()}
    mean = weights @ kept["mean"]
    expected = weights @ (kept["within"] + (kept["mean"] - mean) ** 2)
    variance = merged["BatchNorm_0"]["var"]
    np.testing.assert_allclose(variance, expected, rtol=1e-9 if wide else 3e-5)
    np.testing.assert_allclose(
        merged["BatchNorm_0"]["mean"], mean + kept["shift"][0], rtol=1e-9 if wide else 3e-7
    )
    # And that is what lies in the data.
    every = np.stack([_columns(6400, i) for i in range(3)]).astype(float)
    middle = np.einsum("i,ink->k", weights, every) / 6400
    of_data = np.einsum("i,ink->k", weights, (every - middle) ** 2) / 6400
    np.testing.assert_allclose(variance, of_data, rtol=0.1)


def test_clients_that_are_alike_keep_their_variance_even_about_zero(key):
    """Rounding of large squares is no variance between clients."""
    start = networks.init(First(), key, np.zeros((1, len(COLUMNS)), np.float32))
    batches = _columns(100 * 32).reshape(100, 32, -1)
    own = _scanned(_model(start), start, batches)
    before = networks.to_flax(own)["batch_stats"]["BatchNorm_0"]["var"]
    weights = jax.random.dirichlet(key, jnp.ones(7))
    for _ in range(20):
        own = fj.tree.weighted_sum(fj.tree.stack([own] * 7), weights)
    after = networks.to_flax(own)["batch_stats"]["BatchNorm_0"]["var"]
    np.testing.assert_allclose(after, before, rtol=1e-5)


def test_plain_channels_are_counted_from_zero_and_compute_what_flax_does(key):
    """To the bit: nothing of a network on standardised inputs changes."""
    inputs = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    start = networks.init(Small(), key, inputs)
    assert not np.any(start["moments"]["BatchNorm_0"]["shift"])
    chex.assert_trees_all_equal(networks.to_flax(start), Small().init(key, inputs))
    outputs = jax.jit(_model(start, Small()).apply)(start, inputs)
    np.testing.assert_array_equal(outputs, jax.jit(Small().apply)(networks.to_flax(start), inputs))


def test_inputs_that_the_model_normalises_are_seen_normalised(key):
    inputs = _columns(64)
    center, scale = jnp.asarray(inputs.mean(0)), jnp.asarray(inputs.std(0))
    normalize = lambda x: (x - center) / scale  # noqa: E731
    start = networks.init(First(), key, inputs, normalize=normalize)
    assert not np.any(start["moments"]["BatchNorm_0"]["shift"])
    drawn = jax.jit(lambda key: networks.init(First(), key, inputs))(key)
    chex.assert_trees_all_close(drawn, networks.init(First(), key, inputs), rtol=1e-6)
    assert np.any(drawn["moments"]["BatchNorm_0"]["shift"])


@pytest.mark.parametrize(
    "module", [First(fast=False), First(axis=1, fast=False), First(by_name=True, fast=False)]
)
def test_a_network_that_flax_trained_goes_on_as_by_flax(x64, key, module):
    inputs = np.asarray(_columns(64), float)[:, :, None] * np.ones(7)
    inputs = inputs if module.axis == 1 else inputs.swapaxes(1, 2)
    variables = module.init(key, inputs)
    source = np.random.default_rng(1)
    mean = np.array([mean for mean, _, _ in COLUMNS.values()]) + source.normal(size=7)
    stats = {"BatchNorm_0": {"mean": mean, "var": source.uniform(0.1, 9, size=7)}}
    variables = jax.tree.map(jnp.asarray, dict(variables) | {"batch_stats": stats})
    params = networks.from_flax(module, variables, inputs)
    shift = params["moments"]["BatchNorm_0"]["shift"]
    far = abs(mean) > 8 * stats["BatchNorm_0"]["var"] ** 0.5
    np.testing.assert_array_equal(shift, np.where(far, mean, 0))
    chex.assert_trees_all_close(networks.to_flax(params), variables, rtol=1e-12)
    model = _model(params, module)
    expected = module.apply(variables, inputs)
    np.testing.assert_allclose(model.apply(params, inputs), expected, rtol=1e-7)
    outputs, new = model.apply_train(params, inputs, key, jnp.ones(64))
    expected, changed = module.apply(variables, inputs, train=True, mutable=["batch_stats"])
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    found = networks.to_flax(new)["batch_stats"]
    chex.assert_trees_all_close(found, changed["batch_stats"], rtol=1e-6)


def test_statistics_of_the_last_edition_go_on_as_they_were(x64, key):
    """Its moments are of x itself, without a shift and a client's own variance."""
    inputs = np.random.default_rng(0).normal(1, 2, size=(64, 5))
    start = networks.init(Small(), key, inputs)
    keep = ("mean", "second_moment")
    [(name, moments)] = start["moments"].items()
    old = start | {"moments": {name: {part: moments[part] for part in keep}}}
    model = _model(old, Small())
    for _ in range(3):
        outputs, new = model.apply_train(start, inputs, key, jnp.ones(64))
        expected, older = model.apply_train(old, inputs, key, jnp.ones(64))
        np.testing.assert_allclose(outputs, expected, rtol=1e-9)
        start, old = new, older
    assert set(old["moments"][name]) == set(keep)
    chex.assert_trees_all_close(networks.to_flax(old), networks.to_flax(start), rtol=1e-9)
    np.testing.assert_allclose(model.apply(old, inputs), model.apply(start, inputs), rtol=1e-9)


class Counting(flax.linen.Module):
    """A BatchNorm, and a statistic that is none of a normalisation."""

    @flax.linen.compact
    def __call__(self, inputs, train=False):
        count = self.variable("batch_stats", "count", jnp.zeros, ())
        if train:
            count.value += 1
        hidden = WIDE(not train, momentum=0.8)(inputs)
        return flax.linen.Dense(3, param_dtype=float)(hidden)


def test_other_statistics_are_what_the_network_makes_of_them(x64, key):
    inputs = np.random.default_rng(0).normal(size=(8, 5))
    params = networks.init(Counting(), key, inputs)
    model = _model(params, Counting())
    for step in (1, 2):
        _, params = model.apply_train(params, inputs, key, jnp.ones(8))
        assert params["moments"]["count"] == step
    assert networks.to_flax(params)["batch_stats"]["count"] == 2


class Deep(flax.linen.Module):
    """Layers in a scan, each with a BatchNorm of its own."""

    @flax.linen.compact
    def __call__(self, inputs, train=False):
        class Layer(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, hidden, _):
                hidden = flax.linen.Dense(hidden.shape[-1], param_dtype=float)(hidden)
                return jnp.tanh(WIDE(not train, momentum=0.9)(hidden)), None

        axes = {"params": 0, "batch_stats": 0}
        layers = flax.linen.scan(Layer, axes, split_rngs={"params": True}, length=3)
        return flax.linen.Dense(2, param_dtype=float)(layers()(inputs, None)[0])


@pytest.mark.slow
def test_a_loop_over_layers_has_statistics_for_each(x64, key):
    inputs = np.asarray(_columns(64)[:, :4], float)
    start = networks.init(Deep(), key, inputs)
    [moments] = start["moments"].values()
    shift = np.asarray(moments["BatchNorm_0"]["shift"])
    # Raw columns reach the first layer only; the others see what was normalised.
    assert shift.shape == (3, 4)
    assert shift[0].any()
    assert not shift[1:].any()
    model = _model(start, Deep())
    outputs, new = model.apply_train(start, inputs, key, jnp.ones(64))
    variables = networks.to_flax(start)
    expected, stats = Deep().apply(variables, inputs, train=True, mutable=["batch_stats"])
    np.testing.assert_allclose(outputs, expected, rtol=1e-6)
    found = networks.to_flax(new)["batch_stats"]
    chex.assert_trees_all_close(found, stats["batch_stats"], rtol=1e-6)
