"""Nobody moves private sums by more than the clip, and what the noise costs is what is said."""

import itertools
import math
import re
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import optax
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

import fisherjax as fj
from fisherjax import algorithms, merging, privacy
from fisherjax.algorithms import Update
from fisherjax.algorithms.base import WeightedSum
from fisherjax.algorithms.exchanges._head_sums import HeadSums
from fisherjax.algorithms.wrappers.sketched import Sketches
from tests.methods import MERGED, REPEATS, exactly

HUGE = 1e6
KEY = jax.random.key(5)
BASE = optax.sgd(0.5)  # one object: training compiles once
EXACT = fj.solvers.closed_form(floor=0.0)


def apply(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"] + params["bias"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)
MADE = {name: algorithms.make(name, MODEL, **exactly(name)) for name in MERGED}
DIAGONAL = algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal, damping=0.1, solver=EXACT)
HEAD = algorithms.analytic_head(MODEL, ridge=0.1)
SERVER = algorithms.with_server_optimizer(algorithms.fedavg(), optax.sgd(0.5))


@pytest.fixture(scope="module")
def world():
    """Four clients of equal sizes, in float64, since a private merge weights them equally."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    draw = np.random.default_rng(0)
    data = draw.normal(size=(24, 3)), draw.integers(0, 2, 24)
    federation = fj.clients.federation(data, np.split(draw.permutation(24), 4))
    shapes = {"bias": (2,), "first": (3, 4), "second": (4, 2)}
    start = {name: jnp.asarray(draw.normal(size=shape)) for name, shape in shapes.items()}
    yield SimpleNamespace(federation=federation, start=start)
    jax.config.update("jax_enable_x64", before)


def train(world, model, optimizer, **how):
    how = {"epochs": 2, "batch_size": 3} | how
    start, key = world.start, jax.random.key(1)
    return fj.training.train(model, start, world.federation, key=key, optimizer=optimizer, **how)


def train_own(world, optimizer):
    return train(world, MODEL, optimizer)


def train_nothing(world, optimizer):
    del optimizer
    return fj.training.untrained(world.start, 4)._replace(start=world.start)


class Summed(NamedTuple):
    """A method whose updates add up, and what its clients do before they summarize."""

    method: algorithms.Algorithm
    prepare: Callable = train_own


ADD_UP = {name: Summed(method) for name, method in MADE.items() if method.reduce is not None}
SUMMED = ADD_UP | {
    "diagonal": Summed(DIAGONAL),
    "head": Summed(HEAD, train_nothing),
    "server": Summed(SERVER),
}


# Clipped sums


@pytest.mark.long
def test_sketches_of_factors_are_refused(world):
    method = algorithms.fedfisher_sketched(MODEL, terms=4)
    wrapped = privacy.private(method, clip=HUGE, noise_multiplier=1.0)
    sent = fj.merging.summarize(wrapped, train(world, MODEL, BASE), world.federation, key=KEY)
    with pytest.raises(ValueError, match="recovered from their sketches only if these are exact"):
        fj.merging.merge(wrapped, world.start, sent, key=KEY)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in REPEATS else n for n in SUMMED],
)
def test_without_noise_and_clips_it_is_the_wrapped_algorithm(world, name):
    method, prepare = SUMMED[name]
    wrapped = privacy.private(method, clip=HUGE, noise_multiplier=0.0)
    trained, start = prepare(world, method.optimizer(BASE)), world.start
    found = []
    for one in (method, wrapped):
        sent = merging.summarize(one, trained, world.federation, key=jax.random.key(0))
        if one is method and isinstance(method.reduce(sent.values, jnp.ones(4)), Sketches):
            return  # refused, see above
        found.append(merging.merge(one, start, sent, key=KEY)[0])
    chex.assert_trees_all_close(*found, rtol=1e-8, atol=1e-8)
    pairs = zip(*map(jax.tree.leaves, (found[1], world.start)), strict=True)
    assert max(np.abs(np.subtract(a, b)).max() for a, b in pairs) > 1e-3


UNCLIPPED = {f"total/{name}": None for name in ("targets", "squares", "negative", "count")}


def params_of(draw, size):
    shapes = {"bias": (2,), "first": (3, 4), "second": (4, 2)}
    return {"params": {key: draw((size, *shape)) for key, shape in shapes.items()}}


def squares_of(draw, size):
    values = params_of(draw, size)
    return values | {"fisher": fj.fisher.Diagonal(jax.tree.map(np.abs, values["params"]))}


def sums_of(draw, size):
    fields = (draw((size, *shape)) for shape in ((5, 5), (5, 2), (2,), (), (), ()))
    return {"head": HeadSums(*fields, layer="second")}


class Clipped(NamedTuple):
    """A method with clips, and stacked values like those that clients send, of what is drawn."""

    method: algorithms.Algorithm
    clip: dict[str, float | None]
    values: Callable

    def reduce(self, values, weights):
        """Add up what is clipped, without noise."""
        own = privacy.private(self.method, clip=self.clip, noise_multiplier=0.0)
        return own.reduce(values, weights).sums


CLIPPED = {
    "fedavg": Clipped(
        MADE["fedavg"], {"total/first": 0.3, "total/second": 0.7, "total/bias": 0.1}, params_of
    ),
    "diagonal": Clipped(DIAGONAL, {"fisher": 0.5, "product": 0.2, "mean": 0.3}, squares_of),
    "head": Clipped(HEAD, {"total/inputs": 2.0, "total/products": 1.0} | UNCLIPPED, sums_of),
}
REDUCED = {name: jax.jit(case.reduce) for name, case in CLIPPED.items()}
EXTREME = st.sampled_from([0.0, 1.0, -3.0, 1e-30, 1e20, -1e38, np.nan, np.inf, -np.inf])


@pytest.mark.parametrize("name", CLIPPED)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_no_client_moves_a_group_by_more_than_its_clip(name, data):
    """Whatever it sends, NaN and infinity among it, against the same sums without it."""
    seed = data.draw(st.integers(0, 9))
    random, special = np.random.default_rng(seed), data.draw(st.lists(EXTREME, max_size=4))
    scale = data.draw(st.sampled_from([1e-3, 1.0, 1e3, 1e19]))

    def draw(shape):
        x = random.normal(size=shape).astype(np.float32)
        flat = x[0].reshape(-1) * scale
        places = random.integers(0, flat.size, len(special))
        flat[places] = special
        x[0] = flat.reshape(x[0].shape)
        return x

    values = CLIPPED[name].values(draw, 3)
    there = REDUCED[name](values, jnp.ones(3))
    away = REDUCED[name](values, jnp.array([0.0, 1, 1]))
    assert float(there.weight) == float(away.weight) == 3
    moved = jax.tree.map(lambda a, b: np.asarray(a, float) - np.asarray(b, float), there, away)
    for group, bound in CLIPPED[name].clip.items():
        names = fj.tree.names(moved)
        leaves = [
            x
            for n, x in zip(names, jax.tree.leaves(moved), strict=True)
            if n == group or n.startswith(f"{group}/")
        ]
        assert leaves
        norm = math.sqrt(sum(np.square(x).sum() for x in leaves))
        # To rounding of the sums over the others, which are of clipped terms.
        assert norm <= (bound or 0) + 1e-5


def test_a_client_within_the_clip_is_not_changed_and_one_beyond_keeps_its_direction():
    method = privacy.private(algorithms.fedavg(), clip=5.0, noise_multiplier=0.0)
    reduce = jax.jit(method.reduce)
    one = reduce({"params": np.array([[3.0, 4.0]])}, np.ones(1)).sums
    assert one == WeightedSum(*one)
    np.testing.assert_allclose(one.total, [3, 4], rtol=1e-6)
    far = reduce({"params": np.array([[30.0, -40.0]])}, np.ones(1)).sums
    np.testing.assert_allclose(far.total, [3, -4], rtol=1e-6)


def test_clients_are_clipped_by_how_far_they_went_not_by_where_they_are():
    method = privacy.private(algorithms.fedavg(), clip=1.0, noise_multiplier=0.0)
    start, key = {"w": jnp.full(2, 1e3)}, jax.random.key(0)
    models = {"w": jnp.array([[1e3 + 0.5, 1e3], [1e3, 1e3 - 8]])}
    federation = fj.clients.federation((np.eye(2), np.zeros(2)), [[0], [1]])
    trained = fj.training.Trained(models, start)
    sent = merging.summarize(method, trained, federation, key=key)
    merged, _, _ = merging.merge(method, start, sent, key=key)
    np.testing.assert_allclose(merged["w"], [1e3 + 0.25, 1e3 - 0.5], rtol=1e-6)
    with pytest.raises(ValueError, match="moved from their start, which is not given"):
        merging.summarize(method, fj.training.Trained(models), federation, key=key)


def test_weights_do_not_count_and_who_is_left_out_adds_zeros():
    method = privacy.private(algorithms.fedavg(), clip=9.0, noise_multiplier=0.0)
    sent = Update({"params": jnp.array([[4.0], [8.0], [jnp.nan]])}, method.kind)
    with pytest.warns(UserWarning, match="Left out.* client 2"):
        merged, _, _ = merging.merge(
            method, jnp.zeros(1), sent, [1, 30, 5], key=KEY, on_nonfinite="drop"
        )
    np.testing.assert_allclose(merged, [4], rtol=1e-6)


def test_streams_and_sums_made_elsewhere_are_the_merge():
    method = privacy.private(algorithms.fedavg(), clip=1.0, noise_multiplier=0.3)
    draw = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    params, values = {"w": jnp.ones(3)}, {"params": {"w": draw}}
    at_once = merging.merge(method, params, Update(values, method.kind), key=KEY)[0]
    halves = [jax.tree.map(lambda x, r=r: x[r], values) for r in (slice(2), slice(2, 4))]
    chunks = [(Update(half, method.kind), None) for half in halves]
    streamed = merging.merge_stream(method, params, chunks, key=KEY)[0]
    chex.assert_trees_all_close(at_once, streamed, rtol=1e-6)
    reduce = jax.jit(method.reduce)
    sums = jax.tree.map(np.add, *(reduce(half, np.ones(2)) for half in halves))
    summed = merging.merge_sums(method, params, sums, jnp.arange(4), key=KEY)[0]
    chex.assert_trees_all_close(at_once, summed, rtol=1e-6)


def test_norms_are_those_of_sums_so_that_a_method_without_sums_is_refused():
    method = algorithms.fedavg()._replace(reduce=None)
    with pytest.raises(ValueError, match="needs each client's update"):
        privacy.norms(method, Update({"params": jnp.ones((2, 1))}, "params"), jnp.zeros(1))


@pytest.mark.parametrize("params", [jnp.zeros(()), jnp.zeros(3), {"w": jnp.zeros(2)}])
def test_norms_want_the_params_that_clients_started_from(params):
    sent = Update({"params": jnp.ones((2, 2))}, "params")
    with pytest.raises(ValueError, match=r"params have leaves .* but each client's update"):
        privacy.norms(algorithms.fedavg(), sent, params)


def test_norms_are_of_what_each_client_adds(world):
    method = DIAGONAL
    trained = train(world, MODEL, BASE)
    sent = merging.summarize(method, trained, world.federation, key=KEY)
    found = privacy.norms(method, sent, world.start, groups=["fisher", "product", "mean"])
    moved = jax.tree.map(np.subtract, sent.values["params"], world.start)
    fishers = sent.values["fisher"].entries
    product = jax.tree.map(np.multiply, fishers, moved)
    for group, values in {"fisher": fishers, "product": product, "mean": moved}.items():
        flat = np.concatenate([np.reshape(x, (4, -1)) for x in jax.tree.leaves(values)], 1)
        np.testing.assert_allclose(found[group], np.linalg.norm(flat, axis=1), rtol=1e-10)


# Noise


SIZE = 40_000


def _merged(key, clip, sigma, num_clients=10):
    method = privacy.private(algorithms.fedavg(), clip=clip, noise_multiplier=sigma)
    zeros = {"a": jnp.zeros(SIZE), "b": jnp.zeros(SIZE)}
    stacked = jax.tree.map(lambda x: jnp.zeros((num_clients, *x.shape)), zeros)
    sent = Update({"params": stacked}, method.kind)
    return merging.merge(method, zeros, sent, key=key)


def test_noise_is_gaussian_of_the_stated_deviation_and_independent_between_groups():
    clip, sigma = {"total/a": 2.0, "total/b": 0.5}, {"total/a": 1.5, "total/b": 4.0}
    merged, _, ledger = _merged(KEY, clip, sigma)
    for name in "ab":
        group = f"total/{name}"
        deviation = clip[group] * sigma[group]
        assert float(ledger.deviation[group]) == pytest.approx(deviation)
        assert float(ledger.sensitivity[group]) == clip[group]
        noise = np.asarray(merged[name]) * 10 / deviation
        # Fails by chance once in ten thousand keys; this one is fixed.
        assert scipy.stats.kstest(noise, "norm").pvalue > 1e-4
        assert noise.std() == pytest.approx(1, abs=4 / math.sqrt(2 * SIZE))
    correlation = np.corrcoef(merged["a"], merged["b"])[0, 1]
    assert abs(correlation) < 4 / math.sqrt(SIZE)


def test_another_key_is_other_noise_and_the_same_key_the_same():
    first, again, other = (_merged(k, 1.0, 1.0)[0] for k in (KEY, KEY, jax.random.key(6)))
    chex.assert_trees_all_equal(first, again)
    assert abs(np.corrcoef(first["a"], other["a"])[0, 1]) < 4 / math.sqrt(SIZE)
    assert abs(np.corrcoef(first["a"], first["b"])[0, 1]) < 4 / math.sqrt(SIZE)


def test_a_private_merge_wants_a_key():
    method = privacy.private(algorithms.fedavg(), clip=1.0, noise_multiplier=1.0)
    values = {"params": jnp.zeros((2, 3))}
    sums = method.reduce(values, jnp.ones(2))
    for merge in (
        lambda: merging.merge(method, jnp.zeros(3), Update(values, method.kind)),
        lambda: merging.merge_stream(method, jnp.zeros(3), []),
        lambda: merging.merge_sums(method, jnp.zeros(3), sums, jnp.arange(2)),
    ):
        with pytest.raises(ValueError, match="expected a secret key"):
            merge()


def diagonal_of(w):
    return fj.fisher.Diagonal({"w": np.square(w)})


def dense_of(w):
    template = fj.fisher.operators.Template.of({"w": jnp.zeros(6)})
    return fj.fisher.Dense(np.einsum("ki,kj->kij", w, w), template)


@pytest.mark.parametrize(
    ("method", "curvature"),
    [(DIAGONAL, diagonal_of), (MADE["fedfisher_full"], dense_of)],
    ids=["diagonal", "full"],
)
def test_noisy_curvature_is_damped_towards_the_mean(method, curvature):
    """With more and more damping the merge becomes the noisy mean; it is finite without any."""
    draw = np.random.default_rng(1).normal
    stacked = {"w": draw(size=(5, 6)).astype(np.float32)}
    values = {"params": stacked, "fisher": curvature(stacked["w"])}
    clip = {"fisher": 1.0, "product": 1.0, "mean": 1.0}
    merged, sums = {}, None
    for damping in (1.0, 1e6):
        own = privacy.private(method, clip=clip, noise_multiplier=2.0, damping=damping)
        # Damping is of the merge, not of the sums.
        sums = jax.jit(own.reduce)(values, np.ones(5)) if sums is None else sums
        state = own.link.init({"w": jnp.zeros(6)}, 5)
        given = (KEY, sums, {"w": jnp.zeros(6)}, state, jnp.arange(5))
        merged[damping] = own.aggregate(*given)[0]["w"]
    own = jax.random.split(KEY)[0]
    noised = privacy.accounting.add_noise(own, jax.tree.leaves(sums), [2.0, 2.0, 2.0, 0.0])
    mean = np.asarray(noised[2]) / 5
    np.testing.assert_allclose(merged[1e6], mean, rtol=1e-3, atol=1e-3)
    assert np.isfinite(merged[1.0]).all()
    assert not np.allclose(merged[1.0], mean, rtol=0.1)


def test_a_noisy_second_moment_of_features_is_definite(world):
    clip = {"total/inputs": 1.0, "total/products": 1.0} | UNCLIPPED
    head, sigma, damping = algorithms.analytic_head(MODEL, ridge=0.0), 30.0, 0.1
    method = privacy.private(head, clip=clip, noise_multiplier=sigma, damping=damping)
    merged, _, ledger = merging.exchange(method, world.start, world.federation, key=KEY)
    rows, columns = world.start["second"].shape
    # Noise is far above sums of four clients, and half of its eigenvalues are below zero: what is
    # inverted is no smaller than the damping.
    products = sigma * (math.sqrt(rows * columns) + 4) + 4
    assert (
        0 < jnp.linalg.norm(merged["second"]) < products / (damping * sigma * math.sqrt(2 * rows))
    )
    assert ledger.noise_multiplier.keys() == {"total/inputs", "total/products"}


# Rounds


@pytest.mark.long
def test_a_round_is_private_and_its_second_does_not_compile_again(world, compilations):
    method = privacy.private(algorithms.fedavg(), clip=0.1, noise_multiplier=0.5)
    how = {"cohort": 2, "optimizer": BASE, "epochs": 1, "batch_size": 3}
    experiment = fj.rounds.federated(MODEL, method, **how)
    state = experiment.init(world.start, 4)
    played = [*fj.rounds.run(experiment, state, world.federation, key=KEY, rounds=2)]
    assert [int(done.info.rounds) for _, done in played] == [1, 2]
    state, _ = played[-1]
    with compilations() as count:
        again = privacy.private(algorithms.fedavg(), clip=0.1, noise_multiplier=0.5)
        experiment = fj.rounds.federated(MODEL, again, **how)
        [(_, done)] = fj.rounds.run(experiment, state, world.federation, key=KEY, rounds=1)
    assert count() == 0
    assert int(done.info.rounds) == 3
    expected = privacy.epsilon(0.5, delta=1e-3, rounds=3)
    assert privacy.epsilon(done.info, delta=1e-3) == pytest.approx(expected)


# What it costs


def exact(moved, delta):
    """Invert Balle and Wang's theorem 8 as it stands there, in numbers of hundreds of digits."""
    with mpmath.workdps(60 + max(0, int(2.2 * math.log10(moved)))):
        moved, delta, low = mpmath.mpf(moved), mpmath.mpf(delta), mpmath.mpf(0)

        def is_enough(eps):
            tail = mpmath.exp(eps) * mpmath.ncdf(-moved / 2 - eps / moved)
            return mpmath.ncdf(moved / 2 - eps / moved) - tail <= delta

        if is_enough(low):
            return 0.0
        high = moved * (moved / 2 + 40)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return float(high)


