"""Local training is what a loop over epochs and batches in Python would do, client by client."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fisherjax import clients, likelihoods, training

BATCH = 3
SIZES = (7, 0, 12, 4, 5)
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
def params(x64):
    rng = np.random.default_rng(2)
    return {"kernel": jnp.array(rng.normal(size=(4, 3))), "bias": jnp.array(rng.normal(size=3))}


def apply(params, inputs):
    return inputs @ params["kernel"] + params["bias"]


def noisy_apply(params, inputs, key):
    kept = jax.random.bernoulli(key, 0.7, inputs.shape)
    return apply(params, inputs * kept), None


def jitter(key, inputs):
    return inputs + 0.1 * jax.random.normal(key, inputs.shape)


def train(params, federation, key, **settings):
    settings = {"optimizer": OPTIMIZER, "epochs": 2, "batch_size": BATCH} | settings
    return training.train(apply, likelihoods.categorical, params, federation, key=key, **settings)


def assert_close(left, right, tolerance=1e-12):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right
    )


def client(stacked, index):
    return jax.tree.map(lambda leaf: leaf[index], stacked)


# A network whose leaf `log` [steps, B] keeps the first feature of every example it was shown.


def logging_params(params, steps):
    return {"weights": params, "log": jnp.full((steps, BATCH), -1.0), "step": jnp.zeros(())}


LOGGING_MASK = {"weights": {"kernel": True, "bias": True}, "log": False, "step": False}


def logging_apply(params, inputs, key):
    step = params["step"].astype(int)
    log = params["log"].at[step].set(inputs[:, 0])
    return apply(params["weights"], inputs), params | {"log": log, "step": params["step"] + 1}


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


@pytest.mark.parametrize("chunk", [1, 2])
def test_each_client_is_trained_as_by_hand_on_shuffled_whole_epochs(
    data, partition, params, key, chunk
):
    epochs = 2
    models = training.train(
        lambda params, inputs: apply(params["weights"], inputs),
        likelihoods.categorical,
        logging_params(params, steps=epochs * 4),
        clients.federation(data, partition),
        key=key,
        optimizer=OPTIMIZER,
        epochs=epochs,
        batch_size=BATCH,
        clients_per_chunk=chunk,
        mask=LOGGING_MASK,
        apply_train=logging_apply,
    )
    orders = set()
    for i, rows in enumerate(partition):
        steps = -(-len(rows) // BATCH)
        assert models.steps[i] == models.params["step"][i] == epochs * steps
        log = np.rint(np.asarray(models.params["log"][i]) * 30).astype(int)
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


def test_a_client_is_trained_the_same_alone_as_beside_a_bigger_one(data, partition, params, key):
    together = train(params, clients.federation(data, partition), key)
    alone = train(params, clients.federation(data, partition[:1]), key)
    assert_close(client(together.params, 0), client(alone.params, 0))
    assert_close(together.loss[0], alone.loss[0])


@pytest.mark.parametrize("chunk", [2, 5])
def test_the_chunk_changes_nothing_not_even_the_random_draws(data, partition, params, key, chunk):
    federation = clients.federation(data, partition)
    settings = {"augment": jitter, "apply_train": noisy_apply}
    one_by_one = train(params, federation, key, clients_per_chunk=1, **settings)
    assert_close(train(params, federation, key, clients_per_chunk=chunk, **settings), one_by_one)


def test_permuting_the_clients_permutes_the_results(data, partition, params, key):
    # One batch holds all of a client's data, so that the order within it is of no account.
    order = [3, 0, 4, 2, 1]
    models = train(params, clients.federation(data, partition), key, batch_size=12)
    permuted = clients.federation(data, [partition[i] for i in order])
    assert_close(train(params, permuted, key, batch_size=12), client(models, np.array(order)))


def test_clients_draw_apart_and_the_key_decides(data, params, key):
    twins = clients.federation(data, [np.arange(9), np.arange(9)])
    models = train(params, twins, key)
    assert not np.allclose(models.params["kernel"][0], models.params["kernel"][1])
    jax.tree.map(np.testing.assert_array_equal, train(params, twins, key), models)
    other = train(params, twins, jax.random.fold_in(key, 1))
    assert not np.allclose(other.params["kernel"], models.params["kernel"])


def test_a_client_without_examples_keeps_the_start(data, partition, params, key):
    models = train(params, clients.federation(data, partition), key)
    jax.tree.map(np.testing.assert_array_equal, client(models.params, 1), params)
    assert models.steps[1] == 0
    np.testing.assert_array_equal(models.loss[1], 0)


def test_without_steps_the_loss_is_the_mean_over_the_clients_examples(data, partition, params, key):
    models = train(params, clients.federation(data, partition), key, optimizer=optax.sgd(0.0))
    losses = likelihoods.categorical.negative_log_likelihood(apply(params, data[0]), data[1])
    for i, rows in enumerate(partition):
        assert_close(models.loss[i], [losses[rows].sum() / max(len(rows), 1)] * 2)


def test_leaves_outside_the_mask_keep_their_bits(data, partition, params, key):
    # Weight decay would move them even at gradient zero.
    federation = clients.federation(data, partition)
    models = train(params, federation, key, mask={"kernel": False, "bias": True})
    for i in (0, 2, 3, 4):
        np.testing.assert_array_equal(models.params["kernel"][i], params["kernel"])
        assert not np.any(models.params["bias"][i] == params["bias"])


def test_leaves_outside_the_mask_do_not_touch_the_others(data, partition, params, key):
    # Clipping by the norm of the whole gradient would couple them.
    federation = clients.federation(data, partition)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    mask = {"kernel": False, "bias": True}
    masked = train(params, federation, key, mask=mask, optimizer=optimizer)
    alone = training.train(
        lambda bias, inputs: apply({"kernel": params["kernel"], "bias": bias}, inputs),
        likelihoods.categorical,
        params["bias"],
        federation,
        key=key,
        optimizer=optimizer,
        epochs=2,
        batch_size=BATCH,
    )
    assert_close(masked.params["bias"], alone.params)


def test_every_step_of_every_client_draws_anew(data, partition, params, key):
    def drawing_apply(params, inputs, key):
        outputs, new = logging_apply(params, inputs, key)
        row = new["log"][params["step"].astype(int)].at[1].set(jax.random.normal(key))
        return outputs, new | {"log": new["log"].at[params["step"].astype(int)].set(row)}

    models = training.train(
        lambda params, inputs: apply(params["weights"], inputs),
        likelihoods.categorical,
        logging_params(params, steps=2 * 4),
        clients.federation(data, partition),
        key=key,
        optimizer=OPTIMIZER,
        epochs=2,
        batch_size=BATCH,
        mask=LOGGING_MASK,
        # The draw of the augmentation is kept in place of the first feature.
        augment=lambda key, inputs: inputs.at[:, 0].set(jax.random.normal(key)),
        apply_train=drawing_apply,
    )
    taken = np.arange(8) < np.asarray(models.steps)[:, None]
    draws = np.asarray(models.params["log"])[taken][:, :2]
    assert len(np.unique(draws)) == draws.size == 2 * models.steps.sum()


def test_the_start_survives_training(data, partition, params, key):
    federation = clients.federation(data, partition)
    before = jax.tree.map(np.array, (params, federation))
    train(params, federation, key)
    jax.tree.map(np.testing.assert_array_equal, (params, federation), before)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_params_keep_their_precision(data, partition, params, key, dtype):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    models = train(params, clients.federation(data, partition), key)
    assert {leaf.dtype for leaf in jax.tree.leaves(models.params)} == {jnp.dtype(dtype)}
    assert np.isfinite(models.loss).all()


def test_progress_sees_every_epochs_losses(data, partition, params, key):
    seen = []
    models = train(
        params,
        clients.federation(data, partition),
        key,
        epochs=3,
        progress=lambda epoch, loss: seen.append((epoch, np.asarray(loss))),
    )
    assert [epoch for epoch, _ in seen] == [0, 1, 2]
    np.testing.assert_array_equal(np.stack([loss for _, loss in seen], 1), models.loss)
    assert (models.loss[[0, 2, 3, 4], -1] < models.loss[[0, 2, 3, 4], 0]).all()


def test_later_epochs_and_calls_compile_nothing(data, partition, params, key, compilations):
    federation = clients.federation(data, partition)
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
    data, partition, params, key, compilations
):
    federation = clients.federation(data, partition)
    settings = {"batch_size": 2, "epochs": 3, "optimizer": optax.sgd(0.1, 0.9)}
    shown = train(params, federation, key, **settings, progress=lambda *_: None)
    at_once = train(params, federation, key, **settings)
    jax.tree.map(np.testing.assert_array_equal, shown, at_once)
    with compilations() as count:
        train(params, federation, key, **settings)
    assert count() == 0


def test_no_copy_of_the_clients_images_is_made(key):
    images = np.zeros((200, 16, 16, 1), np.uint8)
    partition = np.split(np.arange(200), [150])
    federation = clients.federation((images, np.zeros(200, int)), partition)
    need = training.train_memory(
        lambda params, x: x.reshape(len(x), -1) @ params,
        likelihoods.categorical,
        jnp.zeros((256, 2)),
        federation,
        key=key,
        optimizer=OPTIMIZER,
        epochs=2,
        batch_size=2,
    )
    assert need.scratch < images.nbytes < need.resident


def test_sequences_are_examples_whose_log_likelihoods_add_up(x64, key):
    sequences = np.random.default_rng(0).integers(0, 5, (6, 8))
    federation = clients.federation(
        (sequences[:, :-1], sequences[:, 1:]), [np.arange(4), np.arange(4, 6)]
    )
    bigrams = training.train(
        lambda table, tokens: table[tokens],
        likelihoods.categorical,
        jnp.zeros((5, 5)),
        federation,
        key=key,
        optimizer=optax.sgd(0.1),
        epochs=2,
        batch_size=4,
    )
    # One batch an epoch, and at first all five symbols are equally likely at all seven places.
    assert_close(bigrams.loss[:, 0], [7 * np.log(5)] * 2)
    assert (bigrams.loss[:, 1] < bigrams.loss[:, 0]).all()


def test_regression_finds_the_linear_map(x64, key):
    inputs = np.eye(4)
    models = training.train(
        lambda w, x: x @ w,
        likelihoods.gaussian,
        jnp.zeros((4, 4)),
        clients.federation((inputs, 2 * inputs), [np.arange(4)]),
        key=key,
        optimizer=optax.sgd(0.5),
        epochs=150,
        batch_size=2,
    )
    assert_close(models.params[0], 2 * np.eye(4), 1e-6)


def stacked_like(params, seed):
    source = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(source.normal(size=(len(SIZES), *leaf.shape)) / 10), params
    )


def test_the_proximal_term_pulls_every_step_back_to_the_start(data, partition, params, key):
    federation, mu = clients.federation(data, partition), 0.7
    pull = optax.stateless(
        lambda gradient, now: jax.tree.map(
            lambda g, w, start: g + mu * (w - start), gradient, now, params
        )
    )
    expected = train(params, federation, key, optimizer=optax.chain(pull, OPTIMIZER))
    models = train(params, federation, key, proximal=mu)
    assert_close(models, expected)
    shown = train(params, federation, key, proximal=mu, progress=lambda *_: None)
    assert_close(shown, expected)
    free = train(params, federation, key)
    assert np.all(np.abs(models.params["bias"] - free.params["bias"])[[0, 2, 3, 4]] > 1e-6)


def test_the_correction_is_subtracted_after_each_step_and_hidden_from_the_optimiser(
    data, partition, params, key
):
    # One batch holds all of a client's data, so that the order within it is of no account.
    federation, correction = clients.federation(data, partition), stacked_like(params, 3)
    settings = {"epochs": 3, "batch_size": 12, "correction": correction}
    models = train(params, federation, key, **settings)
    for i in (0, 2, 3, 4):
        own, state = params, OPTIMIZER.init(params)
        for _ in range(3):
            batch = data[0][partition[i]], data[1][partition[i]]
            own, state, _ = step_by_hand(own, state, *batch)
            own = jax.tree.map(jnp.subtract, own, client(correction, i))
        assert_close(client(models.params, i), own)
    assert_close(client(models.params, 1), params)
    assert_close(train(params, federation, key, progress=lambda *_: None, **settings), models)
    assert_close(train(params, federation, key, clients_per_chunk=2, **settings), models)


def test_leaves_outside_the_mask_are_not_held_back(data, partition, params, key):
    federation = clients.federation(data, partition)
    models = train(
        params,
        federation,
        key,
        mask={"kernel": False, "bias": True},
        proximal=0.5,
        correction=stacked_like(params, 3),
    )
    for i in range(5):
        np.testing.assert_array_equal(models.params["kernel"][i], params["kernel"])


def test_no_restraint_changes_no_bit_and_its_size_compiles_nothing(
    data, partition, params, key, compilations
):
    federation = clients.federation(data, partition)
    free = train(params, federation, key)
    zeros = jax.tree.map(jnp.zeros_like, stacked_like(params, 0))
    jax.tree.map(np.testing.assert_array_equal, train(params, federation, key, proximal=0.0), free)
    still = train(params, federation, key, correction=zeros)
    jax.tree.map(np.testing.assert_array_equal, still, free)
    corrections = [stacked_like(params, seed) for seed in (3, 4)]
    train(params, federation, key, proximal=0.1, correction=corrections[0])
    with compilations() as count:
        train(params, federation, key, proximal=0.2, correction=corrections[1])
        train(params, federation, key)
        train(params, federation, key, proximal=0.0)
    assert count() == 0


def test_integer_params_are_refused_by_name(data, partition, params, key):
    params["bias"] = jnp.zeros(3, int)
    with pytest.raises(TypeError, match=r"'bias'.*int"):
        train(params, clients.federation(data, partition), key)


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
        ({"proximal": -0.1}, ValueError, "proximal is -0.1; expected a finite number, zero or"),
        ({"proximal": np.nan}, ValueError, "proximal is nan"),
        (
            {"correction": {"kernel": np.zeros((4, 3)), "bias": np.zeros((5, 3))}},
            ValueError,
            r"'kernel': \(4, 3\).*'kernel': \(5, 4, 3\).*leading axis of the 5 clients",
        ),
        ({"mask": {"kernel": True}}, ValueError, r"\['kernel'\].*\['bias', 'kernel'\]"),
        ({"mask": {"kernel": 1, "bias": 0}}, ValueError, "expected Python's True"),
        ({"mask": {"kernel": False, "bias": False}}, ValueError, "at least one True"),
    ],
)
def test_bad_settings_are_refused(data, partition, params, key, settings, error, message):
    with pytest.raises(error, match=message):
        train(params, clients.federation(data, partition), key, **settings)


def test_what_is_no_key_or_federation_is_refused(data, partition, params, key):
    with pytest.raises(TypeError, match=r"jax.random.key\(seed\)"):
        train(params, clients.federation(data, partition), 0)
    with pytest.raises(TypeError, match=r"tuple; expected the result of clients.federation"):
        train(params, data, key)
