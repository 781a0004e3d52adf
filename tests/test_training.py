"""Local training is what a loop over epochs and batches in Python would do, client by client."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import clients, likelihoods, training

BATCH = 3
SIZES = (7, 0, 12, 4, 5)
WITH_DATA = np.array([0, 2, 3, 4])
OPTIMIZER = optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(0.1, momentum=0.9))


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(30, 4))
    inputs[:, 0] = np.arange(30) / 30
    return inputs, rng.integers(0, 3, 30)


@pytest.fixture
def partition():
    rows = np.random.default_rng(1).permutation(30)[: sum(SIZES)]
    return np.split(rows, np.cumsum(SIZES)[:-1])


@pytest.fixture
def federation(x64, data, partition):
    return clients.federation(data, partition)


@pytest.fixture
def params(x64):
    rng = np.random.default_rng(2)
    return {"kernel": jnp.array(rng.normal(size=(4, 3))), "bias": jnp.array(rng.normal(size=3))}


def apply(params, inputs):
    return inputs @ params["kernel"] + params["bias"]


def jitter(key, inputs):
    return inputs + 0.1 * jax.random.normal(key, inputs.shape)


def noisy_apply(params, inputs, key, weights):
    own, other = jax.random.split(key)
    kept = jax.random.bernoulli(own, 0.7, inputs.shape)
    return apply(params, jitter(other, inputs) * kept), None


MODEL = fj.Model(apply, likelihoods.categorical)
NOISY = MODEL._replace(apply_train=noisy_apply)
BIAS_ONLY = fj.Model(apply, likelihoods.categorical, mask={"kernel": False, "bias": True})


def train(params, federation, key, model=MODEL, **settings):
    settings = {"optimizer": OPTIMIZER, "epochs": 2, "batch_size": BATCH} | settings
    return training.train(model, params, federation, key=key, **settings)


def assert_close(left, right, tolerance=1e-12):
    chex.assert_trees_all_close(left, right, rtol=tolerance, atol=tolerance)


assert_same = partial(chex.assert_trees_all_equal, strict=True)


def client(stacked, index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], stacked)


# A network whose leaf `log` [steps, B] keeps the first feature of every example it was shown.


def logging_params(params, steps):
    return {"weights": params, "log": np.full((steps, BATCH), -1.0), "step": np.zeros(())}


LOGGING_MASK = {"weights": {"kernel": True, "bias": True}, "log": False, "step": False}


def logging_apply(params, inputs, key, weights):
    step = params["step"].astype(int)
    log = params["log"].at[step].set(inputs[:, 0])
    return apply(params["weights"], inputs), params | {"log": log, "step": params["step"] + 1}


LOGGING = fj.Model(
    lambda params, inputs: apply(params["weights"], inputs),
    likelihoods.categorical,
    logging_apply,
    LOGGING_MASK,
)


@jax.jit
def step_by_hand(params, state, inputs, targets):
    def mean_loss(params):
        logits = apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, gradient = jax.value_and_grad(mean_loss)(params)
    updates, state = OPTIMIZER.update(gradient, state, params)
    return optax.apply_updates(params, updates), state, loss


def by_hand(params, batches, data):
    """Take one optax step for every batch of row numbers; return the losses on the way, too."""
    state, losses = OPTIMIZER.init(params), []
    for rows in batches:
        params, state, loss = step_by_hand(params, state, data[0][rows], data[1][rows])
        losses.append(float(loss))
    return params, losses


@pytest.mark.long
@pytest.mark.parametrize("chunk", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_each_client_is_trained_as_by_hand_on_shuffled_whole_epochs(
    data, partition, federation, params, key, chunk
):
    epochs = 2
    start = logging_params(params, steps=epochs * 4)
    models = train(start, federation, key, LOGGING, epochs=epochs, clients_per_chunk=chunk)
    orders = set()
    for i, rows in enumerate(partition):
        steps = -(-len(rows) // BATCH)
        assert models.steps[i] == models.statistics["step"][i] == epochs * steps
        log = np.rint(np.asarray(models.statistics["log"][i]) * 30).astype(int)
        # A short batch is filled up with its own examples, which only count once.
        batches = [list(dict.fromkeys(shown)) for shown in log[: epochs * steps].tolist()]
        for epoch in range(epochs):
            own = batches[epoch * steps : (epoch + 1) * steps]
            shown = [row for batch in own for row in batch]
            assert sorted(shown) == sorted(rows)
            assert all(len(batch) == BATCH for batch in own[:-1])
            orders.add(tuple(np.argsort(shown)))
        expected, losses = by_hand(params, batches, data)
        assert_close(client(models.params["weights"], i), expected)
        totals = [loss * len(batch) for loss, batch in zip(losses, batches, strict=True)]
        means = np.reshape(totals, (epochs, steps)).sum(1) / max(len(rows), 1)
        assert_close(models.loss[i], means)
    # Every client with data was shuffled anew in every epoch (an empty one has one order, none).
    assert len(orders) == epochs * (len(SIZES) - 1) + 1
    assert_same(models.start["weights"], start["weights"])
    assert models.extras == ()


@pytest.mark.long
def test_a_client_is_trained_the_same_alone_as_beside_a_bigger_one(
    data, partition, federation, params, key
):
    together = train(params, federation, key)
    alone = train(params, clients.federation(data, partition[:1]), key)
    assert_close(client(together.params, 0), client(alone.params, 0))
    assert_close(together.loss[0], alone.loss[0])


@pytest.mark.long
@pytest.mark.parametrize("model", [pytest.param(MODEL, marks=pytest.mark.slow), NOISY])
def test_a_selected_client_trains_as_among_the_others_bit_for_bit(federation, params, key, model):
    together = train(params, federation, key, model)
    for one in (2, 0):
        alone = train(params, clients.select(federation, [one]), key, model)
        assert_same(client(alone._replace(start=()), 0), client(together._replace(start=()), one))
    swapped = clients.select(clients.select(federation, [4, 2, 0]), [1, 0])
    pair = train(params, swapped, key, model)
    assert_same(pair.params, client(together.params, np.array([2, 4])))
    # Numbered anew, it is another client.
    other = train(params, swapped._replace(ids=None), key, model)
    assert not np.allclose(other.params["kernel"], pair.params["kernel"])


@pytest.mark.long
@pytest.mark.parametrize("chunk", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_the_chunk_changes_nothing_not_even_the_random_draws(federation, params, key, chunk):
    one_by_one = train(params, federation, key, NOISY, clients_per_chunk=1)
    assert_close(train(params, federation, key, NOISY, clients_per_chunk=chunk), one_by_one)


def test_permuting_the_clients_permutes_the_results(data, partition, federation, params, key):
    # One batch holds all of a client's data, so that the order within it is of no account.
    order = [3, 0, 4, 2, 1]
    models = train(params, federation, key, batch_size=12)
    permuted = clients.federation(data, [partition[i] for i in order])
    found = train(params, permuted, key, batch_size=12)
    for field in ("params", "steps", "loss"):
        assert_close(getattr(found, field), client(getattr(models, field), np.array(order)))


def test_clients_draw_apart_and_the_key_decides(data, params, key):
    twins = clients.federation(data, [np.arange(12), np.arange(12)])
    models = train(params, twins, key)
    assert not np.allclose(models.params["kernel"][0], models.params["kernel"][1])
    assert_same(train(params, twins, key), models)
    other = train(params, twins, jax.random.fold_in(key, 1))
    assert not np.allclose(other.params["kernel"], models.params["kernel"])


def test_a_client_without_examples_keeps_the_start(federation, params, key):
    models = train(params, federation, key)
    assert_same(client(models.params, 1), params)
    assert models.steps[1] == 0
    np.testing.assert_array_equal(models.loss[1], 0)


def test_without_steps_the_loss_is_the_mean_over_the_clients_examples(
    data, partition, federation, params, key
):
    models = train(params, federation, key, optimizer=optax.sgd(0.0))
    logits = data[0] @ np.asarray(params["kernel"]) + params["bias"]
    losses = np.asarray(jax.jit(MODEL.likelihood.negative_log_likelihood)(logits, data[1]))
    for i, rows in enumerate(partition):
        mean = losses[rows].sum() / max(len(rows), 1)
        np.testing.assert_allclose(models.loss[i], [mean] * 2, rtol=1e-12)


def test_leaves_outside_the_mask_keep_their_bits(federation, params, key):
    # Weight decay would move them even at gradient zero.
    models = train(params, federation, key, BIAS_ONLY)
    np.testing.assert_array_equal(models.frozen["kernel"], params["kernel"])
    for i in WITH_DATA:
        np.testing.assert_array_equal(models.models["kernel"][i], params["kernel"])
        assert not np.any(models.params["bias"][i] == params["bias"])


@pytest.mark.long
def test_leaves_outside_the_mask_do_not_touch_the_others(federation, params, key):
    # Clipping by the norm of the whole gradient would couple them.
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    masked = train(params, federation, key, BIAS_ONLY, optimizer=optimizer)
    biases = fj.Model(
        lambda bias, inputs: apply({"kernel": params["kernel"], "bias": bias}, inputs),
        likelihoods.categorical,
    )
    alone = train(params["bias"], federation, key, biases, optimizer=optimizer)
    assert_close(masked.params["bias"], alone.params)


@pytest.mark.long
def test_every_step_of_every_client_draws_anew(federation, params, key):
    def drawing_apply(params, inputs, key, weights):
        # The draw of the step is kept in place of the first feature.
        marked = inputs.at[:, 0].set(jax.random.normal(key))
        return logging_apply(params, marked, key, weights)

    model = LOGGING._replace(apply_train=drawing_apply)
    models = train(logging_params(params, steps=2 * 4), federation, key, model)
    taken = np.arange(8) < np.asarray(models.steps)[:, None]
    draws = np.asarray(models.statistics["log"])[taken][:, 0]
    assert len(np.unique(draws)) == draws.size == models.steps.sum()


def test_apply_train_is_told_which_rows_fill_up_a_minibatch(partition, federation, params, key):
    def counting_apply(params, inputs, key, weights):
        row = jnp.where(weights > 0, 1.0, 0.0)
        _, new = logging_apply(params, inputs.at[:, 0].set(row), key, weights)
        return apply(params["weights"], inputs), new

    model = LOGGING._replace(apply_train=counting_apply)
    models = train(logging_params(params, steps=2 * 4), federation, key, model)
    log = np.asarray(models.statistics["log"])
    for i, rows in enumerate(partition):
        counted = log[i][: int(models.steps[i])].sum(1)
        expected = [min(BATCH, len(rows) - at) for at in range(0, len(rows), BATCH)] * 2
        np.testing.assert_array_equal(counted, expected)


@pytest.mark.long
def test_augmented_inputs_are_drawn_in_every_step_and_in_training_only(federation, params, key):
    def drawn_by_hand(params, inputs, key, weights):
        return apply(params, jitter(jax.random.split(key)[0], inputs)), None

    augmented = MODEL._replace(apply_train=fj.networks.augmented(apply, jitter))
    models = train(params, federation, key, augmented)
    assert_same(models, train(params, federation, key, MODEL._replace(apply_train=drawn_by_hand)))
    plain = train(params, federation, key)
    assert np.all(models.params["kernel"][WITH_DATA] != plain.params["kernel"][WITH_DATA])
    found = fj.metrics.performance(augmented, params, federation)
    assert_same(found, fj.metrics.performance(MODEL, params, federation))


def test_the_start_survives_training(federation, params, key):
    before = jax.tree.map(np.array, (params, federation))
    train(params, federation, key)
    train(params, federation, key, progress=lambda *_: None)
    assert_same(jax.tree.map(np.array, (params, federation)), before)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_params_keep_their_precision(federation, params, key, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    models = train(params, federation, key)
    assert {leaf.dtype for leaf in jax.tree.leaves(models.params)} == {jnp.dtype(dtype)}
    assert np.isfinite(models.loss).all()


def test_progress_sees_every_epochs_losses(federation, params, key):
    seen = []
    models = train(
        params,
        federation,
        key,
        epochs=3,
        progress=lambda epoch, loss: seen.append((epoch, np.asarray(loss))),
    )
    assert [epoch for epoch, _ in seen] == [0, 1, 2]
    np.testing.assert_array_equal(np.stack([loss for _, loss in seen], 1), models.loss)
    assert (models.loss[WITH_DATA, -1] < models.loss[WITH_DATA, 0]).all()


def test_later_epochs_and_calls_compile_nothing(federation, params, key, compilations):
    other_key = jax.random.fold_in(key, 1)
    # A Python number is weakly typed, which the first epoch's results are not.
    params["unused"] = 1.0
    counts = []
    with compilations() as count:
        # A batch size of its own: earlier tests may have compiled the others.
        train(
            params,
            federation,
            key,
            batch_size=2,
            epochs=3,
            progress=lambda *_: counts.append(count()),
        )
    assert counts[0] == counts[1] == counts[2] > 0
    with compilations() as count:
        train(params, federation, other_key, batch_size=2, epochs=3, progress=lambda *_: None)
    assert count() == 0


def test_showing_progress_changes_no_bit_and_neither_way_compiles_twice(
    federation, params, key, compilations
):
    shown = train(params, federation, key, epochs=3, progress=lambda *_: None)
    at_once = train(params, federation, key, epochs=3)
    assert_same(shown, at_once)
    with compilations() as count:
        train(params, federation, key, epochs=3)
    assert count() == 0


@pytest.mark.parametrize("progress", [None, lambda *_: None])
def test_another_number_of_epochs_compiles_nothing(federation, params, key, compilations, progress):
    settings = {"progress": progress}
    short = train(params, federation, key, **settings)
    with compilations() as count:
        long = train(params, federation, key, epochs=7, **settings)
    # The array of the losses has another shape, and is cut out or put together; nothing else is.
    assert count() <= 1
    assert_same(long.loss[:, :2], short.loss)
    assert long.loss.shape == (len(SIZES), 7)
    assert_same(long.steps[WITH_DATA] * 2, short.steps[WITH_DATA] * 7)


@pytest.mark.long
def test_more_epochs_than_there_was_room_for_are_trained(federation, params, key):
    one = clients.select(federation, [3])
    settings = {"batch_size": 4, "optimizer": optax.sgd(1e-3)}
    models = train(params, one, key, epochs=70, **settings)
    assert models.loss.shape == (1, 70)
    assert (np.diff(models.loss[0]) < 0).all()
    shown = train(params, one, key, epochs=70, progress=lambda *_: None, **settings)
    assert_same(shown, models)


# What an algorithm's optimiser is given: it keeps what it saw, and moves nothing itself.


def watching(base):
    def init(params):
        return {
            "steps": jnp.zeros((), int),
            "last": jnp.zeros((), int),
            "from start": jnp.zeros(()),
            "extras": jnp.zeros(2),
        }

    def update(gradient, state, params, *, start, extras, last_epoch, **_):
        away = jax.tree.map(lambda w, s: jnp.abs(w - s).max(), params, start)
        seen = {
            "steps": state["steps"] + 1,
            "last": state["last"] + last_epoch,
            "from start": sum(jax.tree.leaves(away)),
            "extras": extras["own"] if extras else state["extras"],
        }
        return gradient, seen

    return fj.local_update.keep_state(optax.GradientTransformationExtraArgs(init, update), base)


WATCHING = watching(OPTIMIZER)
OWN = {"own": np.arange(2.0 * len(SIZES)).reshape(len(SIZES), 2)}


@pytest.mark.long
@pytest.mark.parametrize("chunk", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_an_optimiser_keeps_comes_back_of_every_client(
    federation, params, key, chunk, rounding
):
    settings = {"optimizer": WATCHING, "clients_per_chunk": chunk, "extras": OWN, "epochs": 3}
    models = train(params, federation, key, **settings)
    seen = models.extras
    np.testing.assert_array_equal(seen["steps"], models.steps)
    # A third of the steps are of the last of three epochs.
    np.testing.assert_array_equal(3 * seen["last"], models.steps)
    np.testing.assert_array_equal(seen["extras"][WITH_DATA], OWN["own"][WITH_DATA])
    plain = train(params, federation, key, epochs=3, clients_per_chunk=chunk)
    assert_close(models._replace(extras=()), plain, rounding)
    shown = train(params, federation, key, progress=lambda *_: None, **settings)
    assert_close(shown, models, rounding)


def test_an_optimiser_is_told_what_the_client_started_from(federation, params, key):
    # With one minibatch an epoch, the second step sees what the first one changed.
    one_step = train(params, federation, key, batch_size=12, epochs=1)
    two = train(params, federation, key, batch_size=12, optimizer=WATCHING)
    for i in WITH_DATA:
        moved = jax.tree.map(lambda w, s: np.abs(w - s).max(), client(one_step.params, i), params)
        assert_close(two.extras["from start"][i], sum(jax.tree.leaves(moved)))
    np.testing.assert_array_equal(two.extras["from start"][1], 0)


def test_without_extras_an_optimiser_is_given_none(federation, params, key):
    models = train(params, federation, key, optimizer=WATCHING)
    np.testing.assert_array_equal(models.extras["extras"], 0)


def test_other_extras_change_what_they_change_and_compile_nothing(
    federation, params, key, compilations
):
    def init(params):
        return optax.EmptyState()

    def shift(gradient, state, params, *, extras, **_):
        return jax.tree.map(jnp.subtract, gradient, extras), state

    optimizer = optax.chain(optax.GradientTransformationExtraArgs(init, shift), OPTIMIZER)

    def stacked(size):
        return jax.tree.map(lambda leaf: np.full((len(SIZES), *leaf.shape), size), params)

    still = train(params, federation, key, optimizer=optimizer, extras=stacked(0.0))
    assert_same(still, train(params, federation, key))
    with compilations() as count:
        moved = train(params, federation, key, optimizer=optimizer, extras=stacked(0.1))
    assert count() == 0
    assert np.all(moved.params["bias"][WITH_DATA] > still.params["bias"][WITH_DATA])


@pytest.mark.long
def test_leaves_outside_the_mask_are_not_held_back(federation, params, key):
    # The start of what is not trained is where it is: a pull towards the start is zero there.
    start = logging_params(params, steps=2 * 4)
    models = train(start, federation, key, LOGGING, optimizer=WATCHING)
    trained = train(params, federation, key, optimizer=WATCHING)
    assert_close(models.extras["from start"], trained.extras["from start"])
    pulled = fj.algorithms.fedprox(0.5).optimizer(OPTIMIZER)
    models = train(params, federation, key, BIAS_ONLY, optimizer=pulled)
    np.testing.assert_array_equal(models.frozen["kernel"], params["kernel"])


@pytest.mark.long
def test_an_optimiser_that_keeps_nothing_gives_nothing_back(federation, params, key):
    pulled = fj.algorithms.fedprox(0.5).optimizer(OPTIMIZER)
    models = train(params, federation, key, optimizer=pulled)
    assert models.extras == ()
    shown = train(params, federation, key, optimizer=pulled, progress=lambda *_: None)
    assert_same(shown, models)


@pytest.mark.parametrize("progress", [None, lambda *_: None])
def test_no_copy_of_the_clients_images_is_made(key, progress):
    images = np.zeros((200, 16, 16, 1), np.uint8)
    partition = np.split(np.arange(200), [150])
    federation = clients.federation((images, np.zeros(200, int)), partition)
    need = training.train_memory(
        fj.Model(lambda params, x: x.reshape(len(x), -1) @ params, likelihoods.categorical),
        np.zeros((256, 2), np.float32),
        federation,
        key=key,
        optimizer=OPTIMIZER,
        epochs=2,
        batch_size=2,
        progress=progress,
    )
    assert need.scratch < images.nbytes < need.resident


@pytest.mark.long
def test_progress_keeps_every_clients_optimiser_and_a_chunk_its_own_only(federation, params, key):
    params["unused"] = np.zeros(1000)

    def need(chunk=1, progress=None):
        return training.train_memory(
            MODEL,
            params,
            federation,
            key=key,
            optimizer=OPTIMIZER,
            epochs=2,
            batch_size=BATCH,
            clients_per_chunk=chunk,
            progress=progress,
        )

    momentum = 8 * 1000
    models = len(SIZES) * momentum
    together, apart = need(progress=print), need()
    assert apart.resident < 2 * models <= together.resident
    assert need(chunk=5).resident == apart.resident
    assert need(chunk=5).scratch - apart.scratch >= 4 * momentum


def test_predicting_memory_checks_as_training_does(federation, params, key):
    settings = {"key": key, "epochs": 2, "batch_size": BATCH}
    with pytest.raises(TypeError, match="'sgd'; expected an optax optimiser"):
        training.train_memory(MODEL, params, federation, optimizer="sgd", **settings)


@pytest.mark.long
def test_sequences_are_examples_whose_log_likelihoods_add_up(x64, key):
    sequences = np.random.default_rng(0).integers(0, 5, (6, 8))
    federation = clients.federation(
        (sequences[:, :-1], sequences[:, 1:]), [np.arange(4), np.arange(4, 6)]
    )
    table = fj.Model(lambda table, tokens: table[tokens], likelihoods.categorical)
    settings = {"optimizer": optax.sgd(0.1), "batch_size": 4}
    bigrams = train(np.zeros((5, 5)), federation, key, table, **settings)
    # One batch an epoch, and at first all five symbols are equally likely at all seven places.
    assert_close(bigrams.loss[:, 0], np.array([7 * np.log(5)] * 2))
    assert (bigrams.loss[:, 1] < bigrams.loss[:, 0]).all()


def test_regression_finds_the_linear_map(x64, key):
    inputs = np.eye(4)
    federation = clients.federation((inputs, 2 * inputs), [np.arange(4)])
    linear = fj.Model(lambda w, x: x @ w, likelihoods.gaussian)
    settings = {"optimizer": optax.sgd(0.5), "epochs": 150, "batch_size": 2}
    models = train(np.zeros((4, 4)), federation, key, linear, **settings)
    assert_close(models.params[0], 2 * np.eye(4), 1e-6)


def test_integer_params_are_refused_by_name(federation, params, key):
    params["bias"] = np.zeros(3, int)
    with pytest.raises(TypeError, match=r"'bias'.*int"):
        train(params, federation, key)


def test_targets_that_do_not_fit_the_outputs_are_refused(data, partition, params, key):
    for targets, error in ((data[1] + 1, ValueError), (data[1] / 1, TypeError)):
        with pytest.raises(error, match="categorical"):
            train(params, clients.federation((data[0], targets), partition), key)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs is 0; expected an integer of at least 1"),
        ({"epochs": 1.5}, ValueError, "epochs is 1.5"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"optimizer": "sgd"}, TypeError, "'sgd'; expected an optax optimiser"),
        ({"clients_per_chunk": 0}, ValueError, "clients_per_chunk is 0"),
        (
            {"extras": {"kernel": np.zeros((4, 3)), "bias": np.zeros((5, 3))}},
            ValueError,
            r"'kernel' of extras has shape \(4, 3\); expected a leading axis of 5 clients",
        ),
    ],
)
def test_bad_settings_are_refused(federation, params, key, settings, error, message):
    with pytest.raises(error, match=message):
        train(params, federation, key, **settings)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"kernel": True}, r"\['kernel'\].*\['bias', 'kernel'\]"),
        ({"kernel": 1, "bias": 0}, "expected Python's True"),
        ({"kernel": False, "bias": False}, "at least one True"),
    ],
)
def test_masks_that_do_not_fit_are_refused(federation, params, key, mask, message):
    with pytest.raises(ValueError, match=message):
        train(params, federation, key, fj.Model(apply, likelihoods.categorical, mask=mask))


@pytest.mark.long
def test_what_is_no_key_or_federation_is_refused(data, federation, params, key):
    with pytest.raises(TypeError, match=r"jax.random.key\(seed\)"):
        train(params, federation, 0)
    with pytest.raises(TypeError, match=r"tuple; expected the result of clients.federation"):
        train(params, data, key)
