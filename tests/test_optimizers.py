"""Any optimiser of optax trains as in a plain loop, or is refused before anything is compiled."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import _optimizers, algorithms
from fisherjax._core import output_checks

SIZES, EPOCHS = (9, 6), 5
SOURCE = np.random.default_rng(0)
X, Y = SOURCE.normal(size=(15, 4)), SOURCE.integers(0, 3, 15)
START = {"W": SOURCE.normal(size=(4, 3)), "b": SOURCE.normal(size=3)}
MODEL = fj.Model(lambda p, x: x @ p["W"] + p["b"], fj.likelihoods.categorical)
contrib = optax.contrib


def labels(params):
    return {"W": "a", "b": "z"}


def by_axes(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def multi_transform():
    return optax.multi_transform({"a": optax.sgd(0.1), "z": optax.set_to_zero()}, labels(None))


def at_params(params, state, epochs):
    del state, epochs
    return params


def between_steps(params, state, epochs):
    """Between two steps of SAM the params are where it looks."""
    return state.cache if epochs % 2 else params


def averaged(params, state, epochs):
    del epochs
    return contrib.schedule_free_eval_params(state, params)


class Optimizer(NamedTuple):
    """How one is made, what its `update` takes in a plain loop, and where the model is found."""

    make: Callable
    takes: tuple[str, ...] = ()
    model: Callable = at_params


_OPTIMIZERS = {
    "sgd": (lambda: optax.sgd(0.3, 0.9), ()),
    "multi_transform": (multi_transform, ()),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1), ()),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adam(0.1), 2), ()),
    "masked": (lambda: optax.chain(optax.masked(optax.trace(0.9), by_axes), optax.scale(-0.2)), ()),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.adam(0.1), 3), ()),
    "adamw": (lambda: optax.adamw(0.1, weight_decay=0.3, mask=by_axes), ()),
    "muon": (lambda: contrib.muon(0.1), ()),
    "reduce_on_plateau": (
        lambda: optax.chain(optax.sgd(3.0), contrib.reduce_on_plateau(patience=1)),
        ("value",),
    ),
    "polyak_sgd": (lambda: optax.polyak_sgd(1.0), ("value",)),
    "MultiSteps(polyak_sgd)": (lambda: optax.MultiSteps(optax.polyak_sgd(1.0), 2), ("value",)),
    "backtracking": (
        lambda: optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=5)
        ),
        ("value", "grad", "value_fn"),
    ),
    "lbfgs": (optax.lbfgs, ("value", "grad", "value_fn")),
    "sam": (lambda: contrib.sam(optax.sgd(0.3), optax.sgd(0.1)), (), between_steps),
    "sam, opaque": (
        lambda: contrib.sam(optax.sgd(0.3), optax.sgd(0.1), opaque_mode=True),
        ("grad_fn",),
    ),
    "schedule_free": (lambda: contrib.schedule_free(optax.sgd(0.5), 0.5), (), averaged),
}
OPTIMIZERS = {name: Optimizer(*own) for name, own in _OPTIMIZERS.items()}
# Of the same interface as others that are always asked.
ALIKE = {"inject_hyperparams", "masked", "adamw", "muon", "polyak_sgd"}


def priced(names):
    return [pytest.param(x, marks=pytest.mark.slow) if x in ALIKE else x for x in names]


@functools.cache
def made(name):
    return OPTIMIZERS[name].make()


@pytest.fixture
def world(x64):
    data = X, Y
    rows = np.split(np.arange(15), [SIZES[0]])
    return fj.clients.federation(data, rows), jax.tree.map(jnp.asarray, START)


def loss(params, rows, pull=0.0):
    """Mean negative log-likelihood of some examples, and a pull to the start, in optax's words."""
    z = X[rows] @ params["W"] + params["b"]
    nll = optax.softmax_cross_entropy_with_integer_labels(z, Y[rows]).mean()
    squares = jax.tree.map(lambda w, s: jnp.sum((w - s) ** 2), params, START)
    return nll + pull / 2 * sum(jax.tree.leaves(squares))


