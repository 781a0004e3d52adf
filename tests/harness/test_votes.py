"""FedOV in one round: who trains on what, what judges, and what rows are left."""

import dataclasses

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.harness import memory, one_round, steps, tasks, votes
from experiments.harness.config import Data, Merging, OneShot, Training
from experiments.harness.limits import check_one_shot

SMALL = OneShot(
    Data(num_clients=2, alpha=1.0),
    Training(learning_rate=0.1, batch_size=64),
    Merging(("fedov", "fedavg", "fedov+student")),
    epochs=8,
    partition_seeds=(0,),
    seeds=(0,),
)


def test_rows_held_aside_are_of_no_client():
    data = np.arange(40)[:, None], np.arange(40) % 3
    whole = fj.clients.federation(data, [range(25), range(30, 40)])
    left, aside = votes.split(whole, jax.random.key(0))
    kept = [
        set(np.asarray(own[:n]).tolist()) for own, n in zip(left.indices, left.sizes, strict=True)
    ]
    assert len(aside) == len(set(aside.tolist())) == 3  # a tenth
    assert kept[0] | kept[1] | set(aside.tolist()) == {*range(25), *range(30, 40)}
    assert not set(aside.tolist()) & (kept[0] | kept[1])
    assert kept[0] <= set(range(25))
    assert (left.inputs[np.asarray(left.indices[0])] == left.indices[0][:, None]).all()
    assert left.indices.shape == whole.indices.shape
    spread, _ = votes.split(fj.clients.shard(whole, jax.devices()[:1]), jax.random.key(0))
    assert spread.mesh.size == 1


@pytest.mark.slow
@pytest.mark.parametrize("aside", ["train", "test"])
def test_a_vote_and_its_student_leave_rows_beside_the_merges(aside, monkeypatch):
    told = {"student.epochs": 2, "student.batch_size": 32, "fedov.steps": 3, "fedov.quorum": 1}
    merging = dataclasses.replace(SMALL.merging, aside=aside, options=tuple(told.items()))
    task = tasks.one_round(dataclasses.replace(SMALL, merging=merging))
    judged, taught = [], []
    accuracy, distilled = fj.metrics.accuracy, fj.algorithms.distilled

    def measure(model, params, examples):
        judged.append(examples)
        return accuracy(model, params, examples)

    def teach(*given, key, epochs, batch_size):
        taught.append(given[-1])
        assert (epochs, batch_size) == (2, 32)
        return distilled(*given, key=key, epochs=epochs, batch_size=batch_size)

    monkeypatch.setattr(fj.metrics, "accuracy", measure)
    monkeypatch.setattr(fj.algorithms, "distilled", teach)
    own, told = task.voting, []
    assert own.opened is fj.algorithms.open_set(own.model, own.normalize, steps=3)
    assert own.vote is fj.algorithms.voting(own.model, quorum=1)
    rows = one_round.run(task, (0, 0), told.append)
    assert len(told) == sum(one_round.length(task, (0, 0)))
    found = {row.algorithm: row for row in rows if row.metric == "accuracy" and row.client is None}
    assert found.keys() == {"ensemble", "fedavg", "fedov", "fedov+student"}
    assert found["fedov"].value > 0.2  # a tenth is chance
    # Eleven outputs for ten.
    assert found["fedov"].upload_bytes - found["fedavg"].upload_bytes == 4 * 64
    server = {row.algorithm: row.value for row in rows if row.metric == steps.SERVER}
    assert server["fedov"] == 0 < server["fedov+student"] < found["fedov+student"].seconds
    number = len(task.test.targets)
    (images,) = taught
    if aside == "test":
        np.testing.assert_array_equal(images, task.test.inputs[: number // 2])
        assert {len(one.targets) for one in judged} == {number - number // 2}
    else:
        assert len(images) == int(task.federations[0].sizes.sum()) // 10
        assert {len(one.targets) for one in judged} == {number}


@pytest.mark.slow
def test_what_its_clients_need_is_predicted_by_their_own_program(compilations):
    merging = dataclasses.replace(SMALL.merging, algorithms=("fedov",))
    task = tasks.one_round(dataclasses.replace(SMALL, merging=merging))
    federation, keys = task.federations[0], (jax.random.key(0), jax.random.key(1))
    how = {"epochs": 2, "batch_size": 64, "clients_per_chunk": 1}
    votes.trained(task.voting, federation, keys, **how | {"batch_size": 32})  # what is small
    need = votes.memory(task.voting, federation, keys, **how)
    with compilations() as count:
        learned = votes.trained(task.voting, federation, keys, **how)
    if jax.__version_info__ >= (0, 10):
        assert count() == 0
    models = sum(leaf.nbytes for leaf in jax.tree.leaves(learned.params))
    data = federation.inputs.nbytes + federation.targets.nbytes
    assert need.resident > data + 2 * models  # in and out
    # Adam keeps two numbers a parameter: nothing else needs as much.
    assert memory.predict(task).step == "training for fedov"


def test_what_nobody_chose_is_as_in_the_library():
    own = tasks.one_round(SMALL).voting
    assert own.opened is fj.algorithms.open_set(own.model, own.normalize)
    assert own.vote is fj.algorithms.voting(own.model)
    assert own.learning == {"epochs": 100, "batch_size": 64}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("fedov.quorum", 3, "--fedov.quorum is 3, expected 1 to the 2 clients"),
        ("fedov.steps", 0, "steps"),
        ("student.batch_size", 0, "--student.batch-size is 0, expected 1 or more"),
    ],
)
def test_what_a_vote_cannot_be_told_is_refused_before_anything_is_trained(option, value, message):
    merging = dataclasses.replace(SMALL.merging, options=((option, value),))
    with pytest.raises(ValueError, match=message):
        tasks.one_round(dataclasses.replace(SMALL, merging=merging))


@pytest.mark.parametrize("name", ["fedov+dense", "dense+dense", "fedov+student+dense", "fedovv"])
def test_what_makes_no_model_is_not_gone_on_from(name):
    asked = dataclasses.replace(SMALL, merging=Merging((name,)))
    with pytest.raises(ValueError, match=r"expected dense behind|did you mean"):
        check_one_shot(asked)