NOISE = [1e-6, 0.005, 0.02, 0.05, 0.4, 1.0, 5.0, 500.0, 1e6]


@pytest.mark.parametrize("sigma", NOISE)
def test_epsilon_is_that_of_the_analytic_gaussian_mechanism(sigma):
    """The rounds of a Gaussian mechanism are one with the noise divided by their root."""
    for delta, rounds in itertools.product((1e-15, 1e-5, 0.5), (1, 7, 10**6)):
        found = privacy.epsilon(sigma, delta=delta, rounds=rounds)
        expected = exact(math.sqrt(rounds) / sigma, delta)
        assert found == pytest.approx(expected, rel=1e-12, abs=0), (delta, rounds)


@pytest.mark.parametrize(("sigma", "rounds"), [(1e-6, 1), (0.005, 1), (1.0, 10**9), (1e-300, 1)])
def test_epsilon_of_extreme_noise_takes_no_time_and_no_memory(sigma, rounds):
    tracemalloc.start()
    before = time.process_time()
    assert privacy.epsilon(sigma, delta=1e-5, rounds=rounds) > 1e4
    assert time.process_time() - before < 1
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def ledger_of(rounds, **multipliers):
    rounds = jnp.asarray(rounds) if isinstance(rounds, list) else rounds
    return privacy.Ledger(rounds, {}, {}, multipliers, ())


