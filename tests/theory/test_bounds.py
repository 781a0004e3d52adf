"""FedFisher's theorem: the matrix of infinite width, and bounds that hold for what was trained."""

from functools import partial

import jax
import numpy as np
import pytest

from fisherjax import clients
from fisherjax.theory import bounds, laplace, two_layer

STEPS, RATE = 60, 0.1


@partial(jax.jit, static_argnums=(1, 2))
def run(key, num_examples, width):
    """Train two clients; return their data, models, H^inf and the account of three merges."""
    for_data, for_start = jax.random.split(key)
    federation = two_layer.draw(for_data, 2, num_examples)
    start = two_layer.initial(for_start, width)
    [models] = two_layer.descend(start, federation, [STEPS], RATE)
    quadratic = laplace.gram(models, federation)
    infinite = bounds.infinite_width(federation)
    merged = (
        laplace.optimum(quadratic),
        laplace.descent(quadratic, 1000, 0.5 / quadratic.eigenvalues[-1]),
        quadratic.mean,
    )
    judged = [
        (
            laplace.decompose(w, start, models, quadratic, federation),
            bounds.terms(w, start, models, federation, steps=STEPS, learning_rate=RATE),
        )
        for w in merged
    ]
    return federation.inputs, start, models, infinite, judged


@pytest.fixture(scope="module")
def wide_runs(wide):
    return [run(jax.random.key(seed), 3, 4096) for seed in range(4)]


def test_the_matrix_of_infinite_width_is_an_integral_over_directions(wide_runs):
    """A unit's weights count by their direction only, which is uniform on the circle."""
    turns = (np.arange(200_000) + 0.5) * 2 * np.pi / 200_000
    directions = np.stack([np.cos(turns), np.sin(turns)])
    for inputs, *_, infinite, _ in wide_runs:
        active = np.asarray(inputs) @ directions > 0
        both = active.astype(float) @ active.T / len(turns)
        assert np.allclose(infinite, (inputs @ inputs.T) * both, rtol=0, atol=2e-5)


def test_it_is_the_mean_of_gram_matrices_over_starts(wide_runs):
    found = []
    for inputs, start, _, infinite, _ in wide_runs:
        active = np.asarray(inputs @ start) > 0
        found.append((inputs @ inputs.T) * (active.astype(float) @ active.T) / 4096 - infinite)
    assert np.max(np.abs(found)) < 5 / 4096**0.5


def test_equal_and_opposite_inputs_have_their_limits(wide):
    x = np.array([[3.0, 4.0], [3.0, 4.0], [-3.0, -4.0], [0.0, 0.0]])
    federation = clients.federation((x, np.zeros((4, 1))), [range(2), range(2, 4)])
    expected = np.array([[12.5, 12.5, 0, 0], [12.5, 12.5, 0, 0], [0, 0, 12.5, 0], [0] * 4])
    assert np.allclose(bounds.infinite_width(federation), expected, atol=1e-12)


@pytest.mark.parametrize(("width", "seed"), [(16, 0), (16, 1), (256, 2), (256, 3)])
def test_the_radii_bound_the_error_of_the_approximation(wide, width, seed):
    *_, judged = run(jax.random.key(seed), 20, width)
    for found, allowed in judged:
        assert found.laplace <= allowed.laplace_term * (1 + 1e-9)
        assert np.isclose(found.furthest, allowed.r_0)


def test_clients_of_a_wide_network_are_as_near_and_as_good_as_lambda_0_says(wide_runs):
    for *_, infinite, judged in wide_runs:
        found, allowed = judged[0]
        smallest = np.linalg.eigvalsh(infinite)[0]
        assert smallest > 0
        assert np.isclose(allowed.lambda_0, smallest, rtol=1e-6)
        assert allowed.r_0 <= allowed.r_0_allowed
        assert found.local <= allowed.local_term


@pytest.mark.long
def test_the_bound_of_the_approximation_falls_with_the_width(wide):
    keys = [jax.random.key(seed) for seed in range(5)]
    medians = [
        np.median([run(key, 3, width)[-1][1][1].laplace_term for key in keys])
        for width in (64, 4096)
    ]
    assert medians[1] < medians[0] / 4


def test_refused():
    key = jax.random.key(0)
    federation, start = two_layer.draw(key, 2, 3), two_layer.initial(key, 4)
    how = {"steps": 1, "learning_rate": 0.1}
    with pytest.raises(ValueError, match=r"start has shape \(3, 4\)"):
        bounds.terms(start, np.ones((3, 4)), np.stack([start] * 2), federation, **how)
    with pytest.raises(ValueError, match="a leading axis of 2 clients"):
        bounds.terms(start, start, start[None], federation, **how)
