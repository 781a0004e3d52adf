"""Running statistics: whatever the method, a merge has those of the mixture of the clients' data.

What they should be is computed by NumPy in float64 from the clients' own moments.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, leaves, merging, rounds, training, tree
from tests.masked import EVERY, ONCE, REFUSE, method, priced

LAYERS = {"first": (16, 4), "second": (4, 3), "third": (3, 3), "head": (3, 3)}
MOMENTS = ("moments/mean", "moments/second_moment")
SIZES = (6, 4, 2)
SGD = optax.sgd(0.3, 0.9)
HOW = {"epochs": 2, "batch_size": 3}


@pytest.fixture(autouse=True, scope="module")
def _wide():
    """Compute in float64 throughout: what is shared between tests is."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
    for shared in (start, federation, trained):
        shared.cache_clear()


@functools.cache
def start():
    draw = np.random.default_rng(0).normal
    dense = {
        name: {"bias": draw(size=o) / 3, "kernel": draw(size=(i, o)) / i**0.5}
        for name, (i, o) in LAYERS.items()
    }
    norm = {"scale": np.ones(4), "shift": np.zeros(4)}
    moments = {"mean": np.zeros(4), "second_moment": np.ones(4)}
    return dense | {"norm": norm, "moments": moments}


@functools.cache
def federation():
    """Clients whose inputs lie far from one another's."""
    source = np.random.default_rng(1)
    apart = np.repeat([0.0, 1.0, 4.0], SIZES)[:, None, None, None]
    data = apart + source.uniform(size=(sum(SIZES), 4, 4, 1)), source.integers(0, 2, sum(SIZES))
    return fj.clients.federation(data, np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))


def run(params, x, weights=None):
    """Give outputs and new moments; without weights by the running ones."""
    x = x.reshape(len(x), -1) @ params["first"]["kernel"] + params["first"]["bias"]
    mean, second = params["moments"]["mean"], params["moments"]["second_moment"]
    new = None
    if weights is not None:
        shares = weights / weights.sum()
        new = {"mean": shares @ x, "second_moment": shares @ x**2}
        mean, second = new["mean"], new["second_moment"]
        new = jax.tree.map(lambda old, own: (old + own) / 2, params["moments"], new)
    x = (x - mean) / jnp.sqrt(second - mean**2 + 1e-3)
    x = jnp.tanh(x * params["norm"]["scale"] + params["norm"]["shift"])
    for name in ("second", "third"):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["head"]["kernel"] + params["head"]["bias"], new


def apply(params, x):
    return run(params, x)[0]


def apply_train(params, x, key, weights):
    del key
    z, new = run(params, x, weights)
    return z, params | {"moments": new}


MASK = {
    name: dict.fromkeys(["mean", "second_moment"], False)
    if name == "moments"
    else dict.fromkeys(["scale", "shift"] if name == "norm" else ["bias", "kernel"], True)
    for name in (*LAYERS, "norm", "moments")
}
MODEL = fj.Model(apply, fj.likelihoods.categorical, apply_train, MASK)


@functools.cache
def trained(optimizer):
    how = {"key": jax.random.key(0), "optimizer": optimizer, **HOW}
    return training.train(MODEL, start(), federation(), **how)


def mixture(statistics, weights):
    """The moments of a mixture, by NumPy."""
    shares = np.asarray(weights, float) / np.sum(weights)
    own = {name: np.asarray(x, float) for name, x in tree.by_name(statistics).items()}
    return {name: np.tensordot(shares, x, 1) for name, x in own.items() if x.size}


def assert_mixture(params, expected):
    found = tree.by_name(params)
    for name in MOMENTS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, err_msg=name)
    assert (found[MOMENTS[1]] > np.square(found[MOMENTS[0]])).all()


# DENSE has a loss of its own, and noise would be of what is no gradient.
WITHOUT = {*REFUSE, "dense", "private", "server of private", "fedov", "single_set"}


def summarized(name):
    own = method(name, MODEL)
    found = trained(own.optimizer(SGD))
    return own, found, merging.summarize(own, found, federation(), key=jax.random.key(1))


