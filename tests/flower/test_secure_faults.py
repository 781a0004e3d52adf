"""Clients that lie in a secure sum: what is found, who is left out by name, and what goes on."""

import re

import numpy as np
import pytest

from fisherjax import algorithms
from fisherjax.secure_aggregation import messages, shares
from fisherjax.secure_aggregation._message_checks import tagged
from tests.flower.conftest import STAGES, distance, signed, stage_of, warned

pytest.importorskip("cryptography", reason="needs the extra secure")
AVERAGE = algorithms.fedavg()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", ["text", "place", "tag", "view", "other", "missing"])
def test_one_that_sends_garbage_is_left_out_by_name(runs, terms, stage, fault):
    def change(app):
        def answer(message, context):
            reply = app(message, context)
            if context.node_config["partition-id"] == 2 and stage_of(message) == stage:
                about = reply.content["fisherjax"]
                damage(about, fault)
            return reply

        return answer

    server, own = signed(terms, 4)
    with warned("Client 2 is left out of round 0"):
        found, [report] = runs(AVERAGE, 4, secure=server, own=own, change=change)
    assert 2 in report.left_out
    assert np.isfinite(found.params["first"]["kernel"]).all()


def damage(about, fault):
    text = about["answer"]
    if fault == "text":
        about["answer"] = "[" * 10_000
    elif fault == "missing":
        del about["answer"]
    elif fault == "other":
        about["stage"] = "hello"
    elif fault == "place":
        about["answer"] = text.replace('"client": 2', '"client": 1')
    else:
        found = re.search(rf'"{fault}": "(..)', text)
        first = "00" if found[1] != "00" else "01"
        about["answer"] = text[: found.start(1)] + first + text[found.end(1) :]


def with_wrong_shares(answer, signing):
    """Return the message of a client that changes one bit of each share, and signs that."""
    from fisherjax.flower import _secure

    message = _secure.read(messages.Shares, answer)
    wrong = {u: (int.from_bytes(x) ^ 1).to_bytes(shares.SIZE) for u, x in message.seeds.items()}
    return _secure.written(tagged(signing, message._replace(seeds=wrong)))


WRONG_SHARES = {  # number of clients, who sends wrong shares, who sends none
    "one of four": (4, {2}, set()),
    "one, and as many are silent as may be": (10, {2}, {0, 7}),
    "two of ten": (10, {2, 9}, set()),
}


@pytest.fixture
def with_liars(runs, terms):
    """Run a round of secure sums in which some clients send wrong shares and some send none."""

    def run(number, liars, silent, is_signed):
        server, own = signed(terms, number) if is_signed else (terms, lambda _: terms)

        def change(app):
            def answer(message, context):
                reply, place = app(message, context), context.node_config["partition-id"]
                if stage_of(message) == "unmask" and place in silent:
                    raise RuntimeError("gone")
                if stage_of(message) == "unmask" and place in liars:
                    about = reply.content["fisherjax"]
                    about["answer"] = with_wrong_shares(about["answer"], own(context).signing)
                return reply

            return answer

        return runs(AVERAGE, number, secure=server, own=own, change=change)

    return run


@pytest.mark.parametrize("is_signed", [False, True], ids=["honest", "signed"])
@pytest.mark.parametrize("name", WRONG_SHARES)
def test_wrong_shares_are_left_out_by_name_and_the_sum_is_exact(runs, with_liars, name, is_signed):
    number, liars, silent = WRONG_SHARES[name]
    with warned(*(f"Client {x} is left out of round 0: its shares of the others" for x in liars)):
        found, [report] = with_liars(number, liars, silent, is_signed)
    assert report.left_out.keys() == liars | silent
    assert report.clients == tuple(range(number))
    expected, _ = runs(AVERAGE, number)
    assert distance(found.params, expected.params) < 1e-6


@pytest.mark.parametrize(("number", "silent"), [(3, set()), (10, {0, 3, 7})])
def test_wrong_shares_of_which_the_others_cannot_tell_end_the_round(with_liars, number, silent):
    """The error names those whose answers came, one of whom lies."""
    left = re.escape(str(sorted(set(range(number)) - silent)))
    said = rf"Round 0 changes nothing: The shares of the seed .* those of clients {left} are wrong"
    with warned(said), pytest.raises(RuntimeError, match="No round of 1"):
        with_liars(number, {2}, silent, True)


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_client_sent_to_an_earlier_sum_is_refused(runs, terms, stage):
    sent = []

    def change(app):
        def answer(message, context):
            reply = app(message, context)
            if context.node_config["partition-id"] == 2 and stage_of(message) == stage:
                sent.append(reply.content)
                reply.content = sent[0]
            return reply

        return answer

    server, own = signed(terms, 4)
    with warned("Client 2 is left out of round 1: .*another view"):
        _, [_, report] = runs(AVERAGE, 4, secure=server, own=own, change=change, rounds=2)
    assert len(sent) == 2
    assert report.left_out.keys() == {2}


@pytest.mark.parametrize("is_signed", [False, True], ids=["honest", "signed"])
@pytest.mark.parametrize("stage", [*STAGES, "train"])
def test_a_client_answers_no_stage_twice(runs, terms, stage, is_signed):
    if stage == "confirm" and not is_signed:
        pytest.skip("only signed sums have this stage")
    errors = []

    def change(app):
        def answer(message, context):
            # Two processes that begin with the same state.
            state = context.state.copy()
            reply = app(message, context)
            if stage_of(message) == stage or (stage == "train" and stage_of(message) == "mask"):
                context.state = state
                if stage == "train":
                    del message.content["fisherjax"]["partners"]
                try:
                    app(message, context)
                except ValueError as error:
                    errors.append(str(error))
                    raise
            return reply

        return answer

    server, own = signed(terms, 3) if is_signed else (terms, terms)
    with warned("left out"), pytest.raises(RuntimeError, match="No round of 1"):
        runs(AVERAGE, 3, secure=server, own=own, change=change)
    text = "asks for an open upload" if stage == "train" else "has answered stage"
    assert errors
    assert all(text in error for error in errors)
