"""Rounds whose clients are read from disk: those of data in memory, and what may go wrong."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj

KEY = jax.random.key(5)
SIZES = [4, 6, 3, 6, 5, 0]


def linear(params, x):
    return x @ params["w"] + params["b"]


MODEL = fj.Model(linear, fj.likelihoods.categorical)
START = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
OPTIMIZER = optax.sgd(0.1)


def clients_of(sizes=SIZES):
    random = np.random.default_rng(0)
    return [
        (random.normal(size=(n, 3)).astype(np.float32), random.integers(0, 2, n).astype(np.int32))
        for n in sizes
    ]


def source_of(pairs, gone=()):
    """Return clients that are read from memory; the file of some is gone."""

    def read(client, most=None, seed=None):
        if client in gone:
            raise FileNotFoundError(f"the file of client {client} does not exist")
        return jax.tree.map(lambda x: x[:most], pairs[client])

    return fj.datasets.ByClient(np.array([len(y) for _, y in pairs]), "client {}".format, read)


def experiment(algorithm=None, cohort=3, availability=None):
    algorithm = fj.algorithms.fedavg() if algorithm is None else algorithm
    how = {"cohort": cohort, "optimizer": OPTIMIZER, "epochs": 2, "batch_size": 4}
    return fj.rounds.federated(MODEL, algorithm, availability=availability, **how)


def streamed(source, rounds=4, state=None, most=6, devices=None, **how):
    own = experiment(**how)
    state = own.init(START, source.num_clients) if state is None else state
    how = {"key": KEY, "rounds": rounds, "most": most, "devices": devices}
    return fj.rounds.run_stream(own, state, source, **how)


@pytest.mark.long
@pytest.mark.parametrize("method", [None, fj.algorithms.fedfish(MODEL)], ids=["fedavg", "fedfish"])
def test_rounds_are_those_of_the_data_in_memory(method):
    pairs = clients_of([4, 6, 3, 6, 5])
    own = experiment(method)
    state = own.init(START, 5)
    whole = fj.rounds.run(own, state, fj.clients.federation(pairs), key=KEY, rounds=4)
    for (state, done), (other, its) in zip(
        whole, streamed(source_of(pairs), algorithm=method), strict=True
    ):
        np.testing.assert_array_equal(done.cohort, its.cohort)
        jax.tree.map(np.testing.assert_array_equal, state, other)
        assert done.number == its.number


@pytest.mark.long
def test_rounds_of_files_are_those_of_the_data_in_memory(tmp_path):
    pages = [(f"{client}.org", "ab" * (3 + client + k)) for client in range(5) for k in range(3)]
    fj.datasets.group(pages, tmp_path, shards=2)
    decoded = fj.datasets.texts(tmp_path, context=3)
    pairs = [decoded.read(k) for k in range(5)]
    pairs = [(x.astype(np.float32), (y[:, 0] == 97).astype(np.int32)) for x, y in pairs]

    def read(client, most=None, seed=None):
        inputs, targets = decoded.read(client, most, seed)
        return inputs.astype(np.float32), (targets[:, 0] == 97).astype(np.int32)

    source = decoded._replace(read=read)
    own = experiment()
    how = {"key": KEY, "rounds": 3}
    state = own.init(START, 5)
    whole = fj.rounds.run(own, state, fj.clients.federation(pairs), **how)
    most = max(len(y) for _, y in pairs)
    for (one, _), (other, _) in zip(whole, streamed(source, rounds=3, most=most), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
from tests import test_stream as law
source = law.source_of(law.clients_of())
ends = []
for devices in (None, jax.devices()):
    *_, (state, done) = law.streamed(source, rounds=2, cohort=4, devices=devices)
    ends.append(state.params)
assert len(jax.devices()) == 2
jax.tree.map(lambda x, y: np.testing.assert_allclose(y, x, rtol=2e-5, atol=1e-6), *ends)
"""


@pytest.mark.long
def test_a_cohort_on_two_devices_gives_the_rounds_of_one():
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", DEVICES], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_all_rounds_share_a_program(caplog):
    """Cohorts with other numbers of examples have arrays of the same shapes."""
    pairs = clients_of([1, 2, 3, 4, 5, 6, 7, 8])
    with jax.log_compiles():
        list(streamed(source_of(pairs), rounds=6, most=7))
    compiled = [line for line in caplog.messages if "XLA compilation of jit(_whole_round" in line]
    compiled += [line for line in caplog.messages if "XLA compilation of jit(whole_round" in line]
    assert len(compiled) == 1


