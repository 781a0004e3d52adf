"""`must_improve` leaves out the clients whose training raised the loss of their own examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import merging, rounds, training
from tests.test_rounds import BATCH, CLIENTS, EPOCHS, MODEL, assert_same, federated, play
from tests.test_rounds import world as world

KEY, RATE = jax.random.key(0), optax.sgd(3.0)


def losses(models, federation):
    """Compute the mean loss of each client's model without anything that rounds use."""

    def of_client(place):
        rows = np.asarray(federation.indices)[place, : int(federation.sizes[place])]
        outputs = MODEL.apply(jax.tree.map(lambda x: x[place], models), federation.inputs[rows])
        chosen = jax.nn.log_softmax(outputs)[np.arange(len(rows)), federation.targets[rows]]
        return -float(chosen.mean()) if len(rows) else 0.0

    return np.array([of_client(place) for place in range(federation.num_clients)])


def trained_by_all(world, optimizer):
    federation, params = world
    key = jax.random.fold_in(KEY, 0)
    how = {"optimizer": optimizer, "epochs": EPOCHS, "batch_size": BATCH}
    trained = training.train(MODEL, params, federation, key=key, **how)
    everywhere = jax.tree.map(lambda x: jnp.stack([x] * CLIENTS), params)
    before, after = (losses(x, federation) for x in (everywhere, trained.params))
    return trained, after > before


@pytest.mark.parametrize("name", ["fedavg", pytest.param("fedfisher_kfac", marks=pytest.mark.long)])
def test_a_round_merges_exactly_the_clients_that_improved(world, name):
    federation, params = world
    trained, worse = trained_by_all(world, RATE)
    assert 1 <= worse.sum() <= CLIENTS - 2
    experiment = federated(name, optimizer=RATE, must_improve=True)
    (state, done), *_ = play(experiment, world, number=1)
    # The cohort is everybody, in an order of its own.
    np.testing.assert_array_equal(done.worse, worse[np.asarray(done.cohort)])
    assert not done.diverged.any()
    left = np.flatnonzero(~worse)
    alone = fj.clients.select(federation, left)
    rest = trained._replace(params=jax.tree.map(lambda x: x[left], trained.params))
    rest = rest._replace(loss=trained.loss[left], steps=trained.steps[left])
    key = jax.random.fold_in(KEY, 0)
    updates = merging.summarize(experiment.algorithm, rest, alone, key=key)
    merged, _, _ = merging.merge(experiment.algorithm, params, updates, alone.sizes, key=key)
    assert_same(state.params, merged, 1e-6)
    shares = np.asarray(alone.sizes) / np.asarray(alone.sizes).sum()
    np.testing.assert_allclose(done.loss, shares @ np.asarray(rest.loss)[:, -1])


def test_where_everybody_improves_nothing_changes(world):
    assert not trained_by_all(world, optax.sgd(0.01))[1].any()
    plain, guarded = (
        play(federated(optimizer=optax.sgd(0.01), must_improve=asked), world)[-1]
        for asked in (False, True)
    )
    assert not guarded[1].worse.any()
    assert_same(plain[0], guarded[0], 1e-12)


def test_a_round_in_which_nobody_improves_changes_only_the_number(world):
    climbing = federated("scaffold", optimizer=optax.sgd(-0.05), must_improve=True)
    first = climbing.init(world[1], CLIENTS)
    (state, done), *_ = play(climbing, world, number=1, start=first)
    # A client without examples neither gains nor loses, and has no weight.
    np.testing.assert_array_equal(done.worse, np.asarray(world[0].sizes)[done.cohort] > 0)
    assert np.isnan(done.loss)
    assert_same(state._replace(number=first.number), first)


def test_a_client_that_is_left_out_keeps_its_own_state(world):
    experiment = federated("scaffold", optimizer=RATE, must_improve=True)
    first = experiment.init(world[1], CLIENTS)
    (state, done), *_ = play(experiment, world, number=1, start=first)
    kept = jax.tree.leaves(state.local)
    changed = np.asarray([(x != 0).any(tuple(range(1, x.ndim))) for x in kept])
    some = np.asarray(done.worse)
    assert some.any()
    assert not changed[:, np.asarray(done.cohort)[some]].any()
    assert changed[:, np.asarray(done.cohort)[~some]].any()


def test_running_statistics_are_judged_with_the_model(world):
    """Training that improves the weights and spoils what inference uses is no improvement."""
    federation, params = world

    def apply(params, inputs):
        return MODEL.apply(params["net"], inputs) * params["scale"]

    def apply_train(params, inputs, key, weights):
        return MODEL.apply(params["net"], inputs), params | {"scale": jnp.asarray(-50.0)}

    mask = {"net": jax.tree.map(lambda _: True, params), "scale": False}
    model = fj.Model(apply, fj.likelihoods.categorical, apply_train=apply_train, mask=mask)
    how = {"optimizer": optax.sgd(0.01), "epochs": EPOCHS, "batch_size": BATCH}
    whole = {"net": params, "scale": jnp.asarray(1.0)}
    for asked, left_out in ((False, 0), (True, (np.asarray(federation.sizes) > 0).sum())):
        experiment = rounds.federated(
            model, fj.algorithms.fedavg(), cohort=CLIENTS, must_improve=asked, **how
        )
        state = experiment.init(whole, federation)
        (_, done), *_ = rounds.run(experiment, state, federation, key=KEY, rounds=1)
        assert done.worse.sum() == left_out


def test_it_is_refused_where_losses_are_private_and_must_be_a_bool():
    private = fj.privacy.dp_sgd(MODEL, clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="must_improve compares losses"):
        federated("fedavg", model=private, must_improve=True)
    with pytest.raises(TypeError, match="must_improve is an int"):
        federated("fedavg", must_improve=1)
