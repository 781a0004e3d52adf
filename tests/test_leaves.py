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
from tests.masked import EVERY, OF_THE_HEAD, ONCE, REFUSE, method, priced

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


HERE = [name for name in EVERY if name not in {*REFUSE, "single_set"}]


@pytest.mark.parametrize("where", FROZEN)
@pytest.mark.parametrize("name", priced(HERE, fast={"fedavg", "fednova", "regmean"}))
def test_what_is_trained_is_as_if_the_rest_were_constants(name, where):
    if where == "head" and name in OF_THE_HEAD:
        pytest.skip("refused, see below")
    own, sent, (whole, *report) = merged(name, where, closed=False)
    expected_own, expected_sent, (expected, *expected_report) = merged(name, where, closed=True)
    assert_same(own._replace(start=None, frozen=None), expected_own._replace(start=None))
    assert_same(sent.values, expected_sent.values)
    assert compression.size(sent) == compression.size(expected_sent)
    assert sent.frozen == FROZEN[where]
    assert not sent.statistics
    assert_same(report, expected_report)
    # Of a vote each model.
    several = jax.tree.leaves(expected)[0].ndim > jax.tree.leaves(params(where, True))[0].ndim
    for model in (
        [jax.tree.map(lambda x, i=i: x[i], whole) for i in range(3)] if several else [whole]
    ):
        assert_frozen(model, where)
    assert_same(of_trained(whole, where), expected)


def played(name, where, closed, changed=lambda own: own):
    own = method(name, model(where, closed))
    how = {"cohort": 2, "optimizer": SGD, **HOW}
    experiment = rounds.federated(changed(model(where, closed)), own, **how)
    begin = experiment.init(params(where, closed), federation())
    key = jax.random.key(3)
    *_, (state, last) = rounds.run(experiment, begin, federation(), key=key, rounds=2)
    traffic = experiment.traffic(params(where, closed), federation())
    return state, last, experiment.models(state, len(SIZES)), traffic


@pytest.mark.parametrize("name", priced([name for name in EVERY if name not in ONCE]))
def test_rounds_too_are_as_if_the_rest_were_constants(name):
    state, last, models, traffic = played(name, "inner", closed=False)
    expected, expected_last, expected_models, expected_traffic = played(name, "inner", closed=True)
    assert_frozen(state.params, "inner")
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


@pytest.mark.long
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


HEADS = [FROZEN["head"], ("head/bias",), ("head/kernel",)]


@pytest.mark.parametrize("frozen", HEADS, ids=lambda names: " and ".join(names))
@pytest.mark.parametrize("name", [*EXCHANGES, "weighted_fedavg"])
def test_what_needs_the_layer_of_the_outputs_names_what_is_frozen_of_it(name, frozen):
    mask = {
        layer: {leaf: f"{layer}/{leaf}" not in frozen for leaf in own}
        for layer, own in start().items()
    }
    own, key = fj.Model(network, fj.likelihoods.categorical, mask=mask), jax.random.key(4)
    # The kernel is told first.
    said = ".*".join(sorted(frozen, reverse=True))
    play = functools.partial(merging.summarize, algorithms.weighted_fedavg(own), [start()] * 3)
    if name in EXCHANGES:
        play = functools.partial(merging.exchange, EXCHANGES[name](own), start())
    with pytest.raises(ValueError, match=f"mask leaves out .*{said}.*makes the outputs"):
        play(federation(), key=key)


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


@pytest.mark.long
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


def test_curvature_of_half_a_layer_is_that_of_its_derivatives():
    """By jax.jacrev of the network, whatever the library makes of its mask."""
    x, whole = federation().inputs, start()

    def roots(params, x):
        """One row a class, of root of its share times the derivative of its log-likelihood."""
        z = network(params, x[None])[0]
        return jnp.sqrt(jax.lax.stop_gradient(jax.nn.softmax(z))) * jax.nn.log_softmax(z)

    derivatives = jax.vmap(jax.jacrev(roots), (None, 0))(whole, x)
    columns = {
        n: np.asarray(d).reshape(len(x), 3, -1) for n, d in tree.by_name(derivatives).items()
    }

    def block(own):
        every = np.concatenate([columns[name] for name in own], axis=2)
        return np.einsum("nci,ncj->ij", every, every) / len(x)

    own = [name for name in columns if name not in FROZEN["inner"]]
    full = fisher.full(model("inner", False), whole, examples())
    np.testing.assert_allclose(full.matrix, block(own), rtol=1e-9, atol=1e-12)
    kfac = fisher.kfac(model("inner", False), whole, examples())
    # A bias alone has no input but one: its block is exact.
    parts = kfac.select(("second/bias",)).dense()
    np.testing.assert_allclose(parts, block(["second/bias"]), rtol=1e-9, atol=1e-12)
    # A kernel alone has the inputs without the one.
    hidden = x.reshape(len(x), -1)
    for name in ("first", "second"):
        hidden = jnp.tanh(hidden @ whole[name]["kernel"] + whole[name]["bias"])
    moment = np.asarray(hidden).T @ np.asarray(hidden) / len(x)
    np.testing.assert_allclose(kfac.factors["third/kernel"]["input"], moment, rtol=1e-9)


def test_products_with_the_exact_curvature_are_those_of_the_network_with_constants():
    for where in FROZEN:
        vector, point = jax.tree.map(jnp.cos, params(where, True)), (start(), examples())
        found = fisher.vector_product(model(where, False), *point, vector)
        assert_same(
            found,
            fisher.vector_product(model(where, True), params(where, True), examples(), vector),
        )
        # A vector of all leaves gives zeros for those that nobody trains.
        whole = fisher.vector_product(model(where, False), *point, jax.tree.map(jnp.cos, start()))
        assert_same(of_trained(whole, where), found)
        assert not any(np.any(tree.by_name(whole)[name]) for name in FROZEN[where])


ADD_UP = ["fedavg", "regmean", "fedfisher_diag", "fedfisher_sketched", "fisher_merge"]


@pytest.mark.long
@pytest.mark.parametrize("name", ADD_UP)
def test_streams_and_secure_sums_leave_frozen_leaves_alone(name):
    own, _, sent = summarized(name, "inner", closed=False)
    weights = federation().weights
    whole, _, _ = merging.merge(own, start(), sent, weights)
    chunks = [
        (jax.tree.map(lambda x, i=i: x[i : i + 1], sent), weights[i : i + 1]) for i in range(3)
    ]
    streamed, _, _ = merging.merge_stream(own, start(), chunks)
    how = {"bound": 100.0, "threshold": 2, "bits": 64, "entropy": np.random.default_rng(0).bytes}
    secure, _, _ = fj.secure_aggregation.secure_merge(own, start(), sent, weights, **how)
    for found in (streamed, secure):
        assert_frozen(found, "inner")
        for name, leaf in tree.by_name(whole).items():
            np.testing.assert_allclose(tree.by_name(found)[name], leaf, rtol=1e-3, atol=1e-3)


def with_noise(own):
    return privacy.dp_sgd(own, clip=0.5, noise_multiplier=0.3)


@pytest.mark.long
def test_private_gradients_are_those_of_the_network_with_constants():
    for where in FROZEN:
        both = [summarized("fedavg", where, closed, with_noise) for closed in (False, True)]
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
