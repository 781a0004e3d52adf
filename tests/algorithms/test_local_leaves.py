"""Leaves that clients keep: merged as if they were not there, and never sent."""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, rounds, training, tree
from fisherjax.algorithms import keep_local
from tests.methods import EXACT, SOME_SLOW, exactly, laws

RATE = 0.1
SGD = optax.sgd(RATE)  # one, as programs are known by it


def apply(params, x):
    hidden = jnp.tanh(x @ params["body"]["kernel"] + params["body"]["bias"])
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)


def is_head(name):
    return name.startswith("head")


def is_bias(name):
    return name == "b"


@pytest.fixture
def small(x64):
    """Three clients of a network of two layers, and a start."""
    source = np.random.default_rng(0)
    data = source.normal(size=(15, 3)), source.integers(0, 2, 15)
    shapes = {"kernel": (3, 4), "bias": (4,)}, {"kernel": (4, 2), "bias": (2,)}
    body, head = ({name: source.normal(size=s) for name, s in of.items()} for of in shapes)
    federation = clients.federation(data, np.split(np.arange(15), [7, 10]))
    return federation, {"body": body, "head": head}


def train(small, optimizer):
    federation, start = small
    options = {"key": jax.random.key(1), "epochs": 2, "batch_size": 3}
    return training.train(MODEL, start, federation, optimizer=optimizer, **options)


def merged(method, small, trained):
    federation, start = small
    updates = merging.summarize(method, trained, federation, key=jax.random.key(0))
    return updates, merging.merge(method, start, updates, federation.weights)[0]


@pytest.mark.long
@pytest.mark.parametrize("name", SOME_SLOW)
def test_what_is_shared_merges_as_without_private_leaves_where_layers_do_not_couple(small, name):
    """The law that the registry calls layerwise."""
    start = small[1]
    method = algorithms.make(name, MODEL, **exactly(name))
    # Private leaves change nothing in the first round of training.
    trained = train(small, method.optimizer(SGD))
    _, expected = merged(method, small, trained)
    shared = keep_local(method, is_head)
    if "layerwise" not in laws(name):
        found = start["body"]
        with contextlib.suppress(ValueError):  # where a method takes all layers or none
            found = merged(shared, small, trained)[1]["body"]
        errors = jax.tree.map(lambda a, b: np.abs(np.subtract(a, b)).max(), found, expected["body"])
        assert max(jax.tree.leaves(errors)) > 1e-6
        return
    updates, found = merged(shared, small, trained)
    chex.assert_trees_all_close(found["body"], expected["body"], rtol=1e-9, atol=1e-12)
    chex.assert_trees_all_equal(found["head"], start["head"])
    assert not any("head" in leaf for leaf in tree.names(updates.values))


@pytest.mark.long
def test_the_full_fisher_of_shared_leaves_is_a_block_of_the_whole(small):
    federation, start = small
    whole = fj.fisher.full(MODEL, start, fj.Examples(federation.inputs, federation.targets))
    times = jax.jit(fj.fisher.Dense.mv)
    for part in start:
        block = jax.jit(lambda names, whole: whole.select(names), static_argnums=0)(
            (f"{part}/kernel", f"{part}/bias"), whole
        )
        vector = jax.tree.map(np.zeros_like, start) | {part: start[part]}
        product = times(block, {f"{part}/{name}": leaf for name, leaf in start[part].items()})
        expected = {f"{part}/{name}": leaf for name, leaf in times(whole, vector)[part].items()}
        chex.assert_trees_all_close(product, expected, rtol=1e-9, atol=1e-12)
    # And merged by it, clients whose shared leaves are equal get them back.
    method = algorithms.make("fedfisher_full", MODEL, solver=EXACT, damping=0.1)
    models = [start, start | {"head": jax.tree.map(np.negative, start["head"])}]
    two = federation._replace(indices=federation.indices[:2], sizes=federation.sizes[:2])
    method = keep_local(method, is_head)
    updates = merging.summarize(method, models, two, key=jax.random.key(0))
    found = merging.merge(method, start, updates)[0]
    chex.assert_trees_all_close(found["body"], start["body"], rtol=1e-9)


