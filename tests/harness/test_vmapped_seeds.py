"""The seeds of a split in one program: what comes out is what comes out one by one."""

import dataclasses

import numpy as np
import pytest

from experiments.harness import one_round, tasks
from experiments.harness.config import Data, Merging, OneShot, Training
from experiments.harness.names import sends_full_matrices
from experiments.harness.records import Row
from experiments.one_shot import vmapped_seeds
from tests.methods import MERGED

SMALL = OneShot(
    Data(num_clients=3, alpha=1.0),
    Training(learning_rate=0.1, momentum=0.0, batch_size=64),
    Merging(("fedavg", "fedprox", "fedfisher_sequential")),
    epochs=1,
    partition_seeds=(0, 1),
    seeds=(0, 1),
    exchanges=2,
    seeds_together=2,
)
UNITS = [(0, 0), (0, 1)]
ONE_EXAMPLE = 1 / 360  # of the test data


@pytest.fixture(scope="module")
def program() -> vmapped_seeds.Program:
    return vmapped_seeds.program(tasks.one_round(SMALL))


@pytest.fixture(scope="module")
def rows(program) -> list[Row]:
    return program.run(UNITS)


def nameless(rows: list[Row]) -> list[Row]:
    return [row._replace(seconds=None, value=0.0) for row in rows if row.metric == "accuracy"]


def assert_same(rows: list[Row], asked: OneShot) -> None:
    """Compare with what seeds give one by one."""
    task = tasks.one_round(asked)
    alone = [row for unit in UNITS for row in one_round.run(task, unit)]
    assert nameless(rows) == nameless(alone)
    expected = [row.value for row in alone if row.metric == "accuracy"]
    # Sums are in another order: an example on the edge may fall to the other side.
    np.testing.assert_allclose([row.value for row in rows], expected, atol=1.01 * ONE_EXAMPLE)


@pytest.mark.long
def test_seeds_together_are_seeds_one_by_one(rows):
    assert_same(rows, SMALL)
    different = {row.value for row in rows if row.algorithm == "fedfisher_sequential"}
    assert len(different) == len(UNITS)


@pytest.mark.slow
def test_every_method_of_the_registry_that_merges_is_part_of_a_program():
    """Full matrices are too large for digits; batched factorisations would wait for ever."""
    names = tuple(name for name in MERGED if not sends_full_matrices(name))
    merging = dataclasses.replace(SMALL.merging, algorithms=names)
    asked = dataclasses.replace(SMALL, merging=merging, exchanges=0, then_rounds=1)
    assert_same(vmapped_seeds.program(tasks.one_round(asked)).run(UNITS), asked)


@pytest.mark.long
def test_another_split_is_the_same_program(program, rows, compilations):
    with compilations() as count:
        others = program.run([(1, seed) for _, seed in UNITS])
    assert count() == 0
    assert nameless(others) == [row._replace(partition_seed=1) for row in nameless(rows)]


def test_units_of_a_split_are_together_and_the_ceilings_come_last():
    units = one_round.units(dataclasses.replace(SMALL, partition_seeds=(5, 3)))
    found = vmapped_seeds.groups(units)
    assert found == [[(3, 0), (3, 1)], [(5, 0), (5, 1)], [(None, 0), (None, 1)]]


def test_a_diverged_client_stops_the_seeds_and_names_the_first():
    fast = dataclasses.replace(SMALL.training, learning_rate=1e6)
    plain = dataclasses.replace(SMALL.merging, algorithms=("fedavg",))
    asked = dataclasses.replace(SMALL, training=fast, merging=plain, exchanges=0)
    with pytest.raises(ValueError, match=r"diverged with seed 0: .* \(now 1e\+06\)"):
        vmapped_seeds.program(tasks.one_round(asked)).run(UNITS)


def test_a_merge_that_is_not_finite_is_named_with_its_seed():
    row = Row("regmean", 0, 1, "test", "accuracy", 0.0)
    numbers = [(row, np.array([0.5, np.nan]))]
    with pytest.raises(ValueError, match="model of regmean is not finite with seed 1,"):
        vmapped_seeds.check(UNITS, numbers, np.ones((2, 1)), learning_rate=0.1)
    vmapped_seeds.check(UNITS[:1], numbers, np.ones((2, 1)), learning_rate=0.1)


@pytest.mark.parametrize("name", ["dense", "fedavg+dense", "pfnm", "fedov"])
def test_what_is_no_single_program_is_refused_by_name(name):
    merging = dataclasses.replace(SMALL.merging, algorithms=("fedavg", name))
    asked = dataclasses.replace(SMALL, merging=merging, exchanges=0)
    with pytest.raises(ValueError, match=rf"--algorithms {name.replace('+', '.')}, expected"):
        vmapped_seeds.program(tasks.one_round(asked))
