"""A Python float among the params is an array of shape () everywhere; what is no float is named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms

X = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(6, 2)).astype(np.float32)
MODEL = fj.Model(lambda p, x: (x @ p["w"]) * p["t"], fj.likelihoods.gaussian)
FEDERATION = fj.clients.federation((X, Y), [range(4), range(4, 6)])
HOW = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 4}
SCALARS = {
    "float": 1.5,
    "NumPy's float": np.float64(1.5),
    "float32": np.float32(1.5),
    "of shape ()": np.array(1.5),
}


def with_scalar(scalar):
    return {"t": scalar, "w": np.array([[1.0, 2.0], [0.5, -1.0]], np.float32)}


def trained(params, method=None):
    base = HOW["optimizer"] if method is None else method.optimizer(HOW["optimizer"])
    how = HOW | {"optimizer": base}
    return fj.training.train(MODEL, params, FEDERATION, key=jax.random.key(0), **how)


def merged(name, params):
    method = algorithms.make(name, MODEL)
    sent = fj.merging.summarize(method, trained(params, method), FEDERATION, key=jax.random.key(1))
    return fj.merging.merge(method, params, sent)[0]


def of_list(params):
    method = algorithms.fisher_merge(MODEL)
    models = [params, params | {"w": 2 * params["w"]}]
    sent = fj.merging.summarize(method, models, FEDERATION, key=jax.random.key(1))
    streamed = fj.merging.merge_stream(method, params, [(sent, None)])[0]
    return fj.merging.merge(method, params, sent)[0], streamed


def exchanged(params):
    model = fj.Model(lambda p, x: jnp.tanh(x * p["t"]) @ p["w"], fj.likelihoods.gaussian)
    head = algorithms.analytic_head(model)
    return fj.merging.exchange(head, params, FEDERATION, key=jax.random.key(0))[0]


def played(params, name="fedavg"):
    method = algorithms.with_server_optimizer(algorithms.make(name, MODEL), optax.adam(0.1))
    experiment = fj.rounds.federated(MODEL, method, cohort=2, **HOW)
    state = experiment.init(params, 2)
    traffic = experiment.traffic(params, FEDERATION)
    going = fj.rounds.run(experiment, state, FEDERATION, key=jax.random.key(2), rounds=2)
    *_, (last, _) = going
    return last.params, traffic


def compressed(params):
    codec = fj.compression.compose(fj.compression.differences(), fj.compression.quantized(8))
    method = fj.compression.compressed(algorithms.fedavg(), codec)
    key = jax.random.key(1)
    sent = fj.merging.summarize(method, trained(params)._replace(start=params), FEDERATION, key=key)
    return fj.merging.merge(method, params, sent)[0]


def measured(params):
    found = fj.metrics.performance(MODEL, params, FEDERATION)
    return found.loss, fj.metrics.logits(MODEL, params, X)


def personalised(params):
    how = {"key": jax.random.key(0), "fractions": (0.0, 0.5)}
    found = fj.personalization.personalize(MODEL, params, FEDERATION, **how, **HOW)
    return [own.loss for own in found]


def remembered(params):
    key = jax.random.key(0)
    return (
        fj.training.train_memory(MODEL, params, FEDERATION, key=key, **HOW).resident,
        fj.training.untrained(params, 2).params,
    )


FISHERS = {
    "full": fj.fisher.full,
    "diagonal": fj.fisher.diagonal,
    "kfac": functools.partial(fj.fisher.kfac, fallback=fj.fisher.diagonal),
}


def curvature(kind, params):
    return FISHERS[kind](MODEL, params, fj.Examples(X)).diagonal()


USES = {
    "training": lambda params: trained(params).params,
    "memory": remembered,
    **{kind: functools.partial(curvature, kind) for kind in FISHERS},
    "products": lambda p: fj.fisher.vector_product(MODEL, p, fj.Examples(X), p),
    **{
        f"merge by {name}": functools.partial(merged, name)
        for name in ("fedavg", "fednova", "scaffold", "fedfish", "fedfisher_full")
    },
    "merge of a list": of_list,
    "exchange": exchanged,
    "rounds": played,
    "rounds of SCAFFOLD": functools.partial(played, name="scaffold"),
    "compression": compressed,
    "metrics": measured,
    "personalisation": personalised,
}


@functools.cache
def expected(use):
    return jax.device_get(USES[use](with_scalar(jnp.float32(1.5))))


@pytest.mark.long
@pytest.mark.parametrize("use", USES)
def test_a_number_is_an_array_of_shape_nothing(use):
    for scalar in SCALARS.values():
        found = jax.device_get(USES[use](with_scalar(scalar)))
        jax.tree.map(np.testing.assert_array_equal, found, expected(use))


@pytest.mark.parametrize("kind", FISHERS)
def test_the_fisher_information_of_a_number_is_that_of_its_derivative(kind):
    params = with_scalar(1.5)

    def outputs(t, x):
        return MODEL.apply(params | {"t": t}, x[None])[0]

    derivatives = jax.vmap(jax.jacrev(outputs), (None, 0))(1.5, X)
    found = curvature(kind, params)["t"]
    np.testing.assert_allclose(found, (derivatives**2).sum(1).mean(), rtol=1e-5)


OTHERS = {
    "int": (1, "is an int"),
    "bool": (True, "is a bool"),
    "complex": (1j, "is a complex"),
    "str": ("relu", "is a str"),
    "function": (jnp.tanh, "is a "),
    "int32": (np.int32(1), "has dtype int32"),
    "boolean array": (np.array(True), "has dtype bool"),
}
# Of the first use of params in each way in.
REFUSING = (
    *("training", "memory", *FISHERS, "products"),
    *("exchange", "rounds", "metrics", "personalisation"),
)


@pytest.mark.parametrize("use", REFUSING)
@pytest.mark.parametrize("leaf", OTHERS)
def test_what_is_no_float_is_refused_by_name(use, leaf):
    value, words = OTHERS[leaf]
    with pytest.raises(TypeError, match=f"^Leaf 't' of .*{words}"):
        USES[use](with_scalar(value))


@pytest.mark.parametrize("leaf", OTHERS)
def test_what_is_no_float_in_a_list_is_refused_by_name(leaf):
    """They are stacked before their dtypes are looked at."""
    words = "expected (floating point|an array or a number)"
    with pytest.raises(TypeError, match=f"^Leaf 't' of .*{words}"):
        USES["merge of a list"](with_scalar(OTHERS[leaf][0]))


def test_none_is_no_leaf():
    model = fj.Model(lambda p, x: x @ p["w"], fj.likelihoods.gaussian)
    found = fj.fisher.diagonal(model, with_scalar(None), fj.Examples(X))
    assert found.entries["t"] is None


def test_files_give_a_number_back(tmp_path):
    path = tmp_path / "model.safetensors"
    # No digit is lost, and a float stands for a number of any precision.
    fj.files.save_arrays(path, with_scalar(0.1))
    assert fj.files.load_arrays(path, like=with_scalar(0.0))["t"] == 0.1
    fj.files.save_arrays(path, trained(with_scalar(1.5))._asdict()["start"])
    found = fj.files.load_arrays(path, like=with_scalar(0.0))
    assert found["t"].dtype == np.float32
    assert found["t"] == 1.5
    update = algorithms.Update({"params": with_scalar(1.5)}, "params")
    path = tmp_path / "ann.safetensors"
    fj.files.save_update(path, update, algorithm="fedavg", client="ann", examples=1)
    found, _ = fj.files.load_update(path)
    assert found.values["params"]["t"].dtype == np.float32
    assert found.values["params"]["t"] == 1.5
