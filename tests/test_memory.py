"""Memory is set by the minibatch and the chunk of clients, not by the number of examples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax.clients import Federation

IMAGE = (28, 28, 1)
ADAM = optax.adam(0.1)


def linear(params, x):
    return x @ params["w"]


def scratch_bytes(function, *arguments) -> int:
    """Ask the compiler how much memory a program needs beside its arguments and results."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def federation_of(num_examples: int, num_clients: int) -> Federation:
    size = num_examples // num_clients
    shape = jax.ShapeDtypeStruct
    return Federation(
        shape((num_examples, *IMAGE), jnp.uint8),
        shape((num_examples,), jnp.int32),
        shape((num_clients, size), jnp.int32),
        shape((num_clients,), jnp.int32),
    )


@pytest.fixture
def network():
    model = fj.networks.LeNet(num_classes=10)
    params = jax.eval_shape(
        lambda key: fj.networks.init(model, key, jnp.zeros((1, *IMAGE))), jax.random.key(0)
    )
    apply = fj.networks.apply_fn(model, lambda x: x / 255.0)
    return fj.Model(apply, fj.likelihoods.categorical), params


@pytest.mark.long
def test_training_never_gathers_the_clients_images(network):
    model, params = network
    optimizer = optax.sgd(0.1)

    def train(params, federation):
        options = {"key": jax.random.key(0), "optimizer": optimizer, "epochs": 1, "batch_size": 16}
        return fj.training.train(model, params, federation, **options).params

    small, large = (scratch_bytes(train, params, federation_of(n, 4)) for n in (400, 40_000))
    images = 39_600 * 28 * 28
    assert large - small < images / 4


@pytest.mark.long
def test_scratch_is_set_by_the_chunk_and_the_rest_is_one_model_a_client():
    """Twice the clients on the same data need no more scratch, and no optimiser state is kept."""
    params = {"w": jnp.zeros((64, 10))}
    data = np.zeros((480, 64), np.float32), np.zeros(480, np.int32)

    def need(num_clients, clients_per_chunk, progress=None):
        federation = fj.clients.federation(data, np.split(np.arange(480), num_clients))
        return fj.training.train_memory(
            fj.Model(linear, fj.likelihoods.categorical),
            params,
            federation,
            key=jax.random.key(0),
            optimizer=ADAM,
            epochs=1,
            batch_size=4,
            clients_per_chunk=clients_per_chunk,
            progress=progress,
        )

    model = params["w"].nbytes
    few, many = need(60, 4), need(120, 4)
    assert many.scratch - few.scratch < 4 * model
    assert 60 * model <= many.resident - few.resident < 66 * model
    assert need(60, 8).scratch - few.scratch > 4 * 2 * model
    # Showing progress keeps Adam's two moments of every client between epochs.
    assert need(60, 4, progress=print).resident - few.resident > 60 * 1.9 * model


@pytest.mark.long
@pytest.mark.parametrize("mesh", [False, True])
def test_what_was_predicted_is_not_compiled_again(mesh, caplog):
    data = np.zeros((12, 5), np.float32), np.zeros(12, np.int32)
    federation = fj.clients.federation(data, np.split(np.arange(12), 3))
    if mesh:
        federation = fj.clients.shard(federation, jax.devices()[:1])
    model = fj.Model(linear, fj.likelihoods.categorical)
    params, key = {"w": jnp.zeros((5, 7))}, jax.random.key(0)
    how = {"key": key, "optimizer": ADAM, "epochs": 1, "batch_size": 4}
    trained = fj.training.train(model, params, federation, **how)
    method = fj.algorithms.fedfisher(model, fisher=fj.fisher.diagonal)

    def passes(compute, *arguments):
        caplog.clear()
        with jax.log_compiles():
            compute(method, *arguments, federation, key=key)
        return sum("XLA compilation of jit(_summarize)" in line for line in caplog.messages)

    assert passes(fj.merging.summarize_memory, params) == 1
    assert passes(fj.merging.summarize, trained) == 0


@pytest.mark.long
@pytest.mark.parametrize("mesh", [False, True])
def test_each_message_of_an_exchange_is_predicted_and_not_compiled_again(mesh, caplog):
    source = np.random.default_rng(0)
    data = source.normal(size=(40, 3)).astype(np.float32), np.arange(40, dtype=np.int32) % 2
    federation = fj.clients.federation(data, np.split(np.arange(40), 2))
    if mesh:
        federation = fj.clients.shard(federation, jax.devices()[:1])
    model = fj.Model(
        lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"], fj.likelihoods.categorical
    )
    params = {"a": np.ones((3, 400), np.float32), "b": np.ones((400, 2), np.float32)}
    method = fj.algorithms.natural_gradient(model)
    how = {"key": jax.random.key(0)}
    shapes = jax.eval_shape(lambda: params)
    slopes, products, losses = fj.merging.exchange_memory(method, shapes, federation, **how)
    # Sent down are the model with four directions, and with one step; back from each client come
    # products of all inputs of the head, and five numbers.
    model_bytes, head = 4 * (3 + 2) * 400, 4 * 400**2
    assert products.resident - losses.resident > 3 * model_bytes + 2 * 2 * head
    assert slopes.resident > products.resident - 2 * 2 * head
    caplog.clear()
    with jax.log_compiles():
        fj.merging.exchange(method, params, federation, **how)
    assert not [line for line in caplog.messages if "XLA compilation of jit(_summarize)" in line]


@pytest.mark.slow
@pytest.mark.parametrize("structure", [fj.fisher.diagonal, fj.fisher.kfac])
def test_a_fisher_pass_holds_neither_all_gradients_nor_all_images(network, structure):
    model, params = network

    def run(params, inputs):
        return structure(model, params, fj.Examples(inputs), batch_size=16)

    def scratch(n):
        return scratch_bytes(run, params, jax.ShapeDtypeStruct((n, *IMAGE), jnp.uint8))

    small, large = scratch(64), scratch(6400)
    assert large - small < 6336 * 28 * 28 / 4


# The page that tests/test_your_model.py runs has this network, and says what its K-FAC needs.
@pytest.mark.slow
@pytest.mark.parametrize("structure", [fj.fisher.kfac, fj.fisher.diagonal])
def test_the_exact_fisher_of_a_transformer_never_has_all_columns(structure):
    """80 positions of 65 classes have 5,120 columns: 6.8 GB of a minibatch of 64."""
    network = fj.networks.Transformer(num_classes=65, context=80)
    tokens = jax.ShapeDtypeStruct((128, 80), jnp.int32)
    params = jax.eval_shape(lambda key: fj.networks.init(network, key, tokens), jax.random.key(0))
    model = fj.Model(fj.networks.apply_fn(network), fj.likelihoods.categorical)

    def run(params, tokens):
        return structure(model, params, fj.Examples(tokens), kind=fj.fisher.true, batch_size=64)

    assert scratch_bytes(run, params, tokens) < 0.5e9


@pytest.mark.parametrize(("inputs", "columns"), [((20, 300), 299), ((20, 30, 40), 30 * 39)])
def test_gradients_of_single_examples_are_of_a_few_columns(inputs, columns):
    params = {"w": jnp.zeros((inputs[-1], inputs[-1]))}
    model = fj.Model(lambda params, x: x @ jnp.sin(params["w"]), fj.likelihoods.categorical)

    def run(params, inputs):
        return fj.fisher.diagonal(model, params, fj.Examples(inputs), kind=fj.fisher.true)

    every = inputs[0] * columns * params["w"].nbytes
    assert scratch_bytes(run, params, jax.ShapeDtypeStruct(inputs, jnp.float32)) < every / 8
