"""What a mask leaves out: no method moves it, nobody sends it, and the rest does not notice."""

import functools

import jax
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import compression, merging, rounds, tree
from tests.masked import (
    BESIDES,
    EVERY,
    EXCHANGES,
    FROZEN,
    HOW,
    OF_THE_HEAD,
    ONCE,
    REFUSE,
    SGD,
    SILENT,
    SIZES,
    assert_frozen,
    assert_same,
    federation,
    merged,
    method,
    model,
    network,
    of_trained,
    params,
    priced,
    start,
    summarized,
)
from tests.methods import laws

pytestmark = pytest.mark.usefixtures("wide")

HERE = [name for name in EVERY if name not in REFUSE | SILENT]


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(
            *name.values,
            where,
            # Where leaves lie is the same to every method: some stand for the rest.
            marks=pytest.mark.slow if where == "head" and name.values[0] in BESIDES else name.marks,
        )
        for name in priced(HERE, fast={"fedavg", "fednova", "regmean"})
        for where in FROZEN
    ],
)
def test_what_is_trained_is_as_if_the_rest_were_constants(name, where):
    if where == "head" and name in OF_THE_HEAD:
        pytest.skip("refused, see below")
    own, sent, (whole, *report) = merged(name, where, closed=False)
    expected_own, expected_sent, (expected, *expected_report) = merged(name, where, closed=True)
    assert_same(own._replace(start=None, frozen=None), expected_own._replace(start=None))
    assert_same(sent.values, expected_sent.values)
    assert compression.size(sent) == compression.size(expected_sent)
    assert sent.frozen == FROZEN[where]
    assert not sent.statistics
    assert_same(report, expected_report)
    # Of a vote each model.
    several = jax.tree.leaves(expected)[0].ndim > jax.tree.leaves(params(where, True))[0].ndim
    for one in [jax.tree.map(lambda x, i=i: x[i], whole) for i in range(3)] if several else [whole]:
        assert_frozen(one, where)
    assert_same(of_trained(whole, where), expected)


def played(name, where, closed, changed=lambda own: own):
    own = method(name, model(where, closed))
    how = {"cohort": 2, "optimizer": SGD, **HOW}
    experiment = rounds.federated(changed(model(where, closed)), own, **how)
    begin = experiment.init(params(where, closed), federation())
    key = jax.random.key(3)
    *_, (state, last) = rounds.run(experiment, begin, federation(), key=key, rounds=2)
    traffic = experiment.traffic(params(where, closed), federation())
    return state, last, experiment.models(state, len(SIZES)), traffic


@pytest.mark.parametrize(
    "name", priced([name for name in EVERY if name not in ONCE], seldom=BESIDES)
)
def test_rounds_too_are_as_if_the_rest_were_constants(name):
    state, last, models, traffic = played(name, "inner", closed=False)
    expected, expected_last, expected_models, expected_traffic = played(name, "inner", closed=True)
    assert_frozen(state.params, "inner")
    for client in range(len(SIZES)):
        assert_frozen(jax.tree.map(lambda x, i=client: x[i], models), "inner")
    assert traffic == expected_traffic
    for found, of_constants in ((state.params, expected.params), (models, expected_models)):
        assert_same(of_trained(found, "inner"), of_constants)
    assert_same(state[2:], expected[2:])
    assert_same((last.loss, last.info), (expected_last.loss, expected_last.info))


@pytest.mark.long
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_move_what_is_trained_only(name):
    def exchanged(closed):
        own = method(name, model("inner", closed))
        return merging.exchange(own, params("inner", closed), federation(), key=jax.random.key(4))

    found, expected = exchanged(False), exchanged(True)
    assert_frozen(found[0], "inner")
    assert_same(of_trained(found[0], "inner"), expected[0])
    assert_same(found[2], expected[2])
    assert np.any(np.asarray(found[0]["head"]["kernel"]) != start()["head"]["kernel"])


HEADS = [FROZEN["head"], ("head/bias",), ("head/kernel",)]
of_heads = pytest.mark.parametrize("frozen", HEADS, ids=lambda names: " and ".join(names))


def without(frozen):
    """The network whose mask leaves out some leaves."""
    mask = {
        layer: {leaf: f"{layer}/{leaf}" not in frozen for leaf in own}
        for layer, own in start().items()
    }
    return fj.Model(network, fj.likelihoods.categorical, mask=mask)


@pytest.mark.slow
@of_heads
@pytest.mark.parametrize("name", [name for name in EXCHANGES if name not in OF_THE_HEAD])
def test_exchanges_that_solve_for_no_frozen_head_move_the_rest(name, frozen):
    own = method(name, without(frozen))
    found, *_ = merging.exchange(own, start(), federation(), key=jax.random.key(4))
    before, after = map(tree.by_name, (start(), found))
    same = [n for n, x in after.items() if np.asarray(x).tobytes() == before[n].tobytes()]
    assert same == [*frozen]


@of_heads
@pytest.mark.parametrize("name", sorted(OF_THE_HEAD))
def test_what_needs_the_layer_of_the_outputs_names_what_is_frozen_of_it(name, frozen):
    own, key = method(name, without(frozen)), jax.random.key(4)
    # The kernel is told first.
    said = ".*".join(sorted(frozen, reverse=True))
    play = functools.partial(merging.summarize, own, [start()] * 3)
    if "exchange" in laws(name):
        play = functools.partial(merging.exchange, own, start())
    with pytest.raises(ValueError, match=f"mask leaves out .*{said}.*makes the outputs"):
        play(federation(), key=key)


@pytest.mark.parametrize("where", FROZEN)
@pytest.mark.parametrize("name", sorted(REFUSE))
def test_methods_that_move_units_name_what_cannot_follow(name, where):
    with pytest.raises(ValueError, match=str([*FROZEN[where]]).replace("[", r"\[")):
        summarized(name, where, closed=False)
