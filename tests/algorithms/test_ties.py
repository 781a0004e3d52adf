"""TIES against its equations, written out with NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, merging, rounds, training

SHAPES = {"a": (4, 3), "b": {"c": (5,), "d": ()}}
WEIGHTS = np.array([3.0, 1.0, 2.0])
BASE = optax.sgd(0.1)  # one, as programs are known by it


def drawn(seed, dtype="float64", count=None):
    """Draw params, or `count` clients' of them, stacked."""
    source = np.random.default_rng(seed)
    front = () if count is None else (count,)
    return jax.tree.map(
        lambda shape: source.normal(size=(*front, *shape)).astype(dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def vectors(stacked):
    """Put the leaves [M, ...] of each client behind one another, [M, d]."""
    rows = [np.asarray(x, float) for x in jax.tree.leaves(stacked)]
    return np.concatenate([x.reshape(len(x), -1) for x in rows], 1)


def by_hand(start, models, weights, density, scaling):
    """Compute the merged model client by client and entry by entry, [d]."""
    [start], kept = vectors(jax.tree.map(lambda x: x[None], start)), []
    for change in vectors(models) - start:
        largest = sorted(range(len(change)), key=lambda j: -abs(change[j]))
        # No two of the drawn magnitudes are equal.
        chosen = largest[: max(1, round(density * len(change)))]
        kept.append([change[j] if j in chosen else 0.0 for j in range(len(change))])
    merged = []
    for before, entries in zip(start, np.transpose(kept), strict=True):
        elected = np.sign(weights @ entries)
        agree = (np.sign(entries) == elected) & (elected != 0)
        moved = weights[agree] @ entries[agree] / weights[agree].sum() if agree.any() else 0.0
        merged.append(before + scaling * moved)
    return np.array(merged)


def send(method, start, models):
    count = len(jax.tree.leaves(models)[0])
    federation = fj.clients.federation((np.eye(count), np.zeros(count)), np.arange(count)[:, None])
    trained = training.Trained(models, start)
    return merging.summarize(method, trained, federation, key=jax.random.key(0))


def merge(method, start, models, weights=None):
    merged = merging.merge(method, start, send(method, start, models), weights)[0]
    return vectors(jax.tree.map(lambda x: np.asarray(x)[None], merged))[0]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize(("density", "scaling"), [(0.2, 1.0), (0.5, 0.3), (1.0, 2.0), (1e-9, 1.0)])
def test_a_merge_is_the_papers_equations(x64, density, scaling, weights):
    start, models = drawn(0), drawn(1, count=3)
    found = merge(algorithms.ties(density, scaling), start, models, weights)
    p = np.ones(3) if weights is None else weights
    np.testing.assert_allclose(found, by_hand(start, models, p, density, scaling), rtol=1e-12)
    assert np.abs(found - vectors(jax.tree.map(lambda x: x[None], start))).max() > 1e-3


def test_clients_that_agree_in_sign_are_averaged(x64):
    start = drawn(0)
    directions = jax.tree.map(np.sign, drawn(1))
    lengths = jax.tree.map(np.abs, drawn(2, count=3))
    models = jax.tree.map(lambda w, s, x: w + s * x, start, directions, lengths)
    found = merge(algorithms.ties(density=1.0), start, models, WEIGHTS)
    np.testing.assert_allclose(found, WEIGHTS / 6 @ vectors(models), rtol=1e-12)


@pytest.mark.parametrize("count", [1, 3])
def test_untrimmed_equal_models_come_back(x64, count):
    start, [one] = drawn(0), vectors(drawn(1, count=1))
    models = jax.tree.map(lambda x: np.repeat(x, count, 0), drawn(1, count=1))
    np.testing.assert_allclose(merge(algorithms.ties(density=1.0), start, models), one, rtol=1e-14)
    # Trimmed to a share, the smaller changes are lost.
    found, before = merge(algorithms.ties(0.5), start, models), vectors(start_of(start))[0]
    moved = np.abs(one - before)
    largest = moved >= np.sort(moved)[-9]  # 9 of 18 entries
    np.testing.assert_allclose(found, np.where(largest, one, before), rtol=1e-14)


def start_of(params):
    return jax.tree.map(lambda x: np.asarray(x)[None], params)


def test_who_did_not_move_and_what_cancels_leave_the_start(x64):
    start, method = {"w": np.arange(1.0, 5.0)}, algorithms.ties(density=1.0)
    still = {"w": np.tile(start["w"], (2, 1))}
    np.testing.assert_array_equal(merge(method, start, still), start["w"])
    # Opposite changes elect nobody, a third client's change anybody.
    changes = np.array([[2.0, -2.0, 1.0, 0.0], [-2.0, 2.0, 3.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    found = merge(method, start, {"w": start["w"] + changes})
    np.testing.assert_allclose(found - start["w"], [0.0, 1.5, 2.0, 0.0], atol=1e-15)


def test_equal_magnitudes_are_all_kept_in_whatever_order_leaves_stand(x64):
    values = np.array([[1.0, -1.0, 0.5, 1.0, 0.25, 0.1]])
    sent = send(algorithms.ties(1 / 3), {"w": np.zeros(6)}, {"w": values}).values["change"]["w"]
    np.testing.assert_array_equal(sent, [[1.0, -1.0, 0.0, 1.0, 0.0, 0.0]])
    turned = {"w": values[:, ::-1]}
    again = send(algorithms.ties(1 / 3), {"w": np.zeros(6)}, turned).values["change"]["w"]
    np.testing.assert_array_equal(again[:, ::-1], sent)


def test_changes_of_bfloat16_are_compared_and_summed_in_float32():
    start = {"w": jnp.zeros(300, "bfloat16")}
    # Of 300 votes of 1/300 in bfloat16 the sum would be off by a per cent.
    models = {"w": jnp.tile(jnp.linspace(-1, 1, 300).astype("bfloat16"), (300, 1))}
    method = algorithms.ties(density=0.5)
    sent = send(method, start, models)
    assert sent.values["change"]["w"].dtype == jnp.bfloat16
    found = merging.merge(method, start, sent)[0]["w"]
    own = np.asarray(models["w"][0], float)
    kept = np.abs(own) >= np.sort(np.abs(own))[150]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, float), np.where(kept, own, 0.0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_diverged_client_is_seen_and_not_trimmed_away(x64, value):
    start, models = drawn(0), drawn(1, count=3)
    models["b"]["c"][1, 2] = value
    method = algorithms.ties(0.2)
    sent = send(method, start, models)
    with pytest.raises(ValueError, match=r"client.* 1.*'change/b/c'"):
        merging.merge(method, start, sent)
    with pytest.warns(UserWarning, match="Left out.*client 1"):
        found = merging.merge(method, start, sent, on_nonfinite="drop")[0]
    others = jax.tree.map(lambda x: x[[0, 2]], models)
    expected = by_hand(start, others, np.ones(2), 0.2, 1.0)
    np.testing.assert_allclose(vectors(start_of(found))[0], expected, rtol=1e-12)


@pytest.mark.long
def test_rounds_of_cohorts_trim_changes_of_that_rounds_model_and_go_on(regression, draw):
    density, scaling = 0.4, 0.5
    method, key = algorithms.ties(density, scaling), jax.random.key(0)
    how = {"cohort": 2, "optimizer": BASE, "epochs": 2, "batch_size": 3}
    experiment = rounds.federated(regression.model, method, **how)
    state, world = experiment.init(draw(0), 4), regression.federation
    played = list(rounds.run(experiment, state, world, key=key, rounds=3))
    sizes = np.array(regression.sizes, float)
    for after, done in played:
        cohort = np.asarray(done.cohort)
        if not sizes[cohort].any():
            continue
        given = jax.device_get((done.start, done.trained.params))
        expected = by_hand(*given, sizes[cohort], density, scaling)
        np.testing.assert_allclose(vectors(start_of(after.params))[0], expected, rtol=1e-10)
    [(again, _)] = rounds.run(experiment, played[1][0], world, key=key, rounds=1)
    chex.assert_trees_all_equal(again, played[2][0])


def test_the_start_has_to_be_known():
    federation = fj.clients.federation((np.eye(2), np.zeros(2)), [[0], [1]])
    with pytest.raises(ValueError, match=r"TIES trims .*training\.Trained\(stacked params, start"):
        merging.summarize(
            algorithms.ties(), [{"w": np.ones(2)}] * 2, federation, key=jax.random.key(0)
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 0.0}, "density is 0"),
        ({"density": 1.5}, "density is 1.5; expected a number above 0 and at most 1"),
        ({"density": float("nan")}, "density is nan"),
        ({"scaling": -1.0}, "scaling is -1"),
    ],
)
def test_options_are_in_range(options, words):
    with pytest.raises(ValueError, match=words):
        algorithms.ties(**options)
