"""One round, on digits and small settings: what is trained, merged and measured, and how often."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.harness import memory, methods, one_round, steps, tasks
from experiments.harness.config import MODELS, Data, Merging, OneShot, Training
from experiments.harness.methods import trains_its_own
from experiments.harness.records import Row
from experiments.harness.tasks import OneRound
from tests.methods import MERGED, laws

# One epoch without momentum is as many steps as FedNova counts, and SCAFFOLD's first round.
SMALL = OneShot(
    Data(num_clients=3, alpha=1.0),
    Training(learning_rate=0.1, momentum=0.0, batch_size=64),
    Merging(
        ("fedavg", "fisher_merge", "fedfisher_diag", "fednova", "fedprox", "scaffold"),
        solver="adam",
        options=(("fedprox.mu", 0.0),),
    ),
    epochs=1,
    partition_seeds=(0, 1),
    seeds=(0, 1),
    then_rounds=2,
)
NAMES = SMALL.merging.algorithms


def asked(*names: str, **changes: object) -> OneShot:
    """Ask for other algorithms, and no later rounds."""
    own = dataclasses.replace(SMALL.merging, algorithms=names or NAMES)
    return dataclasses.replace(SMALL, **{"merging": own, "then_rounds": 0} | changes)


def values(rows: list[Row], round_: int = 1) -> dict[str, float]:
    """Of merged models only: local ones appear once a client."""
    merged = (row for row in accuracies(rows) if row.client is None and row.round == round_)
    return {row.algorithm: row.value for row in merged}


def accuracies(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.metric == "accuracy"]


@pytest.fixture(scope="module")
def task() -> OneRound:
    """Prepared once: what equal configurations compile serves all tests."""
    return tasks.one_round(SMALL)


@pytest.fixture(scope="module")
def told() -> list:
    return []


@pytest.fixture(scope="module")
def rows(task, told) -> list[Row]:
    """Of the first unit; what it told while it ran is in `told`."""
    return one_round.run(task, (0, 0), told.append)


# What is computed


@pytest.mark.long
def test_one_row_for_each_number(rows):
    first = [row for row in accuracies(rows) if row.round == 1]
    names = [(row.algorithm, row.client) for row in first]
    assert names == [*(("local", i) for i in range(3)), *((n, None) for n in ("ensemble", *NAMES))]
    assert all((row.partition_seed, row.seed) == (0, 0) for row in rows)
    assert all(0 <= row.value <= 1 for row in accuracies(rows))
    server = {row.algorithm: row.value for row in rows if row.metric == steps.SERVER}
    assert tuple(server) == NAMES
    both = {row.algorithm: row.seconds for row in first if row.algorithm in NAMES}
    assert all(0 < server[name] <= both[name] for name in NAMES)


@pytest.mark.slow
def test_fedprox_without_pull_and_one_round_of_scaffold_are_fedavg(rows):
    merged = values(rows)
    assert merged["fedprox"] == merged["scaffold"] == merged["fedavg"]
    assert merged["fisher_merge"] != merged["fedavg"]


@pytest.mark.long
def test_a_pull_moves_fedprox_and_nothing_else(rows):
    strong = Merging(("fedavg", "fedprox"), options=(("fedprox.mu", 1.0),))
    before = values(rows)
    now = values(one_round.run(tasks.one_round(asked(merging=strong)), (0, 0)))
    assert {name for name in now if now[name] != before[name]} == {"fedprox"}


def test_clients_are_trained_once_and_once_more_for_those_that_train_their_own(task, rows, told):
    own = {name for name in NAMES if trains_its_own(name)}
    assert own == {"fednova", "fedprox", "scaffold"}
    losses = [x for x in told if isinstance(x, float)]
    assert len(losses) == (1 + len(own) + SMALL.then_rounds * len(NAMES)) * SMALL.epochs
    assert one_round.length(task, (0, 0)) == (len(losses), len(told) - len(losses))


def test_methods_that_change_training_train_once_more_with_the_same_minibatches(task):
    losses = []
    alone = task._replace(config=asked())
    one_round.run(alone, (0, 0), losses.append)
    losses = [x for x in losses if isinstance(x, float)]
    assert len(losses) == one_round.length(alone, (0, 0))[0] == 4
    assert len(set(losses)) == 1


def test_rounds_follow_every_algorithm_and_leave_the_first_as_it_was(task, rows):
    alone = task._replace(config=asked())
    assert values(one_round.run(alone, (0, 0))) == values(rows)
    for number in (2, 3):
        assert set(values(rows, number)) == set(NAMES)
    assert values(rows, 3)["fedprox"] == values(rows, 3)["fedavg"]  # from equal first rounds
    assert values(rows, 3)["fedavg"] > values(rows)["fedavg"]


@pytest.mark.long
def test_numbers_of_a_seed_do_not_depend_on_what_else_is_run(task):
    together = one_round.run(task._replace(config=asked()), (1, 0))
    alone = asked("fisher_merge", partition_seeds=(1,), seeds=(0,))
    rows, all_ = (
        {row._replace(seconds=None) for row in accuracies(found)}
        for found in (one_round.run(tasks.one_round(alone), (1, 0)), together)
    )
    assert rows <= all_


@pytest.mark.long
def test_a_merge_does_not_depend_on_the_options_of_another_method():
    def merged(*names: str) -> dict[str, steps.Merged]:
        merging = Merging(names, options=(("fisher_merge.max_examples", 8),))
        return one_round.train_and_merge(tasks.one_round(asked(merging=merging)), (0, 0))[1]

    alone, together = merged("fedfisher_diag"), merged("fisher_merge", "fedfisher_diag")
    chex.assert_trees_all_equal(together["fedfisher_diag"].params, alone["fedfisher_diag"].params)
    # Of few examples, the Fisher information is another one.
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(*(one.params for one in together.values()), rtol=1e-3)


@pytest.mark.long
def test_a_merge_in_stages_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    few = fj.algorithms.Distillation(images=32, batch_size=16, steps=2)
    monkeypatch.setattr(methods, "Distillation", lambda: few)
    monkeypatch.setattr(one_round, "_SAVE_EVERY", 0)
    names = ("fedavg", "dense", "fisher_merge", "fisher_merge+dense")
    merging = Merging(names, options=(("dense.epochs", 3), ("dense.width", 8)))
    task = tasks.one_round(asked(merging=merging, out=tmp_path))
    told, plain = [], task._replace(config=asked(merging=merging))
    _, whole = one_round.train_and_merge(plain, (0, 0), told.append)
    assert len(told) == sum(one_round.length(task, (0, 0)))

    def stop(now):
        if now == "fisher_merge+dense: 2 of 3 epochs":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        one_round.train_and_merge(task, (0, 0), stop)
    went_on = []
    _, again = one_round.train_and_merge(task, (0, 0), went_on.append)
    assert [said for said in went_on if "epochs" in str(said)] == [
        "fisher_merge+dense: 2 of 3 epochs",
        "fisher_merge+dense: 3 of 3 epochs",
    ]
    for name in names:
        assert jax.tree.all(jax.tree.map(np.array_equal, again[name].params, whole[name].params))
    assert not np.array_equal(*(whole[name].params["dense1"]["kernel"] for name in names[:2]))
    one_round.clear(task)
    assert not any(tmp_path.iterdir())


@pytest.mark.long
def test_the_central_model_is_the_ceiling(task, rows):
    (central,) = values(one_round.run(task, (None, 0))).values()
    assert central > max(values(rows).values())


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["cg", "gd", "adam"])
def test_one_client_is_what_every_algorithm_and_the_central_model_give(solver):
    """Those whose rows list the law."""
    names = tuple(name for name in MERGED if "single client" in laws(name))
    everything = asked(
        data=Data(num_clients=1),
        training=Training(batch_size=64),
        merging=Merging(names, solver=solver, options=(("fedprox.mu", 0.0),)),
        epochs=2,
    )
    alone = tasks.one_round(everything)
    rows = one_round.run(alone, (0, 0))
    assert {row.algorithm for row in rows} == {"local", "ensemble", *names}
    # Beside accuracies there are the server's seconds.
    accuracies = [row.value for row in rows if row.metric == "accuracy"]
    assert np.ptp(accuracies) < 2 / len(alone.test[1])


# How often is compiled


@pytest.mark.long
def test_nothing_compiles_again_for_another_split_or_seed(task, rows, compilations):
    one_round.run(task, (None, 0))
    with compilations() as count:
        for unit in ((1, 0), (0, 1), (None, 1)):
            one_round.run(task, unit)
    assert count() == 0


@pytest.mark.long
def test_experiments_that_differ_in_their_split_compile_once_and_give_what_they_give_alone(
    compilations,
):
    few = asked("fedavg", partition_seeds=(0,))
    splits = [Data(num_clients=3, partition="niid_bench", beta=0.5)]
    splits.append(dataclasses.replace(splits[0], partition="classes_per_client"))
    first, second = tasks.one_rounds([dataclasses.replace(few, data=own) for own in splits])
    one_round.run(first, (0, 0))
    with compilations() as count:
        together = one_round.run(second, (0, 0))
    assert count() == 0
    alone = tasks.one_round(second.config)
    assert values(together) == values(one_round.run(alone, (0, 0)))


def test_experiments_that_differ_in_more_than_their_split_are_not_prepared_together():
    with pytest.raises(ValueError, match="differ in more than how data are split"):
        tasks.one_rounds([SMALL, asked("fedavg")])


@pytest.mark.long
def test_the_prediction_compiles_the_programs_of_the_run_and_no_others(rows, compilations):
    """Where older versions of JAX keep the two apart, the prediction only costs time."""

    def new(number: int) -> OneRound:
        """Prepare what has to be compiled: nobody else has this rate and these minibatches."""
        return tasks.one_round(
            asked(
                training=Training(learning_rate=0.1 + number / 100, momentum=0.0, batch_size=64),
                merging=Merging(
                    ("fedavg", "fisher_merge"), options=(("fisher_merge.batch_size", 64 + number),)
                ),
                exchanges=2,
            )
        )

    first, second = new(1), new(2)
    with compilations() as count:
        one_round.run(first, (0, 0))
    alone = count()
    with compilations() as count:
        need = memory.predict(second, threads=3)  # the order does not matter
        one_round.run(second, (0, 0))
    assert memory.predict(second, threads=1) == need
    federation = second.federations[0]
    assert need.resident > federation.inputs.nbytes + federation.targets.nbytes
    assert alone >= 2  # training and the Fisher information
    if jax.__version_info__ >= (0, 10):
        assert count() <= alone


# Data, networks and optimisers


def test_clients_of_an_iid_split_hold_the_same_mixture():
    counts = tasks.one_round(asked(data=Data(num_clients=3, partition="iid"))).label_counts[0]
    assert np.ptp(counts.sum(axis=1)) <= 1
    assert counts.min() > 25


def test_validation_images_belong_to_the_split(task):
    first, again, other = (task.validation(seed)[0] for seed in (0, 0, 1))
    assert first.shape == (500, 8, 8, 1)
    assert (first == again).all()
    assert not (first == other).all()


def test_weight_decay_is_that_of_one_gradient_step():
    decayed = tasks.optimizer(Training(learning_rate=0.05, momentum=0.0, weight_decay=0.5))
    params, gradient = {"w": np.full(1, 2.0)}, {"w": np.full(1, 3.0)}
    updates, _ = decayed.update(gradient, decayed.init(params), params)
    assert np.allclose(updates["w"], -0.05 * (3 + 0.5 * 2))


def test_smoothed_labels_are_what_clients_fit(task):
    smooth = tasks.one_round(asked(training=Training(label_smoothing=0.1)))
    assert smooth.model.likelihood is fj.likelihoods.smoothed(0.1)
    assert task.model.likelihood is fj.likelihoods.categorical


def test_raw_images_are_pixels_between_zero_and_one(task):
    raw = tasks.one_round(asked("fedavg", data=Data(num_clients=3, normalize=False)))
    params, _ = steps.start(raw, 0)
    images = task.test[0][:5]
    outputs = (raw.model.apply(params, x) for x in (images, images / np.float32(16)))
    assert np.array_equal(*outputs)


@pytest.mark.parametrize(
    ("model", "shape"),
    [("simple_cnn", (1, 32, 32, 3)), ("simple_cnn_mnist", (1, 28, 28, 1))],
    ids=["simple_cnn", "simple_cnn_mnist"],
)
def test_niid_benchs_networks_have_biases(model, shape):
    network = MODELS[model](num_classes=10)
    params = jax.eval_shape(lambda: fj.networks.init(network, jax.random.key(0), np.zeros(shape)))
    assert all("bias" in layer for layer in params.values())


@pytest.mark.long
def test_an_exchange_without_training_follows_each_merge():
    config = asked("fedavg", "regmean", calibrate=("analytic_head",), partition_seeds=(0,))
    told, task = [], tasks.one_round(config)
    rows = one_round.run(task, (0, 0), told.append)
    steps = [told_ for told_ in told if isinstance(told_, str)]
    assert len(steps) == one_round.length(task, (0, 0))[1] == 4
    merged = {row.algorithm: row for row in accuracies(rows) if row.client is None}
    for name in ("fedavg", "regmean"):
        first, second = merged[name], merged[f"{name}+analytic_head"]
        assert (first.round, second.round) == (1, 2)
        assert second.value > first.value
        assert second.seconds > first.seconds
        # Second moments of 64 inputs, products with ten classes and their shares, three numbers.
        assert second.upload_bytes - first.upload_bytes == 4 * (64 * 64 + 64 * 10 + 10 + 3)


@pytest.mark.long
def test_more_exchanges_follow_the_head_and_leave_rows_by_round():
    config = asked(
        "fedavg", partition_seeds=(0,), calibrate=("analytic_head",), exchanges=3, then_rounds=2
    )
    config, told = dataclasses.replace(config, then_epochs=2), []
    task = tasks.one_round(config)
    rows = one_round.run(task, (0, 0), told.append)
    epochs = [told_ for told_ in told if not isinstance(told_, str)]
    assert (len(epochs), len(told) - len(epochs)) == one_round.length(task, (0, 0)) == (5, 5)
    later = {(row.algorithm, row.round): row for row in rows if row.client is None}
    names = [name for name, _ in later if name.endswith("natural_gradient")]
    assert len(names) == 3
    first, *_, last = (later["fedavg+natural_gradient", number] for number in (2, 3, 4))
    head = later["fedavg+analytic_head", 2]
    assert (first.value, first.upload_bytes) == (head.value, head.upload_bytes)
    assert last.value > first.value > later["fedavg", 1].value
    assert last.seconds > first.seconds