@pytest.mark.long
def test_a_client_without_examples_is_named_and_has_no_influence():
    pairs = clients_of()
    with pytest.warns(UserWarning, match=r"round 0: clients without an example: \['client 5'\]"):
        [(state, _)] = streamed(source_of(pairs), rounds=1, cohort=6)
    [(other, _)] = streamed(source_of(pairs[:5]), rounds=1, cohort=5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state, other)


@pytest.mark.long
def test_a_run_whose_file_vanished_continues_from_its_last_state():
    pairs = clients_of(SIZES[:5])
    uninterrupted = list(streamed(source_of(pairs), rounds=6))
    cohorts = [set(done.cohort.tolist()) for _, done in uninterrupted]
    lost = min(set.union(*cohorts) - cohorts[0])
    number = next(k for k, cohort in enumerate(cohorts) if lost in cohort)
    going = streamed(source_of(pairs, {lost}), rounds=6)
    *_, (last, _) = [next(going) for _ in range(number)]
    with pytest.raises(FileNotFoundError, match=f"client {lost} does not exist"):
        next(going)
    rest = list(streamed(source_of(pairs), rounds=6 - number, state=last))
    assert [done.number for _, done in rest] == list(range(number, 6))
    jax.tree.map(np.testing.assert_array_equal, rest[-1][0], uninterrupted[-1][0])


def test_a_cap_draws_other_examples_in_every_round():
    seen = []

    def read(client, most=None, seed=None):
        seen.append((client, most, tuple(seed)))
        return jax.tree.map(lambda x: x[:most], pairs[client])

    pairs = clients_of([6, 6])
    source = fj.datasets.ByClient(np.array([6, 6]), str, read)
    list(streamed(source, rounds=2, cohort=2, most=4))
    list(streamed(source, rounds=2, cohort=2, most=4))
    seen, again = seen[2:6], seen[8:]  # the first read of each call checks the arguments
    assert seen == again
    assert len(set(seen)) == 4
    assert {most for _, most, _ in seen} == {4}


def test_the_examples_of_a_round_are_read_again_with_its_key():
    seen = []

    def read(client, most=None, seed=None):
        seen.append((client, most, tuple(seed)))
        return jax.tree.map(lambda x: x[:most], pairs[client])

    pairs = clients_of([6, 6, 6])
    source = fj.datasets.ByClient(np.array([6, 6, 6]), str, read)
    [*_, (_, done)] = streamed(source, rounds=2, cohort=2, most=4)
    key = jax.random.fold_in(KEY, done.number)
    again = fj.rounds.read_cohort(source, done.cohort, most=4, key=key)
    assert seen[-2:] == seen[-4:-2]
    assert again.ids.tolist() == done.cohort.tolist()
    assert again.inputs.shape == (8, 3)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"cohort": 7}, "cohort is 7, but the source has 6 clients"),
        ({"most": 0}, "most"),
        ({"rounds": 0}, "rounds"),
        ({"availability": lambda _: jnp.ones(6)}, "has an availability; expected none"),
        ({"algorithm": fj.algorithms.scaffold()}, "keeps .* for each of the 6 clients"),
    ],
)
def test_what_cannot_run_is_refused_by_the_call(how, words):
    with pytest.raises(ValueError, match=words):
        streamed(source_of(clients_of()), **how)


def test_a_source_that_reads_more_than_it_is_asked_for_is_named():
    source = source_of(clients_of())
    greedy = source._replace(read=lambda client, most, seed: source.read(client))
    with pytest.raises(ValueError, match=r"returned \d examples of client 'client \d'; .* most 2"):
        streamed(greedy, most=2, cohort=6)


def test_targets_of_a_later_cohort_that_do_not_fit_name_their_client():
    pairs = clients_of(SIZES[:5])
    cohorts = [set(done.cohort.tolist()) for _, done in streamed(source_of(pairs))]
    new = min(set.union(*cohorts) - cohorts[0])
    inputs, targets = pairs[new]
    pairs[new] = inputs, targets + 2
    with pytest.raises(ValueError, match=f"^Client 'client {new}': .*between 0 and 1"):
        list(streamed(source_of(pairs)))


def test_a_federation_is_no_source():
    federation = fj.clients.federation(clients_of())
    with pytest.raises(TypeError, match="source"):
        streamed(federation)