HERE = [name for name in EVERY if name not in WITHOUT]


@pytest.mark.parametrize("name", priced(HERE, fast={"fedavg", "fednova", "server sgd"}))
def test_merged_moments_are_those_of_the_mixture(name):
    own, found, sent = summarized(name)
    assert tuple(sent.statistics) == MOMENTS
    weights = federation().weights
    whole, _, _ = merging.merge(own, start(), sent, weights, key=jax.random.key(2))
    assert_mixture(whole, mixture(found.statistics, weights))
    assert np.ptp(np.asarray(found.statistics["moments"]["mean"])) > 0.1


@pytest.mark.parametrize("name", ["otfusion", "pfnm", "dense", "private"])
def test_methods_that_cannot_merge_moments_name_them(name):
    words = "BatchNorm" if name == "dense" else "'moments/mean', 'moments/second_moment'"
    with pytest.raises(ValueError, match=words):
        summarized(name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedfisher_diag", "regmean"])
def test_streams_and_secure_sums_average_moments(name):
    own, found, sent = summarized(name)
    weights = federation().weights
    expected = mixture(found.statistics, weights)
    one = [(jax.tree.map(lambda x, i=i: x[i : i + 1], sent), weights[i : i + 1]) for i in range(3)]
    assert_mixture(merging.merge_stream(own, start(), one)[0], expected)
    how = {"bound": 1000.0, "threshold": 2, "bits": 64, "entropy": np.random.default_rng(0).bytes}
    secure, _, _ = fj.secure_aggregation.secure_merge(own, start(), sent, weights, **how)
    found = tree.by_name(secure)
    for name in MOMENTS:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_moments_are_those_of_all_data_together():
    """Of the raw inputs, by minibatches that are all a client has, without momentum."""

    def normalised(params, x):
        return (x - params["mean"]) @ params["w"]

    def train(params, x, key, weights):
        shares = weights / weights.sum()
        new = {"w": None, "mean": shares @ x, "second": shares @ x**2}
        return normalised(params | {"mean": new["mean"]}, x), new

    mask = {"w": True, "mean": False, "second": False}
    model = fj.Model(normalised, fj.likelihoods.categorical, train, mask)
    data = federation().inputs.reshape(sum(SIZES), -1), federation().targets
    clients = fj.clients.federation(data, np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1]))
    begin = {"w": np.zeros((16, 2)), "mean": np.zeros(16), "second": np.ones(16)}
    how = {"key": jax.random.key(0), "optimizer": SGD, "epochs": 1, "batch_size": max(SIZES)}
    method = algorithms.fisher_merge(model)
    own = training.train(model, begin, clients, **how)
    sent = merging.summarize(method, own, clients, key=jax.random.key(1))
    whole, _, _ = merging.merge(method, begin, sent, clients.weights)
    every = np.asarray(data[0], float)
    np.testing.assert_allclose(whole["mean"], every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(whole["second"] - whole["mean"] ** 2, every.var(0), rtol=1e-9)


def played(name, cohort=3, model=MODEL):
    own = method(name, model) if isinstance(name, str) else name
    experiment = rounds.federated(model, own, cohort=cohort, optimizer=SGD, **HOW)
    begin = experiment.init(start(), federation())
    key = jax.random.key(3)
    *_, (state, last) = rounds.run(experiment, begin, federation(), key=key, rounds=2)
    return experiment, state, last


@pytest.mark.parametrize(
    "name", [n for n in EVERY if n not in {*WITHOUT, *ONCE, "weighted_fedavg"}]
)
def test_after_two_rounds_moments_are_those_of_the_mixture(name):
    _, state, last = played(name)
    assert_mixture(state.params, mixture(last.trained.statistics, SIZES))
    assert np.all(state.params["moments"]["mean"] != last.start["moments"]["mean"])


@pytest.mark.long
@pytest.mark.parametrize("make", [algorithms.analytic_head, algorithms.natural_gradient])
def test_exchanges_leave_statistics_as_they_are(make):
    """Nobody trains in one, and the running statistics are those of the model that is given."""
    found, _, _ = merging.exchange(make(MODEL), start(), federation(), key=jax.random.key(4))
    for leaf, expected in start()["moments"].items():
        assert np.asarray(found["moments"][leaf]).tobytes() == expected.tobytes()
    assert np.any(found["head"]["kernel"] != start()["head"]["kernel"])


@pytest.mark.long
def test_a_cohort_is_a_mixture_of_its_own():
    _, state, last = played("fednova", cohort=2)
    assert last.cohort.shape == (2,)
    assert_mixture(state.params, mixture(last.trained.statistics, np.array(SIZES)[last.cohort]))


KEPT = frozenset({*MOMENTS, "norm/scale", "norm/shift"})
LOCAL = {
    "fedbn": lambda: algorithms.fedbn(where=KEPT),
    "keep_private": lambda: algorithms.keep_private(
        algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal), KEPT
    ),
    "weighted_fedbn": lambda: algorithms.make("weighted_fedbn", MODEL, where=KEPT),
    "single_set": algorithms.single_set,
}


