"""Secure sums over Flower: what they merge, who may drop out, and what each side refuses."""

import jax
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms
from tests.flower.conftest import (
    CLIENTS,
    KEY,
    MODEL,
    SGD,
    STAGES,
    distance,
    signed,
    stage_of,
    warned,
)

pytest.importorskip("cryptography", reason="needs the extra secure")
HEAD = algorithms.analytic_head(MODEL)
METHODS = {
    "fedavg": algorithms.fedavg(),
    "diagonal": algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal),
    "scaffold": algorithms.scaffold(),
}


@pytest.mark.parametrize("is_signed", [False, True], ids=["honest", "signed"])
@pytest.mark.parametrize("name", METHODS)
def test_a_secure_sum_is_the_open_one_to_fixed_point(runs, terms, name, is_signed):
    server, own = signed(terms, 4) if is_signed else (terms, terms)
    found, reports = runs(METHODS[name], 4, secure=server, own=own, rounds=2)
    expected, _ = runs(METHODS[name], 4, rounds=2)
    assert distance(found.params, expected.params) < 2e-6
    assert jax.tree.leaves(expected.algorithm) == [] or name == "scaffold"
    assert distance(found.algorithm or [0.0], expected.algorithm or [0.0]) < 2e-6
    assert [report.clients for report in reports] == [(0, 1, 2, 3)] * 2
    assert np.isnan([report.loss for report in reports]).all()


def test_a_head_by_an_exchange_is_that_of_open_sums(runs, terms):
    how = {"exchanges": [HEAD]}
    found, _ = runs(METHODS["fedavg"], 3, secure=terms, **how)
    expected, _ = runs(METHODS["fedavg"], 3, **how)
    plain, _ = runs(METHODS["fedavg"], 3)
    assert distance(found.params, expected.params) < 1e-5 < distance(plain.params, found.params)


@pytest.mark.parametrize("stage", STAGES)
def test_three_of_ten_clients_drop_out_at_a_stage(runs, terms, stage):
    lost = {1, 4, 8}

    def change(app, stage=stage):
        def answer(message, context):
            if context.node_config["partition-id"] in lost and stage_of(message) == stage:
                raise RuntimeError("gone")
            return app(message, context)

        return answer

    server, own = signed(terms, 10)
    with warned("Client 4 is left out of round 0: .*gone"):
        found, [report] = runs(METHODS["fedavg"], 10, secure=server, own=own, change=change)
    # Whose vector has arrived is in the sum, even if the client drops out after that.
    kept = STAGES.index(stage) > STAGES.index("mask")
    assert report.clients == tuple(x for x in range(10) if kept or x not in lost)
    assert report.left_out.keys() == lost
    everybody, _ = runs(METHODS["fedavg"], 10)
    with warned("Client 4 is left out"):
        others, _ = runs(METHODS["fedavg"], 10, change=lambda app: change(app, "train"))
    assert distance(found.params, (everybody if kept else others).params) < 1e-6
    assert distance(everybody.params, others.params) > 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_more_than_the_threshold_allows_changes_nothing(runs, terms, stage):
    def change(app):
        def answer(message, context):
            if context.node_config["partition-id"] == 2 and stage_of(message) == stage:
                raise RuntimeError("gone")
            return app(message, context)

        return answer

    server, own = signed(terms, 3)
    with warned("fewer than the threshold 3"), pytest.raises(RuntimeError, match="threshold 3"):
        runs(METHODS["fedavg"], 3, secure=server, own=own, change=change)


def test_the_masked_reply_tells_no_more_than_the_masked_vector(runs, terms):
    seen = []

    def change(app):
        def answer(message, context):
            reply = app(message, context)
            seen.append((stage_of(message), dict(reply.content["fisherjax"])))
            return reply

        return answer

    runs(METHODS["fedavg"], 3, secure=terms, change=change)
    assert {name for stage, about in seen if stage == "mask" for name in about} == {
        *("answer", "stage", "version", "format"),
    }
    assert "query.hello" in {stage for stage, _ in seen}


