"""Where the noise's keys come from, who warns of a small one, and that none comes twice."""

import itertools
import secrets
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import merging, privacy
from fisherjax.algorithms import Update
from fisherjax.privacy import keys

PRIVATE = privacy.private(fj.algorithms.fedavg(), clip=1.0, noise_multiplier=1.0)
VALUES = {"params": np.zeros((2, 3), np.float32)}
START = np.zeros(3, np.float32)
SMALL = jax.random.key(5)
SYSTEM = privacy.system_key()
MODEL = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
DATA = (np.eye(3, dtype=np.float32), np.zeros((3, 1), np.float32))
FEDERATION = fj.clients.federation(DATA, [[0, 1], [2]])
HOW = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 1}


def merge(key, state=None, method=PRIVATE):
    return merging.merge(method, START, Update(VALUES, method.kind), key=key, state=state)


@pytest.mark.parametrize(("generator", "size"), [("threefry2x32", 8), ("rbg", 16)])
def test_all_bits_of_a_system_key_are_the_systems(monkeypatch, generator, size):
    drawn = bytes(range(1, size + 1))
    asked = []
    monkeypatch.setattr(secrets, "token_bytes", lambda n: asked.append(n) or drawn)
    with jax.default_prng_impl(generator):
        key = privacy.system_key()
        assert key.dtype == jax.random.key(0).dtype
        assert np.asarray(jax.random.key_data(key)).tobytes() == drawn
    assert asked == [size]


def test_system_keys_differ_and_draw():
    one, other = privacy.system_key(), privacy.system_key()
    assert one != other
    assert jax.random.normal(one) != jax.random.normal(other)


def merge_stream(key):
    merging.merge_stream(PRIVATE, START, [(Update(VALUES, PRIVATE.kind), None)], key=key)


def merge_sums(key):
    sums = PRIVATE.reduce(VALUES, np.ones(2))
    merging.merge_sums(PRIVATE, START, sums, jnp.arange(2), key=key)


def run_rounds(key):
    """Only check, which comes before the first round."""
    experiment = fj.rounds.federated(MODEL, PRIVATE, cohort=1, **HOW)
    state = experiment.init(np.zeros((3, 1), np.float32), 2)
    fj.rounds.run(experiment, state, FEDERATION, key=key, rounds=1)


def train_by_dp_sgd(key):
    model = privacy.dp_sgd(MODEL, clip=1.0, noise_multiplier=1.0)
    optimizer = HOW["optimizer"]
    fj.training.check(model, np.zeros((3, 1), np.float32), FEDERATION, key, optimizer, 1, 1)


BORDERS = [merge, merge_stream, merge_sums, run_rounds, train_by_dp_sgd]


@pytest.mark.parametrize("border", BORDERS)
def test_a_key_made_from_a_number_is_warned_of_where_it_enters(border):
    for key in (SMALL, jax.random.key(2**32 + 5)):
        with pytest.warns(UserWarning, match=r"made from a number.*fisherjax.privacy.system_key"):
            border(key)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        border(SYSTEM)
        border(jax.random.split(SMALL)[0])


def test_keys_of_every_generator_are_looked_at():
    with jax.default_prng_impl("rbg"), warnings.catch_warnings():
        warnings.simplefilter("error")
        train_by_dp_sgd(privacy.system_key())
        with pytest.raises(UserWarning, match="made from a number"):
            train_by_dp_sgd(jax.random.key(5))


def test_nobody_is_warned_where_nothing_is_secret_or_inside_a_program():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "This key")
        average = fj.algorithms.fedavg()
        merging.merge(average, START, Update(VALUES, average.kind), key=SMALL)
        jax.eval_shape(lambda key: merge(key)[0], SMALL)


def test_a_second_release_with_a_key_is_refused():
    """One difference of the two would be one client's change, exactly."""
    keys_ = [privacy.system_key() for _ in range(3)]
    state, ledgers = None, []
    for key in keys_:
        _, state, ledger = merge(key, state)
        ledgers.append(ledger)
    assert int(ledgers[-1].rounds) == 3
    for key in keys_:
        with pytest.raises(
            ValueError, match=r"has made the noise of an earlier release.*system_key"
        ):
            merge(key, state)


def test_releases_of_one_key_in_two_ledgers_are_refused():
    """Whichever chains of merges they belong to, and however many releases came between."""
    first, second = privacy.system_key(), privacy.system_key()
    _, state, one = merge(first)
    _, _, both = merge(second, state)
    other = merge(
        first, method=privacy.private(fj.algorithms.fedavg(), clip=2.0, noise_multiplier=3.0)
    )[2]
    assert privacy.epsilon(merge(second)[2], other, delta=1e-5) > 0
    for ledgers in ((one, other), (both, other), (one, one), (one, both)):
        with pytest.raises(ValueError, match="One key made the noise of two releases"):
            privacy.epsilon(*ledgers, delta=1e-5)


@pytest.mark.long
def test_runs_of_rounds_with_one_key_are_refused_together():
    """Inside compiled rounds nothing can be refused; their ledgers tell."""
    experiment = fj.rounds.federated(MODEL, PRIVATE, cohort=2, **HOW)
    start = experiment.init(np.zeros((3, 1), np.float32), 2)
    last = []
    for key, rounds in ((SYSTEM, 2), (SYSTEM, 1), (privacy.system_key(), 2)):
        *_, (_, done) = fj.rounds.run(experiment, start, FEDERATION, key=key, rounds=rounds)
        last.append(done.info)
    assert privacy.epsilon(last[0], last[2], delta=1e-5) > privacy.epsilon(last[0], delta=1e-5)
    for pair in ((last[0], last[1]), (last[1], last[1])):
        with pytest.raises(ValueError, match="One key made the noise"):
            privacy.epsilon(*pair, delta=1e-5)


def test_neither_a_ledger_nor_a_state_holds_the_key():
    key = privacy.system_key()
    _, state, ledger = merge(key)
    # The key of the merge, and those that are folded and split from it.
    own = keys_of(key, 3)
    for leaf in jax.tree.leaves((state, ledger)):
        words = np.asarray(leaf).ravel()
        assert not set(words.tolist()) & own or words.dtype != np.uint32


def keys_of(key, depth):
    """Return the words of a key, and of those that folding and splitting it make."""
    found = set(np.asarray(jax.random.key_data(key)).tolist())
    if depth:
        children = [jax.random.fold_in(key, fj.clients.AGGREGATE), *jax.random.split(key)]
        found |= set(itertools.chain.from_iterable(keys_of(child, depth - 1) for child in children))
    return found - {0}


def test_the_latest_keys_are_kept():
    prints = keys.no_fingerprints()
    for number, seed in enumerate((1, 2, 3)):
        prints = keys.record(jax.random.key(seed), prints, jnp.asarray(number + keys.KEPT - 1))
    # The first of the three went to the last place, the others to the first two.
    used = np.flatnonzero(np.asarray(prints).any(1))
    assert used.tolist() == [0, 1, keys.KEPT - 1]
    with pytest.raises(ValueError, match="earlier release"):
        keys.record(jax.random.key(1), prints, jnp.asarray(3))
    assert len(np.unique(np.asarray(prints)[used], axis=0)) == 3
