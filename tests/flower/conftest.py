"""A small federation, over Flower within this process and in simulation."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj

# One size for all clients, so that they share programs; simulation pads nothing either.
CLIENTS, SIZE = 3, 8
KEY = jax.random.key(3)
STAGES = ("advertise", "share", "accept", "mask", "confirm", "unmask")
"""Stages of a secure sum whose messages are signed, at each of which clients send one."""


class World(NamedTuple):
    """Data of all clients, a network and its first params."""

    inputs: np.ndarray
    targets: np.ndarray
    model: fj.Model
    params: Any

    @property
    def federation(self):
        rows = np.arange(len(self.inputs)).reshape(CLIENTS, SIZE)
        return fj.clients.federation((self.inputs, self.targets), list(rows))

    @property
    def example(self):
        return self.inputs[:1], self.targets[:1]

    def load(self, context):
        rows = slice(SIZE * (place := context.node_config["partition-id"]), SIZE * (place + 1))
        return self.inputs[rows], self.targets[rows]


def network(params, x):
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden @ params["second"]["kernel"]


MODEL = fj.Model(network, fj.likelihoods.categorical)
SGD = optax.sgd(0.1)


def params_of(dtype="float32"):
    random = np.random.default_rng(1)
    first = {"kernel": random.normal(size=(5, 4)), "bias": np.zeros(4)}
    params = {"first": first, "second": {"kernel": random.normal(size=(4, 3))}}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), params)


@pytest.fixture(scope="session")
def world():
    random = np.random.default_rng(0)
    inputs = random.normal(size=(CLIENTS * SIZE, 5)).astype("float32")
    targets = random.integers(0, 3, len(inputs)).astype("int32")
    return World(inputs, targets, MODEL, params_of())


@pytest.fixture(scope="session")
def flower():
    """The module, which other machines lack."""
    pytest.importorskip("flwr", reason="needs the extra flower (make test-flower)")
    from fisherjax import flower

    return flower


@pytest.fixture(scope="session")
def over_flower(flower) -> Callable:
    """Run rounds over Flower, and return the strategy."""

    def run(world, algorithm, rounds=1, *, epochs=1, batch_size=SIZE, grid=None, **options):
        client = options.pop("client", {})
        how = {"params": world.params, "epochs": epochs, "batch_size": batch_size}
        app = flower.client_app(algorithm, world.model, SGD, world.load, **how, **client)
        own = {"example": world.example, "num_clients": CLIENTS, "key": KEY}
        server = flower.strategy(algorithm, world.model, world.params, **own | options)
        server.run((grid or flower.InProcess)(app, CLIENTS), rounds)
        return server

    return run


def simulated(world, algorithm, rounds=1, *, epochs=1, batch_size=SIZE, cohort=CLIENTS):
    """Run the same rounds in simulation, one client at a time, and return the state."""
    how = {"optimizer": SGD, "epochs": epochs, "batch_size": batch_size, "clients_per_chunk": 1}
    experiment = fj.rounds.federated(world.model, algorithm, cohort=cohort, **how)
    federation = world.federation
    state = experiment.init(world.params, federation)
    *_, (last, _) = fj.rounds.run(experiment, state, federation, key=KEY, rounds=rounds)
    return last


@contextlib.contextmanager
def warned(*patterns):
    """Expect warnings that match each of these patterns, and perhaps others."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    texts = [str(each.message) for each in found]
    for pattern in patterns:
        assert any(re.search(pattern, text, re.DOTALL) for text in texts), (pattern, texts)


def distance(one, other):
    """Return the largest difference between two models."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(jnp.abs(x - y).max()) for x, y in pairs)


@pytest.fixture(scope="session")
def terms(flower):
    """Terms of sums in which a client of SIZE examples weighs one."""
    return flower.Secure(bound=1000.0, most_examples=SIZE)


def signed(terms, number):
    """Return terms of signed sums for the server, and the function of the clients."""
    own = [os.urandom(32) for _ in range(number)]
    terms = terms._replace(verifiers=tuple(map(fj.secure_aggregation.keys.verifier, own)))
    return terms, lambda node: terms._replace(signing=own[node.node_config["partition-id"]])


def stage_of(message):
    about = message.content["fisherjax"]
    return about.get("stage", "mask" if "partners" in about else message.metadata.message_type)


@pytest.fixture
def runs(world, flower, tmp_path):
    """Run rounds with clients of unequal sizes, whose app a function may change."""

    def load(context):
        place = context.node_config["partition-id"]
        rows = np.arange(place, len(world.inputs), 4)[: 3 + place % 3]
        return world.inputs[rows], world.targets[rows]

    def run(algorithm, number, *, secure=None, own="same", change=lambda app: app, **more):
        rounds, own = more.pop("rounds", 1), secure if own == "same" else own
        how = {"params": world.params, "batch_size": SIZE, "folder": tmp_path / str(id(change))}
        how["exchanges"] = more.get("exchanges", ())
        client = flower.client_app(algorithm, MODEL, SGD, load, secure=own, **how)
        given = {"example": world.example, "num_clients": number, "key": KEY, "secure": secure}
        server = flower.strategy(algorithm, MODEL, world.params, **given, **more)
        reports = []
        grid = flower.InProcess(change(client), number)
        server.run(grid, rounds, lambda _, report: reports.append(report))
        return server.state, reports

    return run
