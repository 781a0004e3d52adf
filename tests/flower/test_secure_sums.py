"""Secure sums over Flower: what they merge, who may drop out, and what clients refuse."""

import os
from functools import partial

import jax
import numpy as np
import pytest
from tests.flower.conftest import CLIENTS, SIZE, distance, simulated, warned

import fisherjax as fj

pytest.importorskip("cryptography", reason="needs the extra secure")
METHODS = {
    "fedavg": fj.algorithms.fedavg(),
}


@pytest.mark.parametrize("signed", [False, True])
def test_x(world, over_flower, flower, tmp_path, signed):
    secure = flower.Secure(bound=100.0, most_examples=SIZE)
    own = secure
    if signed:
        signing = [os.urandom(32) for _ in range(CLIENTS)]
        verifiers = tuple(map(fj.secure_aggregation.keys.verifier, signing))
        secure = secure._replace(verifiers=verifiers)
        own = lambda c: secure._replace(signing=signing[c.node_config["partition-id"]])
    found = over_flower(world, METHODS["fedavg"], 2, secure=secure, client={"secure": own, "folder": tmp_path})
    expected = over_flower(world, METHODS["fedavg"], 2)
    print(found._left_out)
    assert distance(found.state.params, expected.state.params) < 1e-6