@pytest.mark.long
def test_epsilon_grows_with_what_is_released_and_falls_with_noise():
    cost = partial(privacy.epsilon, delta=1e-5)
    assert cost(2.0, rounds=2) > cost(2.0) > cost(3.0) > 0
    assert cost(0.0) == cost(ledger_of(1, a=0.0, b=1.0)) == math.inf
    # Groups and ledgers compose: two of one deviation are one of deviation divided by root two.
    both = cost(ledger_of(1, a=2.0, b=2.0))
    assert both == pytest.approx(cost(2 / math.sqrt(2)), rel=1e-3)
    assert cost(ledger_of(1, a=2.0), ledger_of(1, b=2.0)) == pytest.approx(both, rel=1e-3)
    assert cost(2.0, 2.0) == pytest.approx(both, rel=1e-3)
    assert cost(ledger_of(0, a=0.0), 2.0) == cost(2.0)


@pytest.mark.long
def test_cohorts_drawn_in_secret_cost_less_and_whole_ones_a_replaced_client():
    cost = partial(privacy.epsilon, 2.0, delta=1e-5, rounds=20)
    few, whole = cost(cohort=(10, 1000)), cost(cohort=(1000, 1000))
    assert few < whole / 10
    # Without sampling, replacing a client doubles the sensitivity.
    assert whole == privacy.epsilon(1.0, delta=1e-5, rounds=20)