@pytest.mark.long
@pytest.mark.parametrize("name", LOCAL)
def test_clients_that_keep_their_statistics_send_none(name):
    experiment, state, last = played(LOCAL[name](), cohort=2)
    own = experiment.models(state, 3)["moments"]
    for leaf in ("mean", "second_moment"):
        np.testing.assert_array_equal(
            own[leaf][last.cohort], last.trained.statistics["moments"][leaf]
        )
        # The global model's stay what they were.
        np.testing.assert_array_equal(state.params["moments"][leaf], start()["moments"][leaf])
    assert np.ptp(np.asarray(own["mean"]), axis=0).min() > 0
    shared = sum(x.nbytes for n, x in tree.by_name(start()).items() if n not in KEPT)
    down = 0 if name == "single_set" else shared
    assert experiment.traffic(start(), federation()).down == down


@pytest.mark.long
def test_weighted_fedavg_mixes_statistics_by_its_shares():
    experiment, state, last = played("weighted_fedavg")
    shares = np.asarray(last.info)
    for leaf, own in experiment.models(state, 3)["moments"].items():
        expected = shares @ np.asarray(last.trained.statistics["moments"][leaf])
        np.testing.assert_allclose(own, expected, rtol=1e-12)
    assert_mixture(state.params, mixture(last.trained.statistics, SIZES))


def jitted(params, x, key, weights):
    return jax.jit(apply_train)(params, x, key, weights)


def checkpointed(params, x, key, weights):
    return jax.checkpoint(apply_train)(params, x, key, weights)


def in_part(params, x, key, weights):
    z, new = apply_train(params, x, key, weights)
    return z, jax.tree.map(lambda _: None, params) | {"moments": new["moments"]}


def as_they_came(params, x, key, weights):
    z, new = jax.jit(jax.checkpoint(apply_train))(params, x, key, weights)
    still = jax.tree.map(jax.lax.stop_gradient, params) | {
        "head": jax.tree.map(jnp.copy, params["head"])
    }
    return z, still | {"moments": new["moments"]}


FORMS = {f.__name__: f for f in (apply_train, jitted, checkpointed, in_part, as_they_came)}


@pytest.mark.parametrize("form", FORMS)
def test_statistics_are_what_training_returns_anew(form):
    """Among leaves that nobody trains, however the function that returns them is written."""
    mask = MASK | {"head": {"bias": False, "kernel": False}}
    model = MODEL._replace(apply_train=FORMS[form], mask=mask)
    found = leaves.split(model, start(), federation().inputs)
    assert tree.names(found.statistics) == MOMENTS
    assert tree.names(found.frozen) == ("head/bias", "head/kernel")
    how = {"key": jax.random.key(0), "optimizer": SGD, **HOW}
    both = [
        training.train(model._replace(apply_train=f), start(), federation(), **how)
        for f in (apply_train, FORMS[form])
    ]
    assert tree.names(both[1].frozen) == ("head/bias", "head/kernel")
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), both[0].models, both[1].models
    )