def test_a_client_takes_part_only_as_its_own_terms_say(runs, terms):
    for server, own, text in [
        (terms, terms._replace(least=4), r"expected at least 4 different ones"),
        (terms, terms._replace(bound=1.0), "another encoding"),
        (terms, terms._replace(bits=32), "another view|setting|encoding"),
        (terms, signed(terms, 3)[1], "not signed|another view|setting|changed"),
        (signed(terms, 3)[0], terms, "not signed|another view"),
        (signed(terms, 3)[0], signed(terms, 3)[1], "not signed|another view"),
    ]:
        with warned(text), pytest.raises(RuntimeError, match="No round of 1"):
            runs(METHODS["fedavg"], 3, secure=server, own=own)


def test_only_one_side_with_terms_is_refused(runs, terms, world, flower):
    average = METHODS["fedavg"]
    with warned("The server adds up secure sums"), pytest.raises(RuntimeError, match="No round"):
        runs(average, 3, secure=terms, own=None)
    with warned("asks for an open upload"), pytest.raises(RuntimeError, match="No round"):
        runs(average, 3, own=terms)


def test_what_cannot_be_secure_is_refused_at_once(world, flower, terms):
    kfac = algorithms.fedfisher(MODEL)
    how = {"example": world.example, "num_clients": CLIENTS, "key": KEY}
    with pytest.raises(ValueError, match=r"its reduce is None.*fedfisher_sketched"):
        flower.strategy(kfac, MODEL, world.params, **how, secure=terms)
    with pytest.raises(ValueError, match="its reduce is None"):
        flower.client_app(kfac, MODEL, SGD, world.load, params=world.params, secure=terms)
    average = METHODS["fedavg"]
    with pytest.raises(ValueError, match=r"secure\.least"):
        flower.strategy(average, MODEL, world.params, **how, secure=terms._replace(least=4))
    for wrong, text in [
        ({"bound": 0.0}, "bound"),
        ({"most_examples": -1}, "most_examples"),
        ({"bits": 16}, "bits"),
        ({"least": 1}, "least"),
    ]:
        with pytest.raises(ValueError, match=text):
            flower.strategy(average, MODEL, world.params, **how, secure=terms._replace(**wrong))
    with pytest.raises(ValueError, match="2 verifiers for 3 clients"):
        flower.strategy(average, MODEL, world.params, **how, secure=signed(terms, 2)[0])
    with pytest.raises(TypeError, match=r"flower\.Secure"):
        flower.strategy(average, MODEL, world.params, **how, secure=True)


def test_a_term_beyond_the_bound_is_left_out_and_the_server_is_not_told_by_how_much(runs, terms):
    small = terms._replace(bound=1e-3)
    texts = "beyond the agreed bound 0.001", "exceeds the agreed bound or is not finite"
    with warned(*texts), pytest.raises(RuntimeError, match="No round of 1") as found:
        runs(METHODS["fedavg"], 3, secure=small)
    assert "an entry of" not in str(found.value)


def test_a_new_process_in_the_middle_of_a_sum_takes_no_further_part(runs, terms):
    def change(app):
        def answer(message, context):
            if context.node_config["partition-id"] == 1 and stage_of(message) == "mask":
                context.state.clear()
            return app(message, context)

        return answer

    with warned("Client 1 is left out of round 0: .*started anew"):
        _, [report] = runs(METHODS["fedavg"], 4, secure=terms, change=change)
    assert report.clients == (0, 2, 3)


def test_flowers_own_loop_adds_up_secure_sums(world, flower, terms):
    app = flower.client_app(
        METHODS["fedavg"], MODEL, SGD, world.load, params=world.params, secure=terms
    )
    how = {"example": world.example, "num_clients": CLIENTS, "key": KEY}
    server = flower.strategy(METHODS["fedavg"], MODEL, world.params, **how, secure=terms)
    server.start(flower.InProcess(app, CLIENTS), num_rounds=2)
    open_app = flower.client_app(METHODS["fedavg"], MODEL, SGD, world.load, params=world.params)
    other = flower.strategy(METHODS["fedavg"], MODEL, world.params, **how)
    other.run(flower.InProcess(open_app, CLIENTS), 2)
    assert server.state.number == 2
    assert distance(server.state.params, other.state.params) < 1e-6
