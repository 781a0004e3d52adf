"""A network with BatchNorm in the experiments: what is measured, averaged, counted and refused."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import fisherjax as fj
from experiments.federated import plan
from experiments.federated import runs as played
from experiments.federated import tasks as rounds
from experiments.harness import after_merge, checkpoints, config, one_round, steps, tasks, votes
from experiments.harness.config import Data, Federated, Merging, OneShot, Training
from experiments.knee import runs as knee
from experiments.privacy import runs as private


class Normed(nn.Module):
    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(16)(x.reshape(len(x), -1))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(self.num_classes)(nn.relu(x))


ASKED = OneShot(
    Data(num_clients=3, alpha=1.0),
    Training(learning_rate=0.05, batch_size=64),
    Merging(("fedavg", "regmean")),
    epochs=1,
    partition_seeds=(0,),
    seeds=(0,),
    then_rounds=1,
    calibrate=("analytic_head",),
)
# Numbers of a client: two dense layers, scale and shift; then mean, second moment and variance.
_TRAINED = 64 * 16 + 16 + 16 * 10 + 10 + 2 * 16
_SENT = _TRAINED + 3 * 16


@pytest.fixture(scope="module", autouse=True)
def _normed():
    with pytest.MonkeyPatch.context() as changed:
        changed.setitem(config.MODELS, "mlp", Normed)
        yield


@pytest.fixture(scope="module")
def task(_normed):
    return tasks.one_round(ASKED)


@pytest.fixture(scope="module")
def trained(task):
    params, key = steps.start(task, 0)
    given = task.federations[0], params, key, lambda _: None
    return steps.train(task, *given, task.optimizer)[0]


def flax_accuracy(task, params):
    """Measure by flax itself, on its own collections."""
    pixels = np.asarray(task.normalize(task.test.inputs))
    outputs = Normed().apply(fj.networks.to_flax(params), pixels)
    return float((outputs.argmax(-1) == task.test.targets).mean())


@pytest.mark.slow
def test_a_unit_measures_whole_models_and_counts_what_is_sent(task, trained):
    rows = one_round.run(task, (0, 0))
    found = {(r.algorithm, r.client, r.round): r for r in rows if r.metric == "accuracy"}
    for client in range(3):
        own = jax.tree.map(lambda leaf, client=client: leaf[client], trained.models)
        expected = flax_accuracy(task, own)
        assert found["local", client, 1].value == pytest.approx(expected, abs=1e-6)
    for name in ("ensemble", "fedavg"):
        assert found[name, None, 1].upload_bytes == 4 * _SENT
    for name in ASKED.merging.algorithms:
        # Averaged on, every client has seen every class: better than alone.
        assert found[name, None, 2].upload_bytes == 4 * _SENT
        assert found[name, None, 2].value > 0.5
    mean = steps.average(trained, task.federations[0].weights)
    expected = flax_accuracy(task, mean)
    assert found["fedavg", None, 1].value == pytest.approx(expected, abs=1e-6)
    (central,) = one_round.run(task, (None, 0))
    assert central.value > 0.5


@pytest.mark.long
def test_running_statistics_are_computed_again_after_a_merge(task, trained):
    after = dataclasses.replace(ASKED, calibrate=("running_statistics",))
    chosen = task._replace(config=after)
    mean = steps.average(trained, task.federations[0].weights)
    given = steps.Merged(mean, 0.0, 0)
    [row] = after_merge.exchanged(chosen, (0, 0), "fedavg", given, lambda _: None)
    assert (row.algorithm, row.round) == ("fedavg+running_statistics", 2)
    # Mean, second moment and variance of 16 channels, and the number of examples.
    assert row.upload_bytes == 4 * (3 * 16 + 1)
    method = fj.algorithms.running_statistics(task.model)
    expected, _, _ = fj.merging.exchange(method, mean, task.federations[0], key=jax.random.key(0))
    assert row.value == pytest.approx(flax_accuracy(task, expected), abs=1e-6)


@pytest.mark.long
def test_models_are_averaged_leaf_by_leaf_and_what_is_frozen_stays(task, trained):
    # Of such a number a weighted mean is another, by rounding.
    frozen = jax.tree.map(lambda leaf: jnp.full_like(leaf, 2000.3), trained.frozen)
    weights = task.federations[0].weights
    mean = fj.tree.by_name(steps.average(trained._replace(frozen=frozen), weights))
    shares = np.asarray(weights, float)
    for name, leaf in fj.tree.by_name(trained.models).items():
        if name.endswith("/shift"):
            np.testing.assert_array_equal(mean[name], np.float32(2000.3))
        else:
            expected = np.tensordot(shares, np.asarray(leaf, float), 1)
            np.testing.assert_allclose(mean[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("where", ["params", "statistics"])
def test_a_client_whose_parameters_or_statistics_diverged_is_left_out(task, trained, where):
    spoil = lambda leaf: jnp.asarray(leaf).at[1].set(jnp.nan)  # noqa: E731
    spoilt = trained._replace(**{where: jax.tree.map(spoil, getattr(trained, where))})
    federation = task.federations[0]
    with pytest.raises(ValueError, match=rf"clients \[1\] .*'{where}/"):
        steps.finite(task, spoilt, federation)
    dropping = task._replace(config=dataclasses.replace(ASKED, on_nonfinite="drop"))
    with pytest.warns(UserWarning, match="client 1"):
        sound, weights = steps.finite(dropping, spoilt, federation)
    shares = np.asarray(federation.weights, float) * [1, 0, 1]
    np.testing.assert_allclose(weights, shares / shares.sum(), rtol=1e-6)
    assert fj.tree.finite_leaves(sound.models).all()


@pytest.mark.slow
def test_rounds_measure_whole_models(tmp_path):
    data = Data(num_clients=8, alpha=1.0)
    asked = Federated(
        data,
        Training(learning_rate=0.05, momentum=0.0, batch_size=64),
        Merging(("fedavg",)),
        rounds=2,
        local_epochs=(1,),
        cohort=3,
        validation_clients=2,
        held_out_clients=2,
        server_optimizer="momentum",
        out=tmp_path,
    )
    task, unit = rounds.rounds(asked), plan.Unit("fedavg", 1, 1.0, 0)
    ((_, method),) = played.prepare(task).items()
    rows = played.run(task, method, plan.Step(unit, 2), lambda *_: None, print)
    found = {(row.split, row.metric) for row in rows}
    assert {("cohort", "barrier_loss"), ("held_out", "accuracy")} <= found
    (up,) = (row.value for row in rows if row.metric == "up")
    assert up == 4 * _SENT


class Before(NamedTuple):
    """The state of rounds as version 0.2 saved it."""

    number: Any
    params: Any
    algorithm: Any
    private: Any


def _rounds(network, algorithm):
    train, _ = fj.datasets.load("digits")
    params = fj.networks.init(network, jax.random.key(0), train.inputs)
    model = fj.networks.model(network, params, fj.likelihoods.categorical)
    how = {"cohort": 2, "optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 32}
    method = fj.rounds.federated(model, algorithm, **how)
    partition = fj.partition.iid(train.targets, 4, seed=0)
    return method, params, fj.clients.federation(train, partition)


ALGORITHMS = {
    "fedavg": fj.algorithms.fedavg(),
    "scaffold": fj.algorithms.scaffold(),
    "adam": fj.algorithms.with_server_optimizer(fj.algorithms.fedavg(), optax.adam(0.1)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_of_the_version_before_goes_on(tmp_path, name):
    method, params, federation = _rounds(fj.networks.MLP((8,)), ALGORITHMS[name])
    state = method.init(params, federation)
    # What 0.2 kept: the algorithm's state and the clients' own for every leaf.
    server, private = (
        ALGORITHMS[name].link.init(params, 4),
        ALGORITHMS[name].link.init_client(params),
    )
    private = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 4), private)
    strong = lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf))  # noqa: E731
    saved = Before(jnp.int32(3), *jax.tree.map(strong, (params, server, private)))
    checkpoints.save(tmp_path, 3, saved, [["row"]])
    number, found, rows = checkpoints.restore(tmp_path, state, pytest.fail)
    assert (number, rows) == (3, [["row"]])
    assert int(found.number) == 3
    assert jax.tree.structure(found) == jax.tree.structure(state)
    method.check(found, federation, jax.random.key(0))


@pytest.mark.long
def test_a_run_whose_server_kept_moments_for_statistics_is_refused_by_name(tmp_path):
    method, params, federation = _rounds(Normed(), ALGORITHMS["adam"])
    before = ALGORITHMS["adam"].link.init(params, 4)
    checkpoints.save(tmp_path, 3, Before(jnp.int32(3), params, before, ()), [])
    with pytest.raises(ValueError, match=r"of another run or version: it holds .*moments") as told:
        checkpoints.restore(tmp_path, method.init(params, federation), pytest.fail)
    assert "delete that one" in str(told.value)


def test_a_private_merge_of_running_statistics_is_refused_before_training():
    asked = private.Config(data=ASKED.data, training=ASKED.training, clients=(2,))
    with pytest.raises(ValueError, match=r"--model is mlp, whose running statistics .*mean"):
        next(private.measured(asked, Console(quiet=True), [(2, 0)]))


def test_a_network_that_trains_by_itself_cannot_learn_what_it_does_not_know():
    voting = dataclasses.replace(ASKED, merging=Merging((votes.NAME,)))
    with pytest.raises(ValueError, match="BatchNorm"):
        tasks.one_round(voting)


@pytest.mark.long
def test_the_same_examples_in_pieces_give_the_statistics_of_the_clients(task, trained):
    method = fj.algorithms.make("fedfisher_diag", task.model, max_examples=None)
    federation = task.federations[0]
    for _, sent in knee.growing(method, trained, federation, [100, 0], draw=0):
        for name, leaf in fj.tree.by_name(trained.statistics).items():
            np.testing.assert_array_equal(sent.statistics[name], leaf)
