"""What a mask leaves out: no method moves it, nobody sends it, and the rest does not notice.

Each law compares a network with a mask to the same network whose frozen leaves are constants in
`apply`, and which has no params but the trained ones: what the library never has to tell apart.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, compression, fisher, merging, privacy, rounds, training, tree
from tests.masked import EVERY, OF_THE_HEAD, ONCE, REFUSE, method

LAYERS = {"first": (16, 4), "second": (4, 3), "third": (3, 3), "head": (3, 3)}
# A whole layer, a kernel and a bias of others; and the layer that makes the outputs.
FROZEN = {
    "inner": ("first/bias", "first/kernel", "second/kernel", "third/bias"),
    "head": ("head/bias", "head/kernel"),
}
SIZES = (5, 4, 3)
SGD = optax.sgd(0.5, 0.9)
HOW = {"epochs": 2, "batch_size": 3}


@pytest.fixture(autouse=True, scope="module")
def _wide():
    """Compute in float64 throughout: what is shared between tests is."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
    for shared in (start, federation, model, trained):
        shared.cache_clear()


@functools.cache
def start():
    source = np.random.default_rng(0)
    return {
        name: {"bias": source.normal(size=o) / 3, "kernel": source.normal(size=(i, o)) / i**0.5}
        for name, (i, o) in LAYERS.items()
    }


@functools.cache
def federation():
    source = np.random.default_rng(1)
    data = source.uniform(size=(sum(SIZES), 4, 4, 1)), source.integers(0, 2, sum(SIZES))
    return fj.clients.federation(data, np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))


def network(params, x):
    x = x.reshape(len(x), -1)
    for name in LAYERS:
        x = x @ params[name]["kernel"] + params[name]["bias"]
        x = x if name == "head" else jnp.tanh(x)
    return x


def chosen(where, change):
    """Change leaves by name, by hand."""
    return {
        layer: {leaf: change(f"{layer}/{leaf}" in FROZEN[where], x) for leaf, x in own.items()}
        for layer, own in start().items()
    }


@functools.cache
def model(where, closed):
    """The network with a mask, or with constants in it."""
    if not closed:
        mask = chosen(where, lambda frozen, _: not frozen)
        return fj.Model(network, fj.likelihoods.categorical, mask=mask)

    def apply(params, x):
        whole = {
            layer: {leaf: start()[layer][leaf] if x is None else x for leaf, x in own.items()}
            for layer, own in params.items()
        }
        return network(whole, x)

    return fj.Model(apply, fj.likelihoods.categorical)


def params(where, closed):
    return chosen(where, lambda frozen, x: None if frozen else x) if closed else start()


@functools.cache
def trained(where, closed, optimizer, changed):
    how = {"key": jax.random.key(0), "optimizer": optimizer, **HOW}
    own = changed(model(where, closed))
    return training.train(own, params(where, closed), federation(), **how)


def summarized(name, where, closed, changed=lambda own: own):
    own = method(name, model(where, closed))
    found = trained(where, closed, own.optimizer(SGD), changed)
    return own, found, merging.summarize(own, found, federation(), key=jax.random.key(1))


def merged(name, where, closed):
    own, found, sent = summarized(name, where, closed)
    given, weights = params(where, closed), federation().weights
    return found, sent, merging.merge(own, given, sent, weights, key=jax.random.key(2))


def assert_same(found, expected):
    """Numbers, and names of leaves: what is frozen has none."""
    found, expected = map(tree.by_name, (found, expected))
    assert list(found) == list(expected)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-9, atol=1e-11, err_msg=name)


def assert_frozen(found, where):
    """Bit for bit as they came."""
    before, after = map(tree.by_name, (start(), found))
    for name in FROZEN[where]:
        assert np.asarray(after[name]).tobytes() == before[name].tobytes(), name


def of_trained(whole, where):
    return {n: x for n, x in tree.by_name(whole).items() if n not in FROZEN[where]}