def by_hand(name, rows, pull=0.0, epochs=EPOCHS):
    """The plain loop of optax's own documentation, one step an epoch."""
    optimizer, own = made(name), OPTIMIZERS[name]
    of = functools.partial(loss, rows=rows, pull=pull)
    params = jax.tree.map(jnp.asarray, START)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        value, gradient = jax.value_and_grad(of)(params)
        told = {"value": value, "grad": gradient, "value_fn": of}
        told["grad_fn"] = lambda params, _: jax.grad(of)(params)
        told = {key: told[key] for key in own.takes}
        updates, state = optimizer.update(gradient, state, params, **told)
        return optax.apply_updates(params, updates), state

    for _ in range(epochs):
        params, state = step(params, state)
    return own.model(params, state, epochs)


def train(world, optimizer, epochs=EPOCHS, **options):
    federation, start = world
    how = {"key": jax.random.key(0), "optimizer": optimizer, "epochs": epochs, "batch_size": 9}
    return fj.training.train(options.pop("model", MODEL), start, federation, **how, **options)


def assert_like(params, name, **how):
    for client, rows in enumerate(np.split(np.arange(15), [SIZES[0]])):
        own = by_hand(name, rows, **how)
        for leaf in START:
            np.testing.assert_allclose(params[leaf][client], own[leaf], rtol=1e-9, atol=1e-10)


