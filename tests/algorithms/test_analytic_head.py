"""The analytic head against least squares on all data in one place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, likelihoods, merging

KEY = jax.random.key(0)
ROWS = np.arange(60)
ONES = np.ones((3, 3), np.float32)
SPLITS = [ROWS], np.split(ROWS, [5, 30]), np.split(np.arange(60)[::-1], [1, 2, 40, 59])


def apply(params, x):
    hidden = jnp.tanh(x @ params["z"])
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


def transposed(params, x):
    return jnp.tanh(x @ params["z"]) @ params["head"].T


@pytest.fixture
def world(x64):
    source = np.random.default_rng(0)
    params = {
        "z": source.normal(size=(4, 6)),
        "head": {"kernel": source.normal(size=(6, 3)), "bias": np.ones(3)},
    }
    return params, source.normal(size=(60, 4)), source.integers(0, 3, 60).astype(np.int32)


def solve(model, params, data, partition, **options):
    federation = fj.clients.federation(data, partition)
    return merging.exchange(algorithms.analytic_head(model, **options), params, federation, key=KEY)


def features(params, x):
    hidden = np.tanh(x @ np.asarray(params["z"]))
    return np.concatenate([hidden, np.ones((len(x), 1))], 1)


@pytest.mark.long
@pytest.mark.parametrize("partition", SPLITS, ids=len)
def test_without_a_ridge_it_is_least_squares_however_examples_are_split(world, partition):
    params, x, labels = world
    cases = {
        likelihoods.gaussian: (np.sin(x[:, :3]), np.sin(x[:, :3])),
        likelihoods.categorical: (labels, np.eye(3)[labels]),
        likelihoods.bernoulli: (np.eye(3, dtype=np.int32)[labels], 2 * np.eye(3)[labels] - 1),
    }
    for likelihood, (y, wanted) in cases.items():
        model = fj.Model(apply, likelihood)
        merged, _, info = solve(model, params, (x, y), partition, ridge=0.0)
        expected = np.linalg.lstsq(features(params, x), wanted)[0]
        np.testing.assert_allclose(merged["head"]["kernel"], expected[:-1], atol=1e-8)
        np.testing.assert_allclose(merged["head"]["bias"], expected[-1], atol=1e-8)
        chex.assert_trees_all_equal(merged["z"], params["z"])
        np.testing.assert_allclose(info.determined, 7)


@pytest.mark.long
def test_the_ridge_has_the_largest_evidence(world):
    """Of Bayesian regression, its noise at the best for each ridge, whatever the split."""
    params, x, labels = world
    model = fj.Model(apply, likelihoods.categorical)
    found = [solve(model, params, (x, labels), split)[2].ridge for split in SPLITS]
    np.testing.assert_allclose(found, found[0], rtol=1e-6)
    a, y = features(params, x), np.eye(3)[labels]
    moment = a.T @ a / 60

    def evidence(ridge):
        shift = ridge * np.trace(moment) / 7
        solution = np.linalg.solve(moment + shift * np.eye(7), a.T @ y / 60)
        misfit = np.mean(((y - a @ solution) ** 2).sum(1)) + shift * (solution**2).sum()
        determinant = np.log(shift / (np.linalg.eigvalsh(moment) + shift)).sum()
        return 3 / 2 * (determinant - 60 * np.log(misfit))

    best = evidence(float(found[0]))
    assert all(evidence(float(found[0]) * factor) < best for factor in (0.5, 0.9, 1.1, 2.0))


@pytest.mark.long
def test_kernels_of_other_layouts_are_solved(world):
    params, x, labels = world
    params = {"z": params["z"], "head": params["head"]["kernel"].T}
    model = fj.Model(transposed, likelihoods.categorical)
    merged = solve(model, params, (x, labels), SPLITS[1], ridge=0.0)[0]
    expected = np.linalg.lstsq(features(params, x)[:, :-1], np.eye(3)[labels])[0]
    np.testing.assert_allclose(np.transpose(merged["head"]), expected, atol=1e-8)


def test_sums_stream_and_clients_without_weight_have_no_say(world):
    params, x, labels = world
    method = algorithms.analytic_head(fj.Model(apply, likelihoods.categorical))
    federation = fj.clients.federation((x, labels), SPLITS[2])
    same = fj.training.untrained(params, 5)
    sent = merging.summarize(method, same, federation, key=KEY)
    whole, _, info = merging.merge(method, params, sent, federation.weights)

    def chunk(*clients):
        rows = np.array(clients)
        own = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], sent)
        return own, np.asarray(federation.sizes)[rows]

    streamed, _, again = merging.merge_stream(method, params, [chunk(0, 3), chunk(1, 2, 4)])
    chex.assert_trees_all_close((streamed, again), (whole, info), rtol=1e-8)
    alone, _, _ = merging.merge(method, params, chunk(1, 2)[0], [1.0, 1.0])
    silent, _, _ = merging.merge(method, params, sent, [0, 1.0, 1.0, 0, 0])
    chex.assert_trees_all_close(silent, alone, rtol=1e-9)


@pytest.mark.long
def test_sequences_are_solved_position_by_position(x64):
    source = np.random.default_rng(0)
    params = {"a": source.normal(size=(3, 4)), "b": np.ones((4, 2))}
    x, y = source.normal(size=(8, 5, 3)), source.integers(0, 2, (8, 5)).astype(np.int32)
    model = fj.Model(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], likelihoods.categorical)
    merged = solve(model, params, (x, y), np.split(np.arange(8), [3]), ridge=0.0)[0]
    flat = np.tanh(x @ np.asarray(params["a"])).reshape(40, 4)
    expected = np.linalg.lstsq(flat, np.eye(2)[y.ravel()])[0]
    np.testing.assert_allclose(merged["b"], expected, atol=1e-9)
    # Every position counts in the evidence, as if it were an example.
    alone = x.reshape(40, 3), y.ravel()
    chosen, info = solve(model, params, (x, y), [range(8)])[::2]
    other, again = solve(model, params, alone, [range(40)])[::2]
    chex.assert_trees_all_close((chosen, info), (other, again), rtol=1e-7)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: algorithms.analytic_head(3), "model is an int"),
        (lambda: bad(ridge=-1.0), "ridge is -1.0"),
        (lambda: bad(batch_size=0), "batch_size is 0"),
        (lambda: bad(max_examples=0), "max_examples is 0"),
        (lambda: bad(lambda p, x: x * p, ONES[0]), "last layer of this network is not a dense"),
        (
            lambda: bad(lambda p, x: jnp.tanh(x @ p) @ p, ONES),
            "last layer of this network is not a dense",
        ),
        (lambda: bad(lambda p, x: 10 * (x @ p) + 50), "a product.*normalise the targets"),
        (lambda: bad(lambda p, x: x + x @ p), "a sum .of a skip"),
        (
            lambda: bad(likelihood=likelihoods.gaussian._replace(sample=lambda key, z: z)),
            "this model has another",
        ),
    ],
)
def test_what_cannot_be_solved_is_refused(make, match):
    with pytest.raises((ValueError, TypeError), match=match):
        make()


def bad(apply=lambda p, x: x @ p, params=None, likelihood=likelihoods.gaussian, **options):
    params = ONES if params is None else params
    y = np.ones((4, 3), np.float32)
    method = algorithms.analytic_head(fj.Model(apply, likelihood), **options)
    federation = fj.clients.federation((np.ones((4, 3), np.float32), y), [range(4)])
    return merging.exchange(method, params, federation, key=KEY)


def test_what_clients_send_is_printed_in_one_line(world):
    params, x, labels = world
    method = algorithms.analytic_head(fj.Model(apply, likelihoods.categorical))
    federation = fj.clients.federation((x, labels), SPLITS[1])
    same = fj.training.untrained(params, 3)
    sent = merging.summarize(method, same, federation, key=KEY)
    for value in (sent, sent.values["head"], same, jax.eval_shape(lambda x: x, same)):
        assert "\n" not in repr(value)
        assert len(repr(value)) < 200
    assert repr(sent).startswith("Update(head, kind sums of the last layer, 6 leaves, ")
    assert repr(sent.values["head"]).startswith("HeadSums(of head/kernel, 6 leaves, ")
    assert repr(same).startswith("Trained(params, 3 leaves, ")