def test_moments_that_are_not_finite_leave_a_client_out_by_name():
    own, found, sent = summarized("fedavg")
    mean = sent.statistics[MOMENTS[0]]
    spoilt = {**sent.statistics, MOMENTS[0]: mean.at[1, 2].set(jnp.nan)}
    sent = algorithms.Update(sent.values, sent.kind, spoilt, sent.frozen)
    with pytest.raises(
        ValueError, match=r"clients \[1\] are not finite .*'statistics/moments/mean'"
    ):
        merging.merge(own, start(), sent, SIZES)
    with pytest.warns(UserWarning, match="client 1 for leaf"):
        whole, _, _ = merging.merge(own, start(), sent, SIZES, on_nonfinite="drop")
    counted = (SIZES[0], 0, SIZES[2])
    assert_mixture(whole, mixture(found.statistics, counted))
    kernel = np.tensordot(np.divide(counted, sum(counted)), found.params["head"]["kernel"], 1)
    np.testing.assert_allclose(whole["head"]["kernel"], kernel, rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedfisher_diag", "compressed"])
def test_models_trained_elsewhere_have_statistics_too(name):
    own, found, sent = summarized(name)
    several = [jax.tree.map(lambda x, i=i: x[i], found.models) for i in range(3)]
    given = [training.Trained(found.models, start())]
    # What is sent as a difference needs the start.
    given += [several] if name == "fedfisher_diag" else []
    for elsewhere in given:
        again = merging.summarize(own, elsewhere, federation(), key=jax.random.key(1))
        assert (tuple(again.statistics), again.frozen) == (MOMENTS, ())
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), again, sent
        )


def test_none_among_params_is_no_leaf_for_statistics_either():
    """As equinox's partition leaves it in place of what is no array."""
    begin = {
        "w": np.zeros((16, 2)),
        "activation": None,
        "layer": {"mean": np.zeros(16), "size": None},
    }

    def train(params, x, key, weights):
        x = x.reshape(len(x), -1)
        layer = {"mean": weights / weights.sum() @ x, "size": None}
        return (x - layer["mean"]) @ params["w"], params | {"w": None, "layer": layer}

    mask = {"w": True, "activation": None, "layer": {"mean": False, "size": None}}
    model = fj.Model(
        lambda p, x: (x.reshape(len(x), -1) - p["layer"]["mean"]) @ p["w"],
        fj.likelihoods.categorical,
        train,
        mask,
    )
    found = leaves.split(model, begin, federation().inputs)
    assert tree.names(found.statistics) == ("layer/mean",)
    how = {"key": jax.random.key(0), "optimizer": SGD, "epochs": 1, "batch_size": max(SIZES)}
    trained = training.train(model, begin, federation(), **how)
    rows = np.split(np.asarray(federation().inputs).reshape(sum(SIZES), -1), np.cumsum(SIZES)[:-1])
    means = trained.models["layer"]["mean"]
    np.testing.assert_allclose(means, [own.mean(0) for own in rows], rtol=1e-12)


# As flax, PyTorch, TensorFlow, haiku and nnx call them.
PAIRS = [
    ("batch_stats/norm/mean", "batch_stats/norm/var"),
    ("norm/running_mean", "norm/running_var"),
    ("norm/moving_mean", "norm/moving_variance"),
    ("norm/~/mean_ema/average", "norm/~/var_ema/average"),
    ("norm/mean/value", "norm/var/value"),
    ("var_net/mean", "var_net/var"),
]


def with_bare(mean, variance):
    """A network whose statistics have names of one's own, by those names."""
    return {"head": np.zeros((4, 2)), mean: np.zeros(4), variance: np.ones(4)}


def bare(mean, variance):
    def apply(params, x):
        x = x.reshape(len(x), -1)[:, :4]
        return (x - params[mean]) / jnp.sqrt(params[variance] + 1e-3) @ params["head"]

    def apply_train(params, x, key, weights):
        rows, shares = x.reshape(len(x), -1)[:, :4], weights / weights.sum()
        new = {mean: shares @ rows, variance: shares @ (rows - shares @ rows) ** 2}
        return apply(params | new, x), params | new

    mask = {"head": True, mean: False, variance: False}
    return fj.Model(apply, fj.likelihoods.categorical, apply_train, mask)