@pytest.mark.parametrize("where", FROZEN)
@pytest.mark.parametrize("name", [name for name in EVERY if name not in REFUSE])
def test_what_is_trained_is_as_if_the_rest_were_constants(name, where, recwarn):
    if where == "head" and name in OF_THE_HEAD:
        return
    if name == "single_set":
        return
    (trained, sent, (whole, state, info)) = merged(name, where, closed=False)
    expected = merged(name, where, closed=True)
    assert_same(trained.params, expected[0].params)
    assert_same(trained.loss, expected[0].loss)
    assert_same(sent.values, expected[1].values)
    assert compression.size(sent) == compression.size(expected[1])
    assert sent.frozen == FROZEN[where]
    assert not sent.statistics
    assert_same((state, info), expected[2][1:])
    if algorithms.VOTES.keys() & {name}:
        whole = jax.tree.map(lambda x: x[0], whole)
        expected[2] = jax.tree.map(lambda x: x[0], expected[2])
    assert_frozen(whole, where)
    assert_same(of_trained(whole, where), tree.by_name(expected[2][0]))


def played(name, where, closed, changed=lambda own: own):
    own = method(name, model(where, closed))
    how = {"cohort": 2, "optimizer": SGD, **HOW}
    experiment = rounds.federated(changed(model(where, closed)), own, **how)
    begin = experiment.init(params(where, closed), federation())
    key = jax.random.key(3)
    *_, (state, last) = rounds.run(experiment, begin, federation(), key=key, rounds=2)
    traffic = experiment.traffic(params(where, closed), federation())
    return state, last, experiment.models(state, len(SIZES)), traffic




@pytest.mark.parametrize("name", [name for name in EVERY if name not in ONCE])
def test_rounds_too_are_as_if_the_rest_were_constants(name, recwarn):
    state, last, models, traffic = played(name, "inner", closed=False)
    expected, expected_last, expected_models, expected_traffic = played(name, "inner", closed=True)
    assert_frozen(state.params, "inner")
    jax.vmap(lambda one: None)(models)
    for client in range(len(SIZES)):
        assert_frozen(jax.tree.map(lambda x, i=client: x[i], models), "inner")
    assert traffic == expected_traffic
    for found, of_constants in ((state.params, expected.params), (models, expected_models)):
        assert_same(of_trained(found, "inner"), of_constants)
    assert_same(state[2:], expected[2:])
    assert_same((last.loss, last.info), (expected_last.loss, expected_last.info))


