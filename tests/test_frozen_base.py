"""A large base that nobody trains: in memory once, an argument of programs, and sent by nobody."""

import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, leaves, merging, rounds, training, tree

CLIENTS = 8
HOW = {"optimizer": optax.adam(0.1), "epochs": 1, "batch_size": 2}
KEY = jax.random.key(0)
SOURCE = np.random.default_rng(0)
DATA = np.float32(SOURCE.normal(size=(24, 8))), SOURCE.integers(0, 3, 24)
FEDERATION = fj.clients.federation(DATA, np.split(np.arange(24), CLIENTS))


def apply(params, x):
    wide = x @ params["base"]["kernel"] + params["base"]["bias"]
    hidden = jnp.tanh(wide.reshape(len(x), 8, -1).mean(-1))
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


MASK = {name: dict.fromkeys(["kernel", "bias"], name == "head") for name in ("base", "head")}
MODEL = fj.Model(apply, fj.likelihoods.categorical, mask=MASK)
FEDFISHER = algorithms.fedfisher(MODEL, batch_size=2)


def start(width, seed=0):
    draw = np.random.default_rng(seed).normal
    base = {"kernel": draw(size=(8, width)), "bias": draw(size=width)}
    params = {"base": base, "head": {"kernel": draw(size=(8, 3)), "bias": np.zeros(3)}}
    return jax.tree.map(np.float32, params)


def shapes(width):
    return jax.tree.map(tree.shape_of, start(width))


NEEDS = {
    "training": lambda w: training.train_memory(MODEL, w, FEDERATION, key=KEY, **HOW),
    "training by epochs": lambda w: training.train_memory(
        MODEL, w, FEDERATION, key=KEY, progress=print, **HOW
    ),
    "K-FAC": lambda w: merging.summarize_memory(FEDFISHER, w, FEDERATION, key=KEY),
    "RegMean": lambda w: merging.summarize_memory(
        algorithms.regmean(MODEL, batch_size=2), w, FEDERATION, key=KEY
    ),
    "an exchange": lambda w: merging.exchange_memory(
        algorithms.analytic_head(MODEL, batch_size=2), w, FEDERATION, key=KEY
    )[0],
}


@pytest.mark.parametrize("program", NEEDS)
def test_a_base_is_in_memory_once(program):
    """Eight clients share its four million numbers; activations are of two examples."""
    width = 2**19
    large, small = (NEEDS[program](start(w)) for w in (width, 8))
    copy = 9 * width * 4
    assert 0.99 < (large.resident - small.resident) / copy < 1.01
    # Two rows of activations, and their mean.
    assert large.scratch - small.scratch < 0.6 * copy


def used(params):
    """Train, summarize, merge, play rounds, exchange and look: every program there is."""
    trained = training.train(MODEL, params, FEDERATION, key=KEY, **HOW)
    given = [trained, training.Trained(trained.models)]
    sent = [merging.summarize(FEDFISHER, own, FEDERATION, key=KEY) for own in given]
    merged, _, _ = merging.merge(FEDFISHER, params, sent[0], FEDERATION.weights)
    experiment = rounds.federated(MODEL, FEDFISHER, cohort=3, **HOW)
    state = experiment.init(params, FEDERATION)
    *_, (state, _) = rounds.run(experiment, state, FEDERATION, key=KEY, rounds=2)
    head = algorithms.analytic_head(MODEL, batch_size=2)
    solved, _, _ = merging.exchange(head, params, FEDERATION, key=KEY)
    examples = fj.Examples(*DATA)
    for fisher in (fj.fisher.kfac, fj.fisher.diagonal, fj.fisher.full):
        fisher(MODEL, params, examples, batch_size=4)
    vector = leaves.trained(MODEL, params)
    fj.fisher.vector_product(MODEL, params, examples, vector, batch_size=4)
    fj.metrics.performance(MODEL, merged, FEDERATION)
    return merged, state.params, solved