def least(sigma, share, delta):
    """Bound the epsilon of one secret cohort from below: everybody else has zeros, in one round."""
    z = np.linspace(-1 - 12 * sigma, 1 + 12 * sigma, 200_001)
    normal = partial(scipy.stats.norm.pdf, z, scale=sigma)
    one, other = (share * normal(m) + (1 - share) * normal(0) for m in (1, -1))

    def excess(eps):
        return scipy.integrate.trapezoid(np.maximum(one - math.exp(eps) * other, 0), z) - delta

    return scipy.optimize.brentq(excess, 0, 300) if excess(0) > 0 else 0.0


@pytest.mark.long
@pytest.mark.parametrize("sigma", [0.1, 2.0, 30.0, 1e3, 1e6, 1e9])
def test_the_bound_of_cohorts_lies_between_the_least_and_what_it_costs_without_sampling(sigma):
    for cohort, delta in (((1, 1000), 1e-8), ((10, 1000), 1e-5), ((1, 2), 1e-12)):
        found = privacy.epsilon(sigma, delta=delta, cohort=cohort)
        whole = privacy.epsilon(sigma / 2, delta=delta)
        assert least(sigma, cohort[0] / cohort[1], delta) <= found <= whole
    # Noise that hides one round does not hide as many as undo it: a divergence that vanishes would.
    assert privacy.epsilon(sigma, delta=1e-5, rounds=int(sigma**2) + 1, cohort=(1, 2)) > 0.1


