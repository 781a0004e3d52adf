"""Rounds over Flower are those of simulation, for the same algorithm object and the same key."""

import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, compression
from tests.flower.conftest import CLIENTS, MODEL, SIZE, distance, simulated

DIAGONAL = algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal)
EXACT = fj.solvers.conjugate_gradients(tolerance=1e-6)
PACKED = compression.compose(compression.differences(), compression.quantized(8))
ALGORITHMS = {
    "fedavg": algorithms.fedavg(),
    "kfac": algorithms.fedfisher(MODEL),
    "diagonal": DIAGONAL,
    # Damped well: how far the solver of an ill-conditioned system goes depends on the last bits.
    "full": algorithms.fedfisher(MODEL, fisher=fj.fisher.full, damping=10.0, solver=EXACT),
    "sequential": algorithms.fedfisher_sequential(MODEL),
    "fedlpa": algorithms.fedlpa(MODEL),
    "fedfish": algorithms.fedfish(MODEL, batch_size=SIZE),
    "scaffold": algorithms.scaffold(),
    "fedper": algorithms.fedper("second"),
    "personal": algorithms.weighted_fedavg(MODEL),
    "server_adam": algorithms.with_server_optimizer(algorithms.fedavg(), optax.adam(0.01)),
    "compressed": compression.compressed(algorithms.fedfisher(MODEL), PACKED),
    "stream": compression.compressed(DIAGONAL, compression.water_filling(0.5)),
    "local_leaves": algorithms.keep_local(DIAGONAL, frozenset(["second/kernel"])),
}
QUICK = ("fedavg", "kfac")


def tolerance(algorithm, otherwise):
    """Return how far models may differ: a number that is rounded otherwise moves by a code."""
    return 1e-3 if "8 bits" in algorithm.kind else otherwise


EVERY = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ALGORITHMS
]


@pytest.mark.parametrize("name", EVERY)
def test_a_round_of_one_step_is_that_of_simulation(world, over_flower, name):
    found = over_flower(world, ALGORITHMS[name]).state
    assert found.accepted.tolist() == [0] * CLIENTS
    expected = simulated(world, ALGORITHMS[name])
    assert distance(found.params, expected.params) < tolerance(ALGORITHMS[name], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_three_rounds_of_several_steps_are_those_of_simulation(world, over_flower, name):
    how = {"rounds": 3, "epochs": 2, "batch_size": 4}
    found = over_flower(world, ALGORITHMS[name], **how).state
    expected = simulated(world, ALGORITHMS[name], **how)
    print(f"{name}: {distance(found.params, expected.params):.1e}")
    assert distance(found.params, expected.params) < tolerance(ALGORITHMS[name], 1e-5)
    # The state of the server too, such as SCAFFOLD's control.
    assert distance((found.algorithm, 0.0), (expected.algorithm, 0.0)) < 1e-5