@pytest.mark.long
def test_a_base_is_no_constant_of_a_program(compilations):
    width, before = 2**15, jax.config.jax_captured_constants_warn_bytes
    jax.config.update("jax_captured_constants_warn_bytes", 2**18)
    large = jnp.ones(2**17)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*constants were captured")
            with pytest.raises(UserWarning, match="constants were captured"):
                jax.jit(lambda x: x + large)(1.0)
            used(start(width))
    finally:
        jax.config.update("jax_captured_constants_warn_bytes", before)
    # Nor does another base of these shapes compile anything.
    other = start(width, seed=1)
    with compilations() as count:
        found = used(other)
    assert count() == 0
    for params in found:
        for name, leaf in other["base"].items():
            assert np.asarray(params["base"][name]).tobytes() == leaf.tobytes()
    assert not np.array_equal(found[0]["head"]["kernel"], other["head"]["kernel"])


def test_a_model_is_known_by_its_functions_and_mask():
    """Its hash reads no array: two that differ in nothing else are one."""
    assert hash(MODEL) == hash(fj.Model(apply, fj.likelihoods.categorical, mask=MASK))
    assert all(isinstance(part, (str, bool)) for pair in MODEL.mask for part in pair)


def test_halves_of_a_base_keep_their_precision():
    """A frozen base in bfloat16 below a head in float32 keeps its bits and its dtype."""
    params = start(16)
    params["base"] = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params["base"])
    trained = training.train(MODEL, params, FEDERATION, key=KEY, **HOW)
    sent = merging.summarize(FEDFISHER, trained, FEDERATION, key=KEY)
    merged, _, _ = merging.merge(FEDFISHER, params, sent, FEDERATION.weights)
    for name, leaf in params["base"].items():
        assert merged["base"][name].dtype == jnp.bfloat16
        assert np.asarray(merged["base"][name]).tobytes() == np.asarray(leaf).tobytes()


def merged_of(weights, models, base):
    """Merge models of given heads, of which the base is everybody's."""
    # Of minibatches that have all examples: a loop over several has no gradient.
    method = algorithms.fedfisher(MODEL)
    several = [{"base": base, "head": head} for head in models]
    sent = merging.summarize(method, several, FEDERATION, key=KEY)
    return merging.merge(method, several[0], sent, weights)[0]


def heads():
    draw = np.random.default_rng(2).normal
    return [{"kernel": draw(size=(8, 3)), "bias": draw(size=3)} for _ in range(CLIENTS)]


@pytest.mark.slow
def test_derivatives_of_a_merge_are_those_of_the_network_with_constants(x64):
    base = jax.tree.map(np.float64, start(16)["base"])
    weights, models = jnp.arange(1.0, CLIENTS + 1), heads()

    def closed(params, x):
        return apply(params | {"base": base}, x)

    constant = algorithms.fedfisher(fj.Model(closed, fj.likelihoods.categorical))

    def by_constants(weights, models):
        several = [{"head": head} for head in models]
        sent = merging.summarize(constant, several, FEDERATION, key=KEY)
        return merging.merge(constant, several[0], sent, weights)[0]["head"]

    def size(function):
        def summed(weights, models):
            return tree.inner(found := function(weights, models), found)

        return summed

    def by_mask(weights, models):
        return merged_of(weights, models, base)["head"]

    found, expected = (jax.grad(size(f), (0, 1))(weights, models) for f in (by_mask, by_constants))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10), found, expected
    )
    several = jnp.stack([weights, weights[::-1]])
    mapped = jax.jit(jax.vmap(lambda w: merged_of(w, models, base)))(several)
    alone = [merged_of(w, models, base) for w in several]
    for place, one in enumerate(alone):
        jax.tree.map(
            lambda x, y, i=place: np.testing.assert_allclose(x[i], y, rtol=1e-9), mapped, one
        )
    for name, leaf in base.items():
        assert np.asarray(mapped["base"][name][1]).tobytes() == leaf.tobytes()


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np, fisherjax as fj
from fisherjax.clients import shard
from tests import test_frozen_base as law
assert len(jax.devices()) == 2
params = law.start(16)
alone = law.used(params)
law.FEDERATION = shard(law.FEDERATION)
assert law.FEDERATION.mesh is not None
for found, expected in zip(law.used(params), alone):
    for name, leaf in params["base"].items():
        assert np.asarray(found["base"][name]).tobytes() == leaf.tobytes()
    for name, leaf in expected["head"].items():
        np.testing.assert_allclose(found["head"][name], leaf, rtol=1e-3, atol=1e-4)
"""


@pytest.mark.slow
def test_clients_on_two_devices_leave_a_base_alone():
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", DEVICES], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