# Gradients


@jax.jit
@jax.grad
def one_gradient(params, x, y):
    return -jax.nn.log_softmax(apply(params, x))[y]


def _looped(params, inputs, targets, weights, clip, mask=("bias", "first", "second")):
    """Clip and average in Python, one example after another."""
    total = {name: np.zeros(leaf.shape) for name, leaf in params.items()}
    for x, y, w in zip(inputs, targets, weights, strict=True):
        if w == 0:
            continue
        gradient = one_gradient(params, x, y)
        norm = math.sqrt(sum(float((gradient[name] ** 2).sum()) for name in mask))
        for name in mask:
            total[name] += np.asarray(gradient[name]) * min(1, clip / norm)
    return {name: leaf / np.sum(np.asarray(weights) > 0) for name, leaf in total.items()}


@partial(jax.jit, static_argnums=0)
def gradient_of(model, params, inputs, targets, weights, key=KEY):
    def loss(params):
        outputs, _ = model.apply_train(params, inputs, key, weights)
        losses = model.likelihood.negative_log_likelihood(outputs, targets)
        return jnp.where(weights > 0, losses, 0).sum() / (weights > 0).sum()

    return jax.grad(loss)(params)


@pytest.mark.parametrize(("clip", "frozen"), [(0.3, ()), (0.7, ("first",)), (100.0, ())])
def test_private_gradients_are_those_of_a_loop_over_examples(world, clip, frozen):
    mask = {name: name not in frozen for name in world.start}
    model = privacy.dp_sgd(MODEL._replace(mask=mask), clip=clip, noise_multiplier=0.0)
    draw = np.random.default_rng(3)
    inputs, targets = jnp.asarray(draw.normal(size=(6, 3))), jnp.asarray(draw.integers(0, 2, 6))
    weights = jnp.array([1.0, 1, 0, 1, 1, 0])
    found = gradient_of(model, world.start, inputs, targets, weights)
    trained = tuple(name for name in world.start if name not in frozen)
    expected = _looped(world.start, inputs, targets, weights, clip, trained)
    chex.assert_trees_all_close(found, jax.tree.map(jnp.asarray, expected), rtol=1e-10, atol=1e-12)