@pytest.mark.parametrize("names", PAIRS)
def test_a_mean_of_variances_is_refused_by_name(names):
    leaves.check_moments([names[0], names[1].replace("var", "second")])
    with pytest.raises(ValueError, match=f"'{names[1]}' stands beside '{names[0]}'"):
        leaves.check_moments(names)


@pytest.mark.long
def test_variances_are_refused_where_they_would_be_averaged():
    names = PAIRS[1]
    model, begin, method = bare(*names), with_bare(*names), algorithms.fedavg()
    how = {"key": jax.random.key(0), "optimizer": SGD, **HOW}
    own = training.train(model, begin, federation(), **how)
    sent = merging.summarize(method, own, federation(), key=jax.random.key(1))
    one = [jax.tree.map(lambda x, i=i: x[i : i + 1], sent) for i in range(2)]
    how = {"bound": 1000.0, "threshold": 2, "entropy": np.random.default_rng(0).bytes}
    experiment = rounds.federated(model, method, cohort=2, optimizer=SGD, **HOW)
    state, key = experiment.init(begin, federation()), jax.random.key(0)
    for merge in (
        lambda: merging.merge(method, begin, sent),
        lambda: merging.merge(method, begin, [jax.tree.map(lambda x: x[0], x) for x in one]),
        lambda: merging.merge_stream(method, begin, [(x, None) for x in one]),
        lambda: fj.secure_aggregation.secure_merge(method, begin, sent, **how),
        lambda: list(rounds.run(experiment, state, federation(), key=key, rounds=1)),
    ):
        with pytest.raises(ValueError, match="'norm/running_var' stands beside"):
            merge()
    # Of one client nothing is averaged.
    whole, _, _ = merging.merge(method, begin, one[0])
    np.testing.assert_array_equal(whole[names[1]], own.statistics[names[1]][0])
    alone = experiment._replace(cohort=1)
    *_, (state, last) = rounds.run(alone, state, federation(), key=key, rounds=1)
    np.testing.assert_array_equal(state.params[names[1]], last.trained.statistics[names[1]][0])
    # Clients that keep theirs average none either.
    kept = algorithms.keep_private(method, frozenset(names))
    state, _ = played_bare(model, kept, begin)
    assert set(state.statistics) == set(names)


def played_bare(model, method, begin):
    experiment = rounds.federated(model, method, cohort=2, optimizer=SGD, **HOW)
    state = experiment.init(begin, federation())
    *_, last = rounds.run(experiment, state, federation(), key=jax.random.key(0), rounds=1)
    return last


def test_updates_by_hand_say_what_are_statistics():
    """FedNova's changes of moments would be scaled: two clients agree, of 1 and of 10 steps."""
    begin = {"w": jnp.zeros(1), "mean": jnp.zeros(1), "second_moment": jnp.ones(1)}
    moments = {"mean": jnp.full(1, 3.0), "second_moment": jnp.full(1, 10.0)}
    changed = {"w": jnp.ones(1), "mean": None, "second_moment": None}
    method = algorithms.fednova()
    updates = [
        algorithms.Update(
            {"change": changed | {"w": jnp.ones(1) / a}, "length": changed | {"w": jnp.asarray(a)}},
            method.kind,
            statistics=moments,
        )
        for a in (1.0, 10.0)
    ]
    found, _, _ = merging.merge(method, begin, updates)
    assert (found["mean"], found["second_moment"]) == (3.0, 10.0)
    served = algorithms.with_server_optimizer(algorithms.fedavg(), optax.sgd(3.0))
    own = {"params": changed}
    update = algorithms.Update(own, served.kind, statistics=moments)
    found, _, _ = merging.merge(served, begin, [update, update])
    assert (found["w"], found["mean"], found["second_moment"]) == (3.0, 3.0, 10.0)