EXCHANGES = {
    "analytic_head": algorithms.analytic_head,
    "ccvr": functools.partial(algorithms.ccvr, draws=64),
    "natural_gradient": algorithms.natural_gradient,
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_move_what_is_trained_only(name):
    def exchanged(closed):
        own = EXCHANGES[name](model("inner", closed))
        return merging.exchange(own, params("inner", closed), federation(), key=jax.random.key(4))

    found, expected = exchanged(False), exchanged(True)
    assert_frozen(found[0], "inner")
    assert_same(of_trained(found[0], "inner"), expected[0])
    assert_same(found[2], expected[2])
    assert np.any(np.asarray(found[0]["head"]["kernel"]) != start()["head"]["kernel"])


@pytest.mark.parametrize("where", ["head", "bias", "kernel"])
@pytest.mark.parametrize("name", [*EXCHANGES, *OF_THE_HEAD])
def test_explore_head(name, where):
    names = {"head": FROZEN["head"], "bias": ("head/bias",), "kernel": ("head/kernel",)}[where]
    mask = {l: {leaf: f"{l}/{leaf}" not in names for leaf in own} for l, own in start().items()}
    own = fj.Model(network, fj.likelihoods.categorical, mask=mask)
    if name in EXCHANGES:
        m = EXCHANGES[name](own)
        try:
            found = merging.exchange(m, start(), federation(), key=jax.random.key(4))
            moved = [n for n, x in tree.by_name(found[0]).items() if np.any(x != tree.by_name(start())[n])]
            print("EXCH", name, where, moved)
        except Exception as e:
            print("EXCH", name, where, type(e), e)
    else:
        try:
            m = method(name, own)
            models = [start()] * 3
            s = merging.summarize(m, models, federation(), key=jax.random.key(4))
            print("EXCH", name, where, "fine")
        except Exception as e:
            print("EXCH", name, where, type(e), e)


@pytest.mark.parametrize("where", FROZEN)
@pytest.mark.parametrize("name", sorted(REFUSE))
def test_methods_that_move_units_name_what_cannot_follow(name, where):
    with pytest.raises(ValueError, match=str([*FROZEN[where]]).replace("[", r"\[")):
        summarized(name, where, closed=False)


KINDS = {
    "true": fisher.true,
    "sampled": functools.partial(fisher.sampled, num_samples=2),
    "empirical": fisher.empirical,
    "propagated": fisher.curvature_propagation,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["diagonal", "full", "kfac"])
def test_curvature_is_that_of_the_network_with_constants(form, kind):
    how = {"kind": KINDS[kind], "key": jax.random.key(5), "batch_size": 4}
    for where in FROZEN:
        found, expected = (
            getattr(fisher, form)(model(where, c), params(where, c), examples(), **how)
            for c in (False, True)
        )
        assert_same(found, expected)
        assert jax.tree.structure(found) == jax.tree.structure(expected)


def examples():
    return fj.Examples(federation().inputs, federation().targets)


def test_products_with_the_exact_curvature_are_those_of_the_network_with_constants():
    for where in FROZEN:
        vector = jax.tree.map(jnp.cos, params(where, True))
        found, expected = (
            fisher.vector_product(model(where, c), params(where, c), examples(), vector)
            for c in (False, True)
        )
        assert_same(found, expected)


ADD_UP = ["fedavg", "regmean", "fedfisher_diag", "fedfisher_sketched", "fisher_merge"]


@pytest.mark.parametrize("name", ADD_UP)
def test_streams_and_secure_sums_leave_frozen_leaves_alone(name):
    own, _, sent = summarized(name, "inner", closed=False)
    weights = federation().weights
    whole, _, _ = merging.merge(own, start(), sent, weights)
    chunks = [(jax.tree.map(lambda x, i=i: x[i : i + 1], sent), weights[i : i + 1]) for i in range(3)]
    streamed, _, _ = merging.merge_stream(own, start(), chunks)
    how = {"bound": 100.0, "threshold": 2, "bits": 64, "entropy": np.random.default_rng(0).bytes}
    secure, _, _ = fj.secure_aggregation.secure_merge(own, start(), sent, weights, **how)
    for found in (streamed, secure):
        assert_frozen(found, "inner")
        for name, leaf in tree.by_name(whole).items():
            np.testing.assert_allclose(tree.by_name(found)[name], leaf, rtol=1e-3, atol=1e-3)


def with_noise(own):
    return privacy.dp_sgd(own, clip=0.5, noise_multiplier=0.3)


def test_private_gradients_are_those_of_the_network_with_constants():
    for where in FROZEN:
        both = [
            summarized("fedavg", where, closed, with_noise) for closed in (False, True)
        ]
        assert_same(both[0][2].values, both[1][2].values)
        assert both[0][2].frozen == FROZEN[where]
        whole, _, _ = merging.merge(both[0][0], start(), both[0][2])
        assert_frozen(whole, where)


def test_models_trained_elsewhere_are_told_apart_where_they_come_in():
    own, found, sent = summarized("fedfisher_kfac", "inner", closed=False)
    models = found.models
    several = [jax.tree.map(lambda x, i=i: x[i], models) for i in range(3)]
    for elsewhere in (several, training.Trained(models), training.Trained(models, start())):
        again = merging.summarize(own, elsewhere, federation(), key=jax.random.key(1))
        assert again.frozen == sent.frozen
        assert_same(again.values, sent.values)
    several[1]["third"]["bias"] = several[1]["third"]["bias"] + 1e-12
    with pytest.raises(ValueError, match="'third/bias' is not trained"):
        merging.summarize(own, several, federation(), key=jax.random.key(1))