@pytest.mark.long
def test_a_full_minibatch_is_that_of_optax(world):
    draw = np.random.default_rng(4)
    inputs, targets = jnp.asarray(draw.normal(size=(6, 3))), jnp.asarray(draw.integers(0, 2, 6))

    each = jax.jit(jax.vmap(one_gradient, (None, 0, 0)))(world.start, inputs, targets)
    theirs = optax.contrib.differentially_private_aggregate(0.4, 0.0, key=KEY)
    expected, _ = jax.jit(theirs.update)(each, theirs.init(world.start))
    model = privacy.dp_sgd(MODEL, clip=0.4, noise_multiplier=0.0)
    found = gradient_of(model, world.start, inputs, targets, jnp.ones(6))
    chex.assert_trees_all_close(found, expected, rtol=1e-10)


def test_noise_of_gradients_is_divided_by_the_examples_of_the_minibatch():
    linear = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
    model = privacy.dp_sgd(linear, clip=0.5, noise_multiplier=3.0)
    inputs, targets = jnp.zeros((4, SIZE)), jnp.zeros((4, 1))
    weights, params = jnp.array([1.0, 1, 1, 0]), jnp.zeros((SIZE, 1))
    noise = np.asarray(gradient_of(model, params, inputs, targets, weights)).ravel() * 3 / 1.5
    assert scipy.stats.kstest(noise, "norm").pvalue > 1e-4
    other = gradient_of(model, params, inputs, targets, weights, jax.random.key(6)).ravel()
    assert abs(np.corrcoef(noise, other)[0, 1]) < 4 / math.sqrt(SIZE)