def play(method, start, world, number, cohort=4):
    options = {"optimizer": SGD, "epochs": 1, "batch_size": 2}
    experiment = rounds.federated(world.model, method, cohort=cohort, **options)
    state = experiment.init(start, world.federation.num_clients)
    key = jax.random.key(0)
    played = list(rounds.run(experiment, state, world.federation, key=key, rounds=number))
    return experiment, played


@pytest.mark.long
def test_rounds_are_those_of_the_pseudocode(regression, draw):
    """Every client descends from the shared kernel and its own bias; kernels are averaged."""
    start, sizes = draw(0), np.array(regression.sizes)
    whole = regression.sizes[-1]  # one batch an epoch: no shuffling to follow
    options = {"optimizer": SGD, "epochs": 1, "batch_size": whole}
    method = keep_local(algorithms.fedavg(), is_bias)
    experiment = rounds.federated(regression.model, method, cohort=2, **options)
    state = experiment.init(start, 4)
    kernel, biases = start["w"], [start["b"]] * 4
    for now, done in rounds.run(
        experiment, state, regression.federation, key=jax.random.key(0), rounds=4
    ):
        drawn, ends = done.cohort.tolist(), []
        for i in drawn:
            own = {"w": kernel, "b": biases[i]}
            if sizes[i]:
                _, gradient = regression.loss_and_gradient(own, *regression.own(i))
                own = jax.tree.map(lambda x, g: np.asarray(x) - RATE * np.asarray(g), own, gradient)
            biases[i] = own["b"]
            ends.append(own["w"])
        shares = sizes[drawn] / sizes[drawn].sum()
        kernel = sum(share * end for share, end in zip(shares, ends, strict=True))
        expected = {"w": np.stack([kernel] * 4), "b": np.stack(biases)}
        chex.assert_trees_all_close(experiment.models(now, 4), expected, rtol=1e-12)
        chex.assert_trees_all_equal(now.params["b"], start["b"])


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "fedavg",
        pytest.param("fednova", marks=pytest.mark.slow),
        "scaffold",
        pytest.param("fedfish_last_epoch", marks=pytest.mark.slow),
        "fedfisher_diag",
    ],
)
def test_private_leaves_are_neither_sent_nor_lost(regression, draw, name):
    start = draw(0) | {"extra": jnp.zeros(5)}  # a leaf that no output depends on
    method = algorithms.make(name, regression.model)
    kept = keep_local(method, lambda leaf: leaf == "extra")
    _, [*_, (expected, _)] = play(method, draw(0), regression, 3)
    experiment, [*_, (state, _)] = play(kept, start, regression, 3)
    for leaf in ("w", "b"):
        chex.assert_trees_all_close(state.params[leaf], expected.params[leaf], rtol=1e-7, atol=1e-9)
    without = rounds.federated(
        regression.model, method, cohort=4, optimizer=SGD, epochs=1, batch_size=2
    ).traffic(draw(0), regression.federation)
    assert experiment.traffic(start, regression.federation) == without


def test_scaffold_does_not_correct_what_the_server_never_sees(regression, draw):
    method = keep_local(algorithms.scaffold(), is_bias)
    experiment, [*_, (state, _)] = play(method, draw(0), regression, 2)
    own = jax.tree.map(lambda x: np.asarray(x)[0], state.local)
    method = experiment.algorithm
    message = method.link.broadcast(state.params, state.algorithm, None)
    _, correction = method.link.receive(message, own)
    assert np.abs(correction["w"]).max() > 0
    assert not np.any(correction["b"])


@pytest.mark.parametrize(
    ("where", "words"), [(lambda _: True, "every leaf"), (lambda _: False, "no leaf")]
)
def test_a_predicate_that_divides_nothing_is_refused(regression, draw, where, words):
    with pytest.raises(ValueError, match=words):
        play(keep_local(algorithms.fedavg(), where), draw(0), regression, 1)


def test_a_layer_of_which_a_part_is_private_is_refused_by_name(regression, draw):
    method = keep_local(algorithms.make("fedfisher_kfac", regression.model), is_bias)
    with pytest.raises(ValueError, match=r"\['b', 'w'\] as one layer"):
        play(method, draw(0), regression, 1)


def test_methods_of_several_messages_are_refused(regression):
    with pytest.raises(TypeError, match=r"sequence of 3; .*to merging.exchange"):
        keep_local(algorithms.natural_gradient(regression.model), is_bias)