@pytest.mark.long
@pytest.mark.parametrize("name", priced(OPTIMIZERS))
def test_training_is_the_plain_loop(world, name):
    """Whole clients are one minibatch, so that the order of examples does not matter."""
    assert_like(train(world, made(name)).params, name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sam", "schedule_free", "reduce_on_plateau"])
def test_epochs_one_at_a_time_and_all_at_once_end_alike(world, name):
    seen = []
    found = train(world, made(name), progress=lambda epoch, losses: seen.append(epoch))
    assert_like(found.params, name)
    assert seen == list(range(EPOCHS))
    assert all(type(epoch) is int for epoch in seen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lbfgs", "reduce_on_plateau", "sam, opaque", "adamw", "sam"])
def test_under_fedprox_the_loss_has_its_pull(world, name):
    optimizer = algorithms.fedprox(mu=0.7).optimizer(made(name))
    assert_like(train(world, optimizer, epochs=4).params, name, pull=0.7, epochs=4)


@pytest.mark.long
@pytest.mark.parametrize("name", ["reduce_on_plateau", "multi_transform"])
def test_rounds_train_likewise(world, name):
    federation, start = world
    how = {"optimizer": made(name), "epochs": 3, "batch_size": 9}
    experiment = fj.rounds.federated(MODEL, algorithms.fedavg(), cohort=2, **how)
    rounds = fj.rounds.run(
        experiment, experiment.init(start, 2), federation, key=jax.random.key(0), rounds=1
    )
    ((_, done),) = rounds
    assert_like(done.trained.params, name, epochs=3)


@pytest.mark.long
def test_an_optimiser_that_tells_leaves_apart_has_a_length_for_each(world):
    """FedNova: tau_i steps of 0.1 for one leaf, of 0.3 for another, none for a frozen one."""
    federation, start = world
    start = start | {"c": jnp.ones(3), "d": jnp.ones(2)}
    rates = {"W": 0.1, "b": 0.0, "c": 0.3, "d": 0.1}
    each = {name: optax.sgd(rate) for name, rate in rates.items()}
    base = optax.multi_transform(each, {name: name for name in start})
    model = fj.Model(
        lambda p, x: (x @ p["W"] + p["b"]) * p["c"] + p["d"].sum(), fj.likelihoods.categorical
    )
    nova = algorithms.fednova()
    how = {"key": jax.random.key(0), "epochs": 2, "batch_size": 2}
    trained = fj.training.train(model, start, federation, optimizer=nova.optimizer(base), **how)
    sent = fj.merging.summarize(nova, trained, federation, key=jax.random.key(0))
    steps = np.array([2 * 5, 2 * 3])
    for name, rate in rates.items():
        np.testing.assert_allclose(sent.values["length"][name], rate * steps, rtol=1e-12)
    merged, _, _ = fj.merging.merge(nova, start, sent, SIZES)
    shares = np.array(SIZES) / 15
    for name in start:
        first, ends = np.asarray(start[name]), np.asarray(trained.params[name])
        changes = sum(p * (w - first) / t for p, w, t in zip(shares, ends, steps, strict=True))
        np.testing.assert_allclose(merged[name], first + shares @ steps * changes, rtol=1e-10)


# As optimisers of gradients of single examples, it takes the first axis for theirs.
BATCHED = optax.stateless(lambda updates, _: jax.tree.map(lambda leaf: leaf.mean(0), updates))
REFUSED = {
    "lookahead": (optax.lookahead(optax.sgd(0.1), 2, 0.5), "updates params themselves"),
    "labels of other params": (
        optax.multi_transform({"a": optax.sgd(0.1)}, {"V": "a"}),
        r"cannot start from these params .*\['W', 'b'\]",
    ),
    "per-example gradients": (BATCHED, r"optimizer (cannot take a step|makes steps)"),
    "what is not told": (optax.contrib.sophia(0.1), "optimizer cannot take a step"),
    "a part": (
        optax.masked(contrib.schedule_free(optax.sgd(0.1), 0.1), {"W": True, "b": False}),
        "for a part of the params",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_refused_before_anything_is_compiled(world, name, compilations):
    optimizer, words = REFUSED[name]
    # Small programs make keys, and find the range of the labels.
    federation, start = world
    jax.random.key(0)
    output_checks.outputs(MODEL, start, federation.inputs, federation.targets)
    for method in (algorithms.fedavg(), algorithms.fedprox()):
        with compilations() as count, pytest.raises(ValueError, match=words):
            train(world, method.optimizer(optimizer))
        assert count() == 0


def test_no_loss_is_told_of_private_gradients(world):
    private = fj.privacy.dp_sgd(MODEL, clip=1.0, noise_multiplier=1.0)
    for name in ("lbfgs", "reduce_on_plateau", "polyak_sgd", "sam, opaque"):
        with pytest.raises(ValueError, match=r"cannot take a step .*passes it no loss"):
            train(world, made(name), model=private)


@pytest.mark.slow
def test_private_gradients_train_by_what_needs_only_them(world):
    """Without noise, and a bound above all gradients, they are the gradients."""
    private = fj.privacy.dp_sgd(MODEL, clip=1e6, noise_multiplier=0.0)
    for name in ("sam", "adamw"):
        assert_like(train(world, made(name), model=private).params, name)


def test_the_server_has_no_loss(world):
    _, start = world
    for name in ("lbfgs", "reduce_on_plateau", "sam, opaque"):
        method = algorithms.with_server_optimizer(algorithms.fedavg(), made(name))
        with pytest.raises(ValueError, match=r"server_optimizer cannot take a step .*has no loss"):
            method.link.init(start, 2)
    for name in ("sam", "schedule_free"):
        method = algorithms.with_server_optimizer(algorithms.fedavg(), made(name))
        with pytest.raises(ValueError, match="The server measures every step"):
            method.link.init(start, 2)
    ahead = optax.lookahead(optax.sgd(1.0), 2, 0.5)
    method = algorithms.with_server_optimizer(algorithms.fedavg(), ahead)
    with pytest.raises(ValueError, match="updates params themselves"):
        method.link.init(start, 2)


def test_methods_that_go_by_steps_refuse_what_is_not_where_its_answer_is(world):
    for method, called in ((algorithms.fednova(), "FedNova"), (algorithms.scaffold(), "SCAFFOLD")):
        for name in ("sam", "schedule_free"):
            with pytest.raises(ValueError, match=f"^{called} measures every step"):
                train(world, method.optimizer(made(name)))
    with pytest.raises(ValueError, match=r"^The optimizer that FedNova wraps cannot .*no loss"):
        train(world, algorithms.fednova().optimizer(made("polyak_sgd")))


def test_an_optimiser_is_told_the_most_that_it_takes():
    taken = []

    def update(updates, state, params=None, *, value=None, last_epoch=None):
        taken.append((value is not None, last_epoch is not None))
        return updates, state

    base = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    given = {"value": 1.0, "grad": 2.0, "start": 3.0, "last_epoch": True}
    w = jnp.ones(2)
    _optimizers.with_extra_args(base).update(w, base.init(w), w, **given)
    # Around it, a chain takes anything and passes it on: there are no names to go by.
    sam = optax.chain(optax.clip(1.0), made("sam"))
    _optimizers.with_extra_args(sam).update(w, sam.init(w), w, **given)
    assert taken == [(True, True)]