def test_an_example_without_a_gradient_counts_with_zeros():
    linear = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
    model = privacy.dp_sgd(linear, clip=1.0, noise_multiplier=0.0)
    inputs, targets = jnp.array([[1.0, 0], [jnp.inf, 1]]), jnp.array([[-0.5], [1.0]])
    found = gradient_of(model, jnp.zeros((2, 1)), inputs, targets, jnp.ones(2))
    np.testing.assert_allclose(found.ravel(), [0.25, 0])


@pytest.mark.long
def test_training_without_noise_and_clips_is_training(world):
    plain = train(world, MODEL, BASE)
    model = privacy.dp_sgd(MODEL, clip=HUGE, noise_multiplier=0.0)
    private = train(world, model, BASE)
    chex.assert_trees_all_close(private.params, plain.params, rtol=1e-10)
    chex.assert_trees_all_close(private.loss, plain.loss, rtol=1e-10)
    assert privacy.dp_sgd(MODEL, clip=HUGE, noise_multiplier=0.0) is model


def test_dropout_is_drawn_for_each_example(world):
    def dropping(params, x, key, weights):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return apply(params, jnp.where(kept, 2 * x, 0)), None

    model = privacy.dp_sgd(MODEL._replace(apply_train=dropping), clip=HUGE, noise_multiplier=0.0)
    outputs, _ = model.apply_train(world.start, jnp.ones((40, 3)), KEY, jnp.ones(40))
    assert len(np.unique(np.asarray(outputs), axis=0)) == 8  # of three inputs, each there or not


# Bad input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"clip": 0.0}, "clip of 'all' is 0.0; expected a positive number"),
        ({"clip": {"total": -1.0}}, "clip of 'total' is -1.0"),
        ({"clip": {}}, "expected a bound for at least one group"),
        ({"clip": {"total": None}}, "expected a bound for at least one group"),
        ({"noise_multiplier": -1.0}, "noise_multiplier of 'all' is -1.0"),
        ({"noise_multiplier": {"fisher": 1.0}}, "noise_multiplier has groups ['fisher']"),
        ({"damping": -1.0}, "damping is -1.0"),
        ({"algorithm": algorithms.fedfisher(MODEL)}, "its reduce is None"),
        (
            {"algorithm": algorithms.fedavg()._replace(decode=lambda values, params: values)},
            "compress the private algorithm",
        ),
    ],
)
def test_what_cannot_be_private_is_refused(options, said):
    options = {"algorithm": algorithms.fedavg(), "clip": 1.0, "noise_multiplier": 1.0} | options
    with pytest.raises(ValueError, match=re.escape(said)):
        privacy.private(options.pop("algorithm"), **options)


@pytest.mark.parametrize(
    "clip", [{"fisher": 1.0}, {"total": 1.0, "total/w": 1.0}, {"total/v": 1.0}]
)
def test_unknown_groups_are_refused_once_sums_are_known(clip):
    method = privacy.private(algorithms.fedavg(), clip=clip, noise_multiplier=1.0)
    values = {"params": {"v": jnp.zeros((2, 3)), "w": jnp.zeros((2, 3))}}
    with pytest.raises(ValueError, match="but the sums \\['total/v', 'total/w'\\]; expected"):
        method.reduce(values, jnp.ones(2))


