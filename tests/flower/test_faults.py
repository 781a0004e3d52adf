"""One client that fails, lies or sends garbage is left out by name; the others' round goes on."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms
from tests.flower.conftest import CLIENTS, KEY, MODEL, SGD, SIZE, World, distance, params_of, warned

AVERAGE = algorithms.fedavg()
DIAGONAL = algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal)


@pytest.fixture(scope="module")
def tampered(flower):
    """Return a grid whose client 1 sends the reply that a function makes of its own."""

    def make(change):
        class Tampered(flower.InProcess):
            def pull_messages(self, message_ids):
                found = super().pull_messages(message_ids)
                bad = [
                    x.metadata.message_type == "train" and x.metadata.src_node_id == 2
                    for x in found
                ]
                return [change(x) if is_bad else x for x, is_bad in zip(found, bad, strict=True)]

        return Tampered

    return make


def with_file(reply, file):
    from fisherjax.flower import _wire

    reply.content["file"] = _wire.file_record(file)
    return reply


def resaved(reply, change):
    """Change the update inside of an upload's file, whose digest is right again."""
    from fisherjax.flower import _uploads, _wire, upload_file

    found, record = _wire.read(upload_file(reply), fj.files.load_update)
    sent = _uploads.write(change(found), record.algorithm, record.client, record.examples)
    return with_file(reply, sent.file)


def scaled(factor):
    return lambda reply: resaved(reply, lambda x: jax.tree.map(lambda y: y * factor, x))


def smaller(reply):
    return resaved(reply, lambda x: jax.tree.map(lambda y: y[:2], x))


def renamed(reply):
    def change(update):
        values = {"params": {f"other/{n}": x for n, x in update.values["params"].items()}}
        return fj.algorithms.Update(values, update.kind)

    return resaved(reply, change)


def claimed(reply):
    """Claim ten gigabytes in the header of a file of a few bytes."""
    entry = {"dtype": "F32", "shape": [50_000, 50_000], "data_offsets": [0, 10_000_000_000]}
    header = json.dumps({"first/kernel": entry}).encode()
    reply.content["fisherjax"]["layout"] = "arrays"
    return with_file(reply, len(header).to_bytes(8, "little") + header + bytes(100))


def without_file(reply):
    del reply.content["file"]
    return reply


def about(**changes):
    def change(reply):
        reply.content["fisherjax"].update(changes)
        return reply

    return change


def flipped(reply):
    from fisherjax.flower import upload_file

    file = bytearray(upload_file(reply))
    file[-1] ^= 1
    return with_file(reply, bytes(file))


def failed(reply):
    from flwr.app import Error, Message

    return Message(Error(2, "the disk is full\n\x1b[2J"), reply_to=reply)


