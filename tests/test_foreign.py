"""Compiled programs of networks that nobody here wrote equal eager ones: a cover of them.

`python -m tests.foreign` runs more. The cover is run by child processes, with one and with two
devices, and with all optimisations, whatever the tests around it are run with.
"""

import itertools
import os

import jax
import jax.numpy as jnp
import pytest

from tests.foreign import cells, processes, programs, tables, verify

SEED = 0
PAIRS = cells.cover(cells.product(), 2, SEED)
# What two cores do in one or two minutes; the first cells of a cover have the most pairs.
COVER = cells.drawn(cells.product(), 12, SEED)
# Compiling this much with all optimisations takes minutes: only where that is asked for.
IS_OPTIMISED = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0"


@pytest.fixture(scope="module")
def answers(request):
    """Run those cells of the cover that are selected."""
    wanted = {item.callspec.params["name"] for item in request.session.items if _is_cell(item)}
    chosen = [cell for cell in COVER if cell.name in wanted]
    return {answer.cell: answer for answer in processes.run(cells.ordered(chosen))}


def _is_cell(item):
    return getattr(item, "originalname", "") == "test_compiled_equals_eager"


@pytest.mark.long(cases=len(COVER))
@pytest.mark.skipif(not IS_OPTIMISED, reason="needs JAX_DISABLE_MOST_OPTIMIZATIONS=0")
@pytest.mark.parametrize("name", [cell.name for cell in COVER])
def test_compiled_equals_eager(name, answers):
    wrong = [finding for finding in answers[name].findings if not finding.is_right]
    if wrong and all(map(tables.is_expected, wrong)):
        pytest.xfail(tables.EXPECTED)
    assert not wrong


def test_each_pair_of_levels_that_exists_is_in_the_cover():
    every, covered = (
        {pair for cell in some for pair in itertools.combinations(enumerate(cell), 2)}
        for some in (cells.product(), PAIRS)
    )
    assert covered == every
    assert len(PAIRS) < 90


def test_the_same_seed_draws_the_same_cells():
    every = cells.product("*/plain/*")
    assert cells.drawn(every, 20, seed=1) == cells.drawn(every, 20, seed=1)
    assert cells.drawn(every, 20, seed=1) != cells.drawn(every, 20, seed=2)
    assert len(set(cells.drawn(every, 200, seed=1))) == 200


@pytest.mark.long
@pytest.mark.parametrize("program", ["outputs", "grad", "scan", "clients"])
def test_a_network_that_is_wrong_when_compiled_is_found(program, monkeypatch):
    cell = cells.named(f"linen/plain/mean/{program}/float32/3/1")
    assert all(finding.is_right for finding in verify.findings(cell))
    make = programs.case

    def faulty(cell):
        case = make(cell)
        layers = case.network.layers

        def wrong_if_compiled(params, x):
            *hidden, outputs = layers(params, x)
            return [*hidden, outputs * (1 + 1e-4 * is_compiled(x))]

        return case._replace(network=case.network._replace(layers=wrong_if_compiled))

    monkeypatch.setattr(programs, "case", faulty)
    assert any(not finding.is_right for finding in verify.findings(cell))


def is_compiled(x):
    """Whether a computation is being compiled as a whole: its own jit would be traced, too."""
    del x
    return not jax.config.jax_disable_jit


@pytest.mark.parametrize("wrong", [jnp.nan, jnp.inf, 1.1])
def test_numbers_that_differ_or_are_none_are_errors(wrong):
    right = {"a": jnp.ones(3), "b": jnp.zeros(2)}
    assert verify.error(right, right) == 0
    assert verify.error(right | {"a": jnp.array([1.0, 1.0, wrong])}, right) > 0.09
    assert verify.error(right | {"b": jnp.array([0.0, wrong])}, right) > 0.09
