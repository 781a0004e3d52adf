"""Task arithmetic, DARE and Iso-C against their equations, written out in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, merging
from fisherjax.algorithms import Update

WEIGHTS = np.array([2.0, 0.0, 5.0, 1.0])
SHARES = WEIGHTS / WEIGHTS.sum()
SHAPES = {"kernel": (2, 2, 3, 4), "matrix": (5, 3), "row": (1, 4), "stack": (2, 3, 4), "bias": (4,)}


@pytest.fixture
def world(x64):
    """A start and four clients, whose changes are small beside it; one has no weight."""
    source = np.random.default_rng(0)
    start = {name: source.normal(size=shape) for name, shape in SHAPES.items()}
    changes = {name: 0.1 * source.normal(size=(4, *shape)) for name, shape in SHAPES.items()}
    return start, changes


def params_of(start, changes):
    return Update(
        {"params": jax.tree.map(lambda w, t: jnp.asarray(w + t), start, changes)}, "params"
    )


def merge(method, start, updates, weights=WEIGHTS):
    return merging.merge(method, jax.tree.map(jnp.asarray, start), updates, weights)[0]


def assert_close(found, expected, tolerance=1e-12):
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=tolerance, err_msg=name)


def test_task_arithmetic_adds_the_scaled_sum_of_the_changes(world):
    start, changes = world
    sums = {name: 3 * np.tensordot(SHARES, t, 1) for name, t in changes.items()}
    found = merge(algorithms.task_arithmetic(scaling=0.4), start, params_of(*world))
    assert_close(found, {name: start[name] + 0.4 * sums[name] for name in start})
    # With equal weights, sum_i tau_i of all four.
    found = merge(algorithms.task_arithmetic(scaling=0.4), start, params_of(*world), None)
    assert_close(found, {name: start[name] + 0.4 * changes[name].sum(0) for name in start})


def test_scaling_by_the_number_of_clients_is_the_average(world):
    third = merge(algorithms.task_arithmetic(scaling=1 / 3), world[0], params_of(*world))
    assert_close(third, merge(algorithms.fedavg(), world[0], params_of(*world)))


def isotropic(total):
    """U V^T times the mean singular value, from the symmetric eigenproblem of a square root."""
    values, vectors = np.linalg.eigh(total.T @ total)
    inverse = vectors / np.sqrt(values) @ vectors.T
    return np.sqrt(values).mean() * total @ inverse


def test_iso_c_keeps_the_polar_factor_of_each_matrix_and_averages_the_rest(world):
    start, changes = world
    found = merge(algorithms.iso_c(scaling=1.3), start, params_of(*world))
    sums = {name: 3 * np.tensordot(SHARES, t, 1) for name, t in changes.items()}
    expected = {name: start[name] + sums[name] / 3 for name in ("stack", "bias")}
    matrix, kernel = sums["matrix"], sums["kernel"].reshape(12, 4)
    expected["matrix"] = start["matrix"] + 1.3 * isotropic(matrix)
    expected["kernel"] = start["kernel"] + 1.3 * isotropic(kernel).reshape(2, 2, 3, 4)
    expected["row"] = start["row"] + 1.3 * sums["row"]  # a single singular value is its own mean
    assert_close(found, expected, 1e-10)
    # All singular values of the change are equal, and its directions are those of the sum.
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    core = u.T @ (np.asarray(found["matrix"]) - start["matrix"]) @ v.T
    np.testing.assert_allclose(core, core[0, 0] * np.eye(3), atol=1e-10)


def test_iso_c_leaves_directions_without_change_alone(x64):
    """Of rank one, and of no change at all: the null space has no directions of its own."""
    left, right = np.array([3.0, 4.0, 0.0]), np.array([0.6, 0.8])
    change = {"w": np.outer(left, right)[None]}
    start = {"w": np.ones((3, 2))}
    found = merge(algorithms.iso_c(), start, params_of(start, change), None)
    np.testing.assert_allclose(found["w"], start["w"] + change["w"][0], atol=1e-12)
    found = merge(algorithms.iso_c(), start, params_of(start, {"w": np.zeros((1, 3, 2))}), None)
    np.testing.assert_array_equal(found["w"], start["w"])


def drop(key, start, changes, **options):
    models = jax.tree.map(lambda w, t: w + t, start, changes)
    federation = fj.clients.federation((np.eye(4), np.zeros(4)), [[0], [1], [2], [3]])
    method = algorithms.dare(**options)
    trained = fj.training.Trained(models, start)
    return method, merging.summarize(method, trained, federation, key=key)


def test_dare_rescales_what_it_keeps_and_its_mean_is_the_average(x64):
    source = np.random.default_rng(0)
    start, changes = {"w": source.normal(size=3)}, {"w": source.normal(size=(4, 3))}
    # As many draws as columns: entries of one leaf are drawn independently.
    many = {"w": np.repeat(changes["w"], 4000, axis=1)}
    wide = {"w": np.repeat(start["w"], 4000)}
    method, sent = drop(jax.random.key(0), wide, many, drop=0.75)
    ratio = np.asarray(sent.values["change"]["w"]) / many["w"]
    kept = ratio != 0
    np.testing.assert_allclose(ratio[kept], 4, rtol=1e-9)
    assert abs(kept.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / kept.size)
    found = np.asarray(merge(method, wide, sent)["w"]).reshape(3, 4000)
    mean = start["w"] + np.tensordot(SHARES, changes["w"], 1)
    # The variance of m / (1 - drop) is drop / (1 - drop) = 3.
    error = np.sqrt(3 * np.tensordot(SHARES**2, changes["w"] ** 2, 1) / 4000)
    assert np.all(np.abs(found.mean(1) - mean) < 5 * error)
    assert not np.array_equal(ratio[0] != 0, ratio[1] != 0)


def test_dare_without_drops_is_the_average_or_task_arithmetic(world):
    start, changes = world
    for scaling, other in (
        (None, algorithms.fedavg()),
        (0.4, algorithms.task_arithmetic(scaling=0.4)),
    ):
        method, sent = drop(jax.random.key(0), start, changes, drop=0.0, scaling=scaling)
        assert_close(merge(method, start, sent), merge(other, start, params_of(*world)))


def test_dare_does_not_hide_a_client_that_diverged():
    changes = {"w": np.ones((4, 50), "float32")}
    changes["w"][2, 7] = np.nan
    method, sent = drop(jax.random.key(0), {"w": np.zeros(50, "float32")}, changes, drop=0.99)
    with pytest.raises(ValueError, match="client 2"):
        merge(method, {"w": np.zeros(50, "float32")}, sent, None)
    with pytest.raises(ValueError, match=r"DARE drops entries .* which is unknown"):
        method.summarize(jax.random.key(0), fj.training.Trained({"w": jnp.ones(2)}), None, ())


@pytest.mark.parametrize("name", ["task_arithmetic", "iso_c"])
def test_files_are_merged_with_the_start(world, name, tmp_path):
    start, sent, paths = world[0], params_of(*world), []
    for client in range(4):
        paths.append(tmp_path / f"{client}.safetensors")
        one = jax.tree.map(lambda x, client=client: x[client], sent)
        fj.files.save_update(paths[-1], one, client=str(client), algorithm=name, examples=1)
    given = tmp_path / "merged.safetensors", paths
    with pytest.raises(ValueError, match=r"reads the model that clients started from.*--start"):
        fj.files.merge_files(*given, weights=WEIGHTS)
    fj.files.merge_files(*given, weights=WEIGHTS, start=start)
    found = fj.files.load_arrays(given[0])
    assert_close(found, merge(algorithms.make(name, None), start, sent))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dare", {"drop": 1.0}, "drop is 1"),
        ("dare", {"drop": -0.1}, "drop is -0.1"),
        ("dare", {"scaling": float("nan")}, "scaling is nan"),
        ("task_arithmetic", {"scaling": -1.0}, "scaling is -1"),
        ("iso_c", {"scaling": float("inf")}, "scaling is inf"),
    ],
)
def test_options_are_in_range(name, options, words):
    with pytest.raises(ValueError, match=words):
        algorithms.make(name, None, **options)
