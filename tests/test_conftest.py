"""The fixtures keep their promises; a counter stuck at zero would let every other test pass."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

LAWS = """
import pytest
CASES = pytest.mark.parametrize("case", range(8))
@CASES
def test_fast(case): pass
@pytest.mark.long
@CASES
def test_many(case): pass
@pytest.mark.long(cases=4)
@CASES
def test_four(case): pass
@pytest.mark.long
def test_one(): pass
"""


def test_compilations_counts_a_first_call_and_not_a_second(compilations):
    function = jax.jit(lambda x: x * 3)
    inputs, wider = np.ones(3, np.float32), np.ones(4, np.float32)
    with compilations() as first:
        function(inputs)
    with compilations() as second:
        function(inputs)
    with compilations() as other_shape:
        function(wider)
    assert first() == 1
    assert second() == 0
    assert other_shape() == 1


def test_x64_gives_float64(x64):
    assert jnp.ones(()).dtype == jnp.float64


def test_float32_is_the_default_again():
    assert jnp.ones(()).dtype == jnp.float32


@pytest.mark.long
def test_of_a_law_that_long_tests_ask_of_many_cases_a_few_are_not_slow(tmp_path):
    file = tmp_path / "test_laws.py"
    file.write_text(LAWS)

    def found(marks):
        how = ("-p", "tests.conftest", "--collect-only", "-q", "-m", marks, str(file))
        root = Path(__file__).parents[1]
        words = [sys.executable, "-m", "pytest", *how]
        lines = subprocess.run(words, capture_output=True, text=True, cwd=root).stdout.splitlines()
        return [line.split("::")[1] for line in lines if "::" in line]

    [many, *four, one] = found("long and not slow")
    assert many in [f"test_many[{n}]" for n in range(8)]
    assert four in [[f"test_four[{n}]" for n in range(first, 8, 2)] for first in (0, 1)]
    assert one == "test_one"
    assert found("not long and not slow") == [f"test_fast[{n}]" for n in range(8)]
    assert len(found("")) == 25
