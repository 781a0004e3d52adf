"""What crosses the wire: uploads are files, bfloat16 stays, and other versions are refused."""

import dataclasses
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, compression, merging
from tests.flower.conftest import KEY, MODEL, SGD, distance, params_of, warned


@pytest.fixture(scope="module")
def recorded(flower):
    """Return a grid that notes the replies of clients that trained."""

    class Recorded(flower.InProcess):
        replies: tuple = ()

        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            Recorded.replies += tuple(x for x in found if x.metadata.message_type == "train")
            return found

    return Recorded


def saved(flower, replies, folder):
    """Write captured uploads to disc, and return their paths."""
    paths = [folder / f"{place}.safetensors" for place in range(len(replies))]
    for path, reply in zip(paths, replies, strict=True):
        path.write_bytes(flower.upload_file(reply))
    return paths


PACKED = compression.compressed(algorithms.fedavg(), compression.quantized(8))
CAPTURED = {
    "params": (algorithms.fedavg(), 1e-6),
    "codes": (PACKED, 1e-6),
    # Merged all at once, not as they come: the same numbers, bit for bit.
    "factors": (algorithms.fedfisher(MODEL), 0.0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_uploads_are_files_whose_merge_is_the_servers(
    flower, world, over_flower, recorded, tmp_path, name
):
    algorithm, tolerance = CAPTURED[name]
    recorded.replies = ()
    server = over_flower(world, algorithm, grid=recorded)
    paths = saved(flower, recorded.replies, tmp_path)
    updates, records = zip(*map(fj.files.load_update, paths), strict=True)
    assert [record.client for record in records] == ["0", "1", "2"]
    weights = [record.examples for record in records]
    by_hand, _, _ = merging.merge(algorithm, world.params, list(updates), weights)
    assert distance(by_hand, server.state.params) <= tolerance
    # As python -m fisherjax merge does, without the network.
    out = tmp_path / "merged.safetensors"
    fj.files.merge_files(out, paths, start=world.params)
    merged = fj.files.load_arrays(out, like=world.params)
    assert distance(merged, server.state.params) < 1e-5


def test_what_clients_send_are_the_bits_of_simulation(
    flower, world, over_flower, recorded, tmp_path
):
    recorded.replies, average = (), algorithms.fedavg()
    over_flower(world, average, grid=recorded)
    key = jax.random.fold_in(KEY, 0)
    how = {"optimizer": SGD, "epochs": 1, "batch_size": 8, "clients_per_chunk": 1}
    trained = fj.training.train(MODEL, world.params, world.federation, key=key, **how)
    sent = merging.summarize(average, trained, world.federation, key=key)
    for place, path in enumerate(saved(flower, recorded.replies, tmp_path)):
        found, _ = fj.files.load_update(path)
        expected = fj.tree.by_name(fj.files.of_client(sent, place).values["params"])
        for name, leaf in expected.items():
            np.testing.assert_array_equal(found.values["params"][name], leaf)


@pytest.mark.long
def test_bfloat16_arrives_as_it_was_sent(flower, world, over_flower, recorded, tmp_path):
    recorded.replies = ()
    half = world._replace(params=params_of("bfloat16"))
    server = over_flower(half, algorithms.fedavg(), grid=recorded)
    found, _ = fj.files.load_update(saved(flower, recorded.replies, tmp_path)[0])
    assert {x.dtype.name for x in jax.tree.leaves(found.values)} == {"bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(server.state.params)} == {"bfloat16"}


def test_uploads_come_in_pieces_of_flowers_chunks(flower):
    from flwr.app import Array

    from fisherjax.flower import _wire

    data = np.random.default_rng(0).bytes(12 << 20)
    [array] = _wire.file_record(data).values()
    assert len(array.slice_array()) == 3
    assert Array.inflate(array.deflate(), array.children).data == data


def with_about(message, **changes):
    """Change the description of a message."""
    message.content["fisherjax"].update(changes)
    return message


def test_other_formats_are_refused_on_both_sides(flower, world, over_flower):
    class Later(flower.InProcess):
        def push_messages(self, messages):
            later = [with_about(x, format=2, version="9.9") for x in messages]
            return super().push_messages(later)

    class Answers(flower.InProcess):
        def pull_messages(self, message_ids):
            found = super().pull_messages(message_ids)
            return [with_about(x, format=2, version="9.9") for x in found]

    for grid in (Later, Answers):
        with (
            warned(r"takes? part: .*'9.9'.*format 2.*same version"),
            pytest.raises(RuntimeError, match="No round of 1 succeeded"),
        ):
            over_flower(world, algorithms.fedavg(), grid=grid, terms=flower.Terms(connect=0.0))


def test_the_key_of_noise_stays_with_the_server(flower, world, over_flower):
    """Also in an exchange without noise, as the round that may follow it has the same key."""
    average, key = algorithms.fedavg(), fj.privacy.system_key()
    noisy = average._replace(link=average.link._replace(draws=True))
    sent = []

    class Watched(flower.InProcess):
        def push_messages(self, messages):
            messages = list(messages)
            sent.extend(x.content["fisherjax"].get("key") for x in messages)
            return super().push_messages(messages)

    secret = {
        np.asarray(jax.random.key_data(jax.random.fold_in(key, number))).tobytes()
        for number in range(2)
    }
    head = algorithms.analytic_head(MODEL)
    for algorithm, exchanges, is_sent in ((average, [], True), (noisy, [head], False)):
        sent.clear()
        client = {"exchanges": exchanges}
        over_flower(world, algorithm, grid=Watched, key=key, exchanges=exchanges, client=client)
        assert bool(secret & set(sent)) == is_sent


def test_another_message_of_the_same_round_draws_other_noise(flower, world):
    """A server that asks twice with one number must not find the noise by subtraction."""
    from fisherjax.flower import _replies

    client = _replies.Client(None, None, None, (), None, fj.privacy.system_key(), None)
    message = {"round": 0, "accepted": -1}
    asked = [(message, b"a"), (message, b"a"), (message, b"b"), (message | {"accepted": 0}, b"a")]
    keys = [
        jax.random.key_data(_replies.key_for(client, _replies.Request(about, file, 0, None, None)))
        for about, file in asked
    ]
    once, again, *others = (tuple(np.asarray(key).tolist()) for key in keys)
    assert once == again  # a reply that is lost is computed again
    assert len({once, *others}) == 3


def test_every_kind_of_update_keeps_its_structure(flower, world):
    """Names in files are sorted otherwise than nested names: leaves find their places."""
    from fisherjax.flower import _uploads

    params = {"a": {"z": jnp.arange(2.0)}, "a-b": jnp.arange(3.0), "c": [jnp.arange(4.0)]}
    size = 9
    matrix = jnp.arange(float(size * size)).reshape(size, size)
    matrix += matrix.T
    dense = fj.fisher.Dense(matrix, fj.fisher.operators.Template.of(params))
    for values in ({"params": params}, {"params": params, "fisher": dense}):
        update = fj.algorithms.Update(values, "any")
        expected = jax.eval_shape(lambda x: x, update)
        for method in ("fedavg", None):
            sent = _uploads.write(update, method, "0", 8)
            found = _uploads.read(sent, expected, fj.files.Limits())
            assert jax.tree.structure(found) == jax.tree.structure(update)
            jax.tree.map(np.testing.assert_array_equal, found, update)
        other = dataclasses.replace(expected, kind="another")
        with pytest.raises(ValueError, match="holds 'any'; expected 'another'"):
            _uploads.read(_uploads.write(update, "fedavg", "0", 8), other, fj.files.Limits())


@pytest.mark.long
def test_without_the_extra_the_package_works_and_the_module_says_what_to_install():
    program = (
        "import sys; sys.modules['flwr'] = None\n"
        "import fisherjax; from fisherjax import *\n"
        "try: fisherjax.flower\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    how = {"capture_output": True, "text": True, "check": False}
    found = subprocess.run([sys.executable, "-c", program], **how)
    assert found.stdout.strip() == (
        "fisherjax.flower needs the package flwr: pip install 'fisherjax[flower]'."
    ), found.stderr


@pytest.mark.long
def test_the_servers_memory_does_not_grow_with_clients_where_updates_add_up(flower):
    """One upload is in memory at a time, and the sums."""
    from flwr.app import Message

    from fisherjax.flower import _uploads, _wire

    model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
    average, params = algorithms.fedavg(), np.zeros((1000, 1000), np.float32)
    update = fj.algorithms.Update({"params": params + 1}, average.kind)
    sent = _uploads.write(update, "fedavg", "0", 8)

    def client(message, context):
        """Replay the upload."""
        about = {"partition-id": context.node_config["partition-id"], "round": 0}
        about |= {"layout": sent.layout, "examples": 8.0, "loss": 0.0}
        return Message(_wire.content(about, sent.file), reply_to=message)

    example = np.zeros((1, 1000), np.float32), np.zeros((1, 1000), np.float32)
    peaks = []
    for number in (2, 2, 12):
        how = {"example": example, "num_clients": number, "key": KEY}
        server = flower.strategy(average, model, params, **how)
        tracemalloc.start()
        server.run(flower.InProcess(client, number))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert float(server.state.params[0, 0]) == 1
    # The first run compiles.
    assert peaks[2] - peaks[1] < params.nbytes


def test_a_grid_over_another_one_sees_what_passes(flower, world):
    """Also in its own `send_and_receive`, which Flower's strategies call."""
    from flwr.app import Message

    class Counted(flower.Streaming):
        pushed = pulled = 0

        def push_messages(self, messages):
            messages = list(messages)
            self.pushed += len(messages)
            return super().push_messages(messages)

        def pull_messages(self, message_ids):
            found = list(super().pull_messages(message_ids))
            self.pulled += len(found)
            return found

    app = flower.client_app(algorithms.fedavg(), MODEL, SGD, world.load, params=world.params)
    grid = Counted(flower.InProcess(app, 2))
    hello = flower._wire.content({"kind": algorithms.fedavg().kind})
    asked = [Message(hello, node, "query.hello") for node in grid.get_node_ids()]
    answers = [x.content["fisherjax"]["partition-id"] for x in grid.send_and_receive(asked)]
    assert answers == [0, 1]
    assert (grid.pushed, grid.pulled) == (2, 2)