def unreadable(reply):
    """Let Flower read a reply whose bytes are none, as it does when it is pulled."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    return inflate_object_from_contents("reply", {"reply": b"RecordDict 0\0" + bytes(9)})


FAULTS = {
    "not finite": (scaled(np.nan), "not finite"),
    "huge": (scaled(1e38), "too large to be summed"),
    "other shapes": (smaller, r"another network: .*float32\[.*expected float32"),
    "other names": (renamed, "another network"),
    "garbage": (lambda reply: with_file(reply, bytes(range(256)) * 9), "damaged|not a"),
    "empty": (lambda reply: with_file(reply, b""), "damaged|not a"),
    "ten gigabytes": (claimed, "damaged|exceeds"),
    "changed bit": (flipped, "changed after it was written"),
    "no file": (without_file, "damaged|not a"),
    "another round": (about(round=7), "of round 7; expected 0"),
    "another client": (about(**{"partition-id": 0}), "of partition-id 0; expected 1"),
    "negative examples": (about(examples=-1.0), "examples"),
    "infinite examples": (about(examples=float("inf")), "examples"),
    "too many examples": (about(examples=1e39), r"examples is 1e\+39"),
    "no number": (about(examples="many"), "expected a float"),
    "no loss": (about(loss=[1.0]), "expected a float"),
    "other layout": (about(layout="pickle"), "has layout 'pickle'"),
    "other format": (about(format=2), "same version"),
    "unreadable": (unreadable, "no message of Flower"),
    "failed": (failed, r"the disk is full\\n\\x1b"),  # no lines and no escapes of its own
}


@pytest.fixture(scope="module")
def without_one(flower, world, over_flower):
    """Return the model of a round of clients 0 and 2."""

    class Two(flower.InProcess):
        def __init__(self, app, number):
            super().__init__(app, [{"partition-id": 0}, {"partition-id": 2}])

    with warned("Client 1 is left out of round 0: it is not connected"):
        return over_flower(world, AVERAGE, grid=Two, terms=flower.Terms(connect=0.0)).state


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leaves_out_one_client_by_name(world, over_flower, tampered, without_one, name):
    change, reason = FAULTS[name]
    with warned(rf"Client 1 is left out of round 0: .*({reason})"):
        found = over_flower(world, AVERAGE, grid=tampered(change)).state
    assert found.accepted.tolist() == [0, -1, 0]
    assert distance(found.params, without_one.params) == 0


@pytest.mark.long
def test_a_negative_fisher_leaves_out_one_client_of_a_merge_of_all(world, over_flower, tampered):
    kfac = algorithms.fedfisher(MODEL)
    for algorithm in (kfac, DIAGONAL):
        with warned("Client 1 is left out.*negative"):
            found = over_flower(world, algorithm, grid=tampered(scaled(-1.0))).state
        assert found.accepted.tolist() == [0, -1, 0]


def test_max_weight_bounds_what_a_client_claims(flower, world, over_flower, tampered):
    grid = tampered(about(examples=1e9))
    with warned("Client 1 claims 1000000000 examples, which count as 8"):
        found = over_flower(world, AVERAGE, grid=grid, terms=flower.Terms(max_weight=SIZE))
    assert distance(found.state.params, over_flower(world, AVERAGE).state.params) == 0


def test_too_few_replies_change_nothing_but_the_number(flower, world, over_flower, tampered):
    reports = []
    how = {"params": world.params, "batch_size": SIZE}
    client = flower.client_app(AVERAGE, MODEL, SGD, world.load, **how)
    terms = flower.Terms(min_replies=CLIENTS)
    own = {"example": world.example, "num_clients": CLIENTS, "key": KEY, "terms": terms}
    server = flower.strategy(AVERAGE, MODEL, world.params, **own)
    grid = tampered(about(layout="pickle"))(client, CLIENTS)
    with (
        warned("Round 0 changes nothing: there are 2 sound uploads"),
        pytest.raises(RuntimeError, match=r"No round of 1 succeeded.*there are 2 sound uploads"),
    ):
        server.run(grid, 1, lambda state, report: reports.append((state, report)))
    [(state, report)] = reports
    assert (state.number, report.clients, set(report.left_out)) == (1, (), {1, "round"})
    assert distance(state.params, world.params) == 0


def test_a_round_in_which_everybody_diverges_has_no_loss_and_names_them(flower, world):
    def load(context):
        inputs, targets = world.load(context)
        # In the first round only, so that the run goes on.
        return (np.nan if server.state.number == 0 else 1) * inputs, targets

    how = {"params": world.params, "batch_size": SIZE}
    client = flower.client_app(AVERAGE, MODEL, SGD, load, **how)
    own = {"example": world.example, "num_clients": CLIENTS, "key": KEY}
    server, reports = flower.strategy(AVERAGE, MODEL, world.params, **own), []
    with warned("Client 0 .*diverged", "Round 0 changes nothing: there are 0 sound uploads"):
        server.run(flower.InProcess(client, CLIENTS), 2, lambda _, report: reports.append(report))
    failed, sound = reports
    assert np.isnan(failed.loss)
    assert np.isfinite(sound.loss)
    assert (failed.clients, set(failed.left_out)) == ((), {0, 1, 2, "round"})
    assert all("diverged" in failed.left_out[client] for client in range(CLIENTS))


def test_the_loss_of_a_client_of_weight_zero_does_not_count(flower, world, tampered):
    how = {"params": world.params, "batch_size": SIZE}
    client = flower.client_app(AVERAGE, MODEL, SGD, world.load, **how)
    own = {"example": world.example, "num_clients": CLIENTS, "key": KEY}
    losses = []
    for loss in (np.nan, 0.0):
        server = flower.strategy(AVERAGE, MODEL, world.params, **own)
        grid = tampered(about(examples=0.0, loss=loss))(client, CLIENTS)
        server.run(grid, 1, lambda _, report: losses.append(report.loss))
    assert losses[0] == losses[1]


def test_a_client_of_another_network_is_left_out(flower, world, over_flower, without_one):
    """It refuses what the server sends, and says so."""
    wide = {"first": params_of()["first"], "second": {"kernel": jnp.ones((4, 7))}}
    how = {"batch_size": SIZE}
    apps = [
        flower.client_app(AVERAGE, MODEL, SGD, world.load, params=params, **how)
        for params in (world.params, wide)
    ]

    def app(message, context):
        return apps[context.node_config["partition-id"] == 1](message, context)

    own = {"example": world.example, "num_clients": CLIENTS, "key": KEY}
    server = flower.strategy(AVERAGE, MODEL, world.params, **own)
    with warned("Client 1 is left out.*second/kernel"):
        server.run(flower.InProcess(app, CLIENTS))
    assert distance(server.state.params, without_one.params) == 0


def test_a_client_of_another_algorithm_takes_no_part(flower, world):
    other = algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal)
    client = flower.client_app(other, MODEL, SGD, world.load, params=world.params)
    own = {"example": world.example, "num_clients": 1, "key": KEY}
    server = flower.strategy(AVERAGE, MODEL, world.params, **own)
    with (
        warned("merges 'params', but this client sends 'params, true"),
        pytest.raises(RuntimeError, match="it is not connected"),
    ):
        server.run(flower.InProcess(client, 1))


@pytest.mark.parametrize(
    ("configurations", "reason"),
    [
        ([{"partition-id": 0}, {"partition-id": 0}], "its partition-id is 0, as that of node 1"),
        ([{"partition-id": 0}, {"partition-id": 2}], "its partition-id is 2; expected 0 to 1"),
        ([{"partition-id": 0}, {}], "partition-id None; expected the number"),
    ],
)
def test_nodes_need_numbers_of_their_own(flower, world, configurations, reason):
    client = flower.client_app(AVERAGE, MODEL, SGD, world.load, params=world.params, batch_size=8)
    terms = flower.Terms(connect=0.0)
    own = {"example": world.example, "num_clients": 2, "key": KEY, "terms": terms}
    server = flower.strategy(AVERAGE, MODEL, world.params, **own)
    with warned(reason, "Client 1 is left out of round 0: it is not connected"):
        server.run(flower.InProcess(client, configurations))


WRONG = {
    "nothing": (lambda _: None, r"load\(context\) is a NoneType"),
    "one array": (lambda _: np.ones((3, 5)), r"load\(context\) is"),
    "lengths": (lambda _: (np.ones((3, 5)), np.zeros(2, int)), "one row for each example"),
    "width": (lambda _: (np.ones((3, 4), "float32"), np.zeros(3, int)), "."),
    "no examples": (lambda _: (np.ones((0, 5)), np.zeros(0, int)), "no example"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_load_returns_is_checked(flower, world, name):
    load, reason = WRONG[name]
    client = flower.client_app(AVERAGE, MODEL, SGD, load, params=world.params)
    own = {"example": world.example, "num_clients": 1, "key": KEY}
    server = flower.strategy(AVERAGE, MODEL, world.params, **own)
    with (
        warned(reason),
        pytest.raises(RuntimeError, match="No round of 1 succeeded"),
    ):
        server.run(flower.InProcess(client, 1))


@pytest.fixture(scope="module")
def refusing(flower):
    """Return a grid whose superlink answers every second question with a status."""
    import httpx

    def make(status):
        def refuse():
            answer = httpx.Response(status, request=httpx.Request("POST", "http://superlink"))
            answer.raise_for_status()

        class Refusing(flower.InProcess):
            asked = 0

            def _sometimes(self, ask, *given):
                self.asked += 1
                if self.asked % 2:
                    refuse()
                return ask(*given)

            def get_node_ids(self):
                return self._sometimes(super().get_node_ids)

            def pull_messages(self, message_ids):
                return self._sometimes(super().pull_messages, message_ids)

        return Refusing

    return make


def test_a_superlink_that_is_busy_is_asked_again(world, over_flower, refusing):
    found = over_flower(world, AVERAGE, grid=refusing(500)).state
    assert found.accepted.tolist() == [0] * CLIENTS
    chex.assert_trees_all_equal(found.params, over_flower(world, AVERAGE).state.params)


def test_what_a_superlink_forbids_ends_the_run(world, over_flower, refusing):
    with pytest.raises(Exception, match="403 Forbidden"):
        over_flower(world, AVERAGE, grid=refusing(403))


def test_bad_input_is_refused_where_it_is_given(flower, world: World):
    own = {"example": world.example, "num_clients": 2, "key": KEY}
    refused = [
        (algorithms.single_set(), {}, "sends nothing"),
        (algorithms.pfnm(MODEL), {}, "other shapes"),
        (AVERAGE, {"cohort": 3}, "cohort is 3"),
        (AVERAGE, {"num_clients": 0}, "num_clients is 0"),
        (AVERAGE, {"terms": flower.Terms(min_replies=0)}, "min_replies is 0"),
        (AVERAGE, {"terms": flower.Terms(min_replies=3)}, "min_replies is 3"),
        (AVERAGE, {"terms": flower.Terms(timeout=-1.0)}, "timeout is -1"),
        (AVERAGE, {"example": (world.inputs[:1, :2], world.targets[:1])}, "."),
    ]
    for algorithm, options, reason in refused:
        with pytest.raises((ValueError, TypeError), match=reason):
            flower.strategy(algorithm, MODEL, world.params, **own | options)
    noisy = fj.privacy.dp_sgd(MODEL, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="key is None, but this model trains with noise"):
        flower.client_app(AVERAGE, noisy, SGD, world.load, params=world.params)