def test_a_leaf_that_is_called_weight_is_clipped_too():
    method = privacy.private(algorithms.fedavg(), clip=1.0, noise_multiplier=0.0)
    sums = method.reduce({"params": {"weight": jnp.full((2, 1), 9.0)}}, jnp.ones(2)).sums
    assert float(sums.total["weight"][0]) == pytest.approx(2) == float(sums.weight)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"delta": 0.0}, ValueError, "delta is 0.0; expected a positive number"),
        ({"delta": 1.0}, ValueError, "expected 0 <= delta < 1"),
        ({"rounds": 0}, ValueError, "rounds is 0"),
        ({"spent": (-1.0,)}, ValueError, "noise_multiplier is -1.0"),
        ({"spent": ()}, ValueError, "epsilon got no releases"),
        ({"cohort": (20, 10)}, ValueError, "cohort is \\(20, 10\\)"),
        ({"cohort": (2.5, 5)}, ValueError, "cohort is \\(2.5, 5\\); expected .* integers"),
        ({"cohort": (True, 5)}, ValueError, "cohort is"),
        ({"cohort": (0, 5)}, ValueError, "cohort is"),
        ({"cohort": 5}, ValueError, "cohort is 5"),
        ({"cohort": (1, 2, 3)}, ValueError, "cohort is"),
        ({"delta": math.nan}, ValueError, "delta is nan"),
        ({"delta": True}, TypeError, "delta is True"),
        ({"rounds": 1e9}, ValueError, "rounds is 1000000000.0; expected an integer"),
        ({"rounds": 10**400}, ValueError, "rounds is 1000"),
        ({"spent": (True,)}, TypeError, "noise_multiplier is True"),
        ({"spent": (math.nan,)}, ValueError, "noise_multiplier is nan"),
        ({"spent": (math.inf,)}, ValueError, "noise_multiplier is inf"),
        ({"spent": (jnp.ones(2),)}, TypeError, "noise_multiplier is"),
        ({"spent": ("1",)}, TypeError, "noise_multiplier is '1'"),
        ({"spent": (ledger_of(1),)}, ValueError, "no groups of sums"),
        ({"spent": (ledger_of(1, a=-1.0),)}, ValueError, "noise_multiplier of 'a' is -1"),
        ({"spent": (ledger_of(-1, a=1.0),)}, ValueError, "rounds of a ledger is -1"),
        ({"spent": (ledger_of(2.5, a=1.0),)}, ValueError, "rounds of a ledger is 2.5"),
        ({"spent": (ledger_of(10**400, a=1.0),)}, ValueError, "rounds of a ledger is 1000"),
        ({"spent": (ledger_of(1, a=math.nan),)}, ValueError, "noise_multiplier of 'a' is nan"),
        ({"spent": (ledger_of(1, a=True),)}, TypeError, "noise_multiplier of 'a' is True"),
        (
            {"spent": (ledger_of(1)._replace(noise_multiplier=2.0),)},
            ValueError,
            "no groups of sums",
        ),
        (
            {"spent": (ledger_of(1, a=1.0),), "rounds": 2},
            ValueError,
            "has its own number of rounds",
        ),
        ({"cohort": (1, 10**400)}, ValueError, "cohort is \\(1, 1000"),
        ({"cohort": (math.nan, 5)}, ValueError, "cohort is"),
        ({"spent": (ledger_of([1, 2], a=1.0),)}, ValueError, "rounds of a ledger is"),
    ],
)
def test_costs_that_make_no_sense_are_refused(options, error, said):
    options = {"spent": (1.0,), "delta": 1e-5} | options
    with pytest.raises(error, match=said):
        privacy.epsilon(*options.pop("spent"), **options)


def test_epsilon_of_what_is_traced_is_refused():
    with pytest.raises(TypeError, match="call it outside"):
        jax.jit(lambda sigma: privacy.epsilon(sigma, delta=1e-5))(1.0)


def test_gradients_that_cannot_be_private_are_refused(world):
    with pytest.raises(ValueError, match="clip is 0"):
        privacy.dp_sgd(MODEL, clip=0.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="noise_multiplier is -1"):
        privacy.dp_sgd(MODEL, clip=1.0, noise_multiplier=-1.0)
    running = MODEL._replace(apply_train=lambda p, x, k, w: (apply(p, x), p))
    model = privacy.dp_sgd(running, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="running statistics"):
        train(world, model, optax.sgd(0.1))
