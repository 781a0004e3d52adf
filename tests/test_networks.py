"""The networks have the papers' sizes and initialisation, and are what their names say."""

from functools import partial

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fisherjax import Examples, Model, fisher, likelihoods, metrics, networks, tree

NHWC = ("NHWC", "HWIO", "NHWC")


@partial(jax.jit, static_argnums=0)
def init(model, key, inputs):
    """Draw all parameters by one program; at once, each leaf has several."""
    return networks.init(model, key, inputs)


def count(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("model", "shape", "size"),
    [
        (networks.LeNet(), (28, 28, 1), 44_190),
        (networks.SimpleCNNMNIST(), (28, 28, 1), 44_426),
        (networks.SimpleCNN(), (32, 32, 3), 62_006),
        (networks.CNN(), (32, 32, 3), 939_616),
        (networks.NormedCNN(), (32, 32, 3), 121_686 + 4 * (16 + 32 + 120 + 84)),
        (networks.DropoutCNN(), (28, 28, 1), 1_206_590),
        (networks.ResNet18(), (32, 32, 3), 11_220_132),
        (networks.MLP((254, 64), use_bias=True), (28, 28, 1), 216_360),
        (networks.MLP(), (64,), 64 * 64 + 64 * 64 + 64 * 10),
        (networks.ResidualMLP(32, 3), (8, 8, 1), 64 * 32 + 6 * 32 * 32 + 32 * 10),
    ],
)
def test_parameter_counts_are_the_papers(key, model, shape, size):
    inputs = jax.ShapeDtypeStruct((1, *shape), np.float32)
    assert count(jax.eval_shape(partial(networks.init, model), key, inputs)) == size


def test_a_residual_network_whose_blocks_give_nothing_is_stem_and_head(key):
    inputs = np.asarray(jax.random.normal(key, (3, 2, 4)))
    params = init(networks.ResidualMLP(6, 2, num_classes=5), key, inputs)
    apply = networks.apply_fn(networks.ResidualMLP(6, 2, num_classes=5))
    silent = params | {name: {"kernel": jnp.zeros((6, 6))} for name in ("out1", "out2")}
    plain = inputs.reshape(3, 8) @ params["stem"]["kernel"] @ params["head"]["kernel"]
    np.testing.assert_allclose(apply(silent, inputs), plain, rtol=1e-4, atol=1e-6)
    assert jnp.abs(apply(params, inputs) - plain).max() > 1e-3


@pytest.mark.parametrize(
    "model", [networks.LeNet(use_bias=True), networks.MLP((50,), use_bias=True)]
)
def test_parameters_are_uniform_within_one_over_the_root_of_fan_in(key, model):
    params = jax.tree.map(np.asarray, init(model, key, np.zeros((1, 28, 28, 1))))
    for layer in params.values():
        kernel, bias = layer["kernel"], layer["bias"]
        bound = (kernel.size // kernel.shape[-1]) ** -0.5
        assert abs(kernel).max() <= bound
        assert abs(bias).max() <= bound
        assert bias.std() > 0.3 * bound
        # A uniform variable's standard deviation is bound / sqrt(3), give or take the sampling.
        np.testing.assert_allclose(kernel.std(), bound / 3**0.5, rtol=2 / kernel.size**0.5)


@pytest.mark.long
@pytest.mark.parametrize("model", [networks.LeNet(use_bias=True), networks.CNN(num_classes=7)])
def test_the_convolutional_networks_compute_what_they_say(x64, key, model):
    images = np.random.default_rng(0).normal(size=(3, 28, 28, 2))
    params = init(model, key, images)
    outputs = jax.jit(networks.apply_fn(model))(params, images)
    assert outputs.shape == (3, model.num_classes)
    np.testing.assert_allclose(outputs, jax.jit(plain)(params, images), rtol=1e-11)


def plain(params, hidden):
    for name in ("conv1", "conv2"):
        hidden = lax.conv_general_dilated(
            hidden, params[name]["kernel"], (1, 1), "VALID", dimension_numbers=NHWC
        )
        hidden = flax.linen.relu(hidden + params[name].get("bias", 0))
        hidden = flax.linen.max_pool(hidden, (2, 2), (2, 2))
    hidden = hidden.reshape(hidden.shape[0], -1)
    for name in ("dense1", "dense2", "dense3"):
        hidden = hidden @ params[name]["kernel"] + params[name].get("bias", 0)
        hidden = flax.linen.relu(hidden) if name != "dense3" else hidden
    return hidden


def test_initialisation_reads_shapes_only_and_its_key(key):
    model = networks.MLP((5,))
    images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1)
    params = init(model, key, images)
    same = init(model, key, np.zeros((7, 16), np.float32))
    other = init(model, jax.random.key(1), images)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    assert not np.array_equal(params["dense1"]["kernel"], other["dense1"]["kernel"])


def test_parameters_take_the_default_precision(x64, key):
    params = networks.init(networks.MLP((4,)), key, np.zeros((1, 8), np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float64")}


def test_normalisation_happens_in_apply(key):
    images = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28, 1)
    model = networks.MLP()
    params = init(model, key, images)

    def normalize(x):
        return x.astype(jnp.float32) / 255 - 0.5

    raw = jax.jit(networks.apply_fn(model, normalize))(params, images)
    normalised = jax.jit(networks.apply_fn(model))(params, normalize(images))
    np.testing.assert_allclose(raw, normalised, rtol=1e-5, atol=1e-6)


def test_equal_arguments_give_the_same_functions_and_nothing_compiles_again(key, compilations):
    def halve(x):
        return x / 2

    def jitter(key, x):
        return x + jax.random.normal(key, x.shape)

    @partial(jax.jit, static_argnums=0)
    def use(apply_train, params, images):
        return apply_train(params, images, key, jnp.ones(2))[0]

    def functions(features, augment=jitter):
        apply = networks.apply_fn(networks.MLP(features), halve)
        return apply, networks.augmented(apply, augment)

    assert functions((4,)) == functions((4,))
    assert networks.apply_fn(networks.MLP()) is networks.apply_fn(networks.MLP(), normalize=None)
    assert len({*functions((4,)), *functions((5,)), *functions((4,), lambda key, x: x)}) == 5
    params, images = init(networks.MLP((4,)), key, np.ones((2, 8))), np.ones((2, 8))
    use(functions((4,))[1], params, images)
    with compilations() as count:
        use(functions((4,))[1], params, images)
    assert count() == 0


def test_training_sees_what_the_first_half_of_the_key_makes_of_the_inputs(key):
    def jitter(key, x):
        return x + jax.random.normal(key, x.shape)

    apply_train = networks.augmented(lambda w, x: w * x, jitter)
    outputs, new = apply_train(2.0, jnp.arange(3.0), key, jnp.zeros(3))
    expected = 2.0 * jitter(jax.random.split(key)[0], jnp.arange(3.0))
    np.testing.assert_array_equal(outputs, expected)
    assert new is None


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_parameters_are_never_cast(x64, key, dtype):
    # A cast between parameter and product would hide the layer from K-FAC.
    model = networks.MLP((4,))
    params = jax.tree.map(lambda x: x.astype(dtype), init(model, key, np.zeros((1, 8))))
    outputs = jax.eval_shape(networks.apply_fn(model), params, np.ones((2, 8), np.float32))
    assert outputs.dtype == dtype
    jaxpr = jax.make_jaxpr(networks.apply_fn(model))(params, np.ones((2, 8), np.float32))
    converted = [e.invars[0] for e in jaxpr.eqns if e.primitive.name == "convert_element_type"]
    assert not set(map(id, converted)) & set(map(id, jaxpr.jaxpr.invars[:-1]))


def test_empty_batches_pass(key):
    images = np.zeros((0, 28, 28, 1), np.float32)
    for model in (networks.LeNet(), networks.MLP()):
        params = init(model, key, images)
        assert jax.jit(networks.apply_fn(model))(params, images).shape == (0, 10)


@pytest.mark.parametrize("shape", [(1, 8, 8, 1), (1, 784)])
def test_images_that_do_not_fit_are_refused(key, shape):
    with pytest.raises(ValueError, match=r"LeNet got inputs of shape .* expected images .* MLP"):
        networks.init(networks.LeNet(), key, np.zeros(shape))


class Counting(flax.linen.Module):
    """Keep what is neither a parameter nor a running statistic."""

    @flax.linen.compact
    def __call__(self, inputs):
        return inputs + self.variable("calls", "number", jnp.zeros, ()).value


def test_a_model_with_other_collections_is_refused(key):
    with pytest.raises(ValueError, match=r"Counting has .*'calls'.*apply_train"):
        networks.init(Counting(), key, np.zeros((2, 3)))


# ResNet-18


@pytest.mark.long
def test_the_residual_network_computes_what_it_says(x64, key):
    network = networks.ResNet18(5, width=4)
    draw = np.random.default_rng(1).normal
    images = draw(size=(2, 9, 12, 3))
    params = init(network, key, images)
    params = jax.tree.map(lambda x: x + 0.1 * draw(size=x.shape), jax.device_get(params))
    found = jax.jit(networks.apply_fn(network))(params, images)
    np.testing.assert_allclose(found, jax.jit(plain_resnet)(params, images), rtol=1e-9)


def plain_resnet(params, images):
    """Compute it by convolutions of JAX, with norms by images and halves of the channels."""

    def layer(name, x, stride=1):
        kernel, norm = params[f"conv{name}"]["kernel"], params[f"norm{name}"]
        pad = [(kernel.shape[0] // 2,) * 2] * 2
        y = lax.conv_general_dilated(x, kernel, (stride, stride), pad, dimension_numbers=NHWC)
        halves = [
            (own - own.mean((1, 2, 3), keepdims=True))
            / jnp.sqrt(own.var((1, 2, 3), keepdims=True) + 1e-6)
            for own in jnp.split(y, 2, -1)
        ]
        return jnp.concatenate(halves, -1) * norm["scale"] + norm["bias"]

    hidden = jax.nn.relu(layer("stem", images))
    for block, stride in (
        *(("1_1", 1), ("1_2", 1), ("2_1", 2), ("2_2", 1)),
        *(("3_1", 2), ("3_2", 1), ("4_1", 2), ("4_2", 1)),
    ):
        inner = layer(f"{block}_b", jax.nn.relu(layer(f"{block}_a", hidden, stride)))
        hidden = hidden if stride == 1 else layer(f"{block}_shortcut", hidden, stride)
        hidden = jax.nn.relu(hidden + inner)
    return affine(params["head"], hidden.mean((1, 2)))


def test_groups_that_do_not_divide_the_width_are_refused(key):
    with pytest.raises(ValueError, match="width=5 and groups=2"):
        networks.init(networks.ResNet18(width=5), key, np.zeros((1, 8, 8, 3)))


# Dropout


@pytest.mark.long
@pytest.mark.parametrize(
    ("network", "inputs"),
    [
        (networks.DropoutCNN(5, dropout=0.5), np.ones((2, 8, 8, 1), np.float32)),
        (
            networks.Transformer(5, width=8, num_layers=1, num_heads=2, context=6, dropout=0.5),
            np.ones((2, 6), np.uint8),
        ),
    ],
)
def test_dropout_is_in_training_alone_and_follows_the_key(key, network, inputs):
    params = init(network, key, inputs)
    model = networks.model(network, params, likelihoods.categorical)
    assert model == networks.model(network, params, likelihoods.categorical)
    train = jax.jit(lambda key: model.apply_train(params, inputs, key, jnp.ones(2))[0])
    first, again, other = (np.asarray(train(jax.random.key(k))) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    # Equal inputs are dropped apart, and without dropout they have equal outputs.
    assert (first[0] != first[1]).any()
    still = network.clone(dropout=0.0)
    plain = networks.model(still, params, likelihoods.categorical)
    assert plain.apply_train is None
    np.testing.assert_array_equal(model.apply(params, inputs), plain.apply(params, inputs))


@pytest.mark.long
def test_the_mean_over_dropout_of_a_linear_head_is_the_output_without(key):
    """What is dropped before the last layer is zero in the mean: E[mask] / (1 - share) = 1."""
    network, inputs = networks.DropoutCNN(3, dropout=0.5), np.ones((1, 6, 6, 1), np.float32)
    params = init(network, key, inputs)
    # The first dense layer has a bias alone, so that only the last dropout matters.
    params["dense1"]["kernel"] = 0 * params["dense1"]["kernel"]
    model = networks.model(network, params, likelihoods.categorical)
    keys = jax.random.split(key, 4000)
    train = jax.vmap(lambda key: model.apply_train(params, inputs, key, jnp.ones(1))[0])
    found = np.asarray(jax.jit(train)(keys))[:, 0]
    error = found.std(0) / len(keys) ** 0.5
    assert (abs(found.mean(0) - model.apply(params, inputs)[0]) < 5 * error + 1e-6).all()
    assert error.min() > 0


def test_dropout_without_an_argument_train_is_refused(key):
    class Wrong(flax.linen.Module):
        dropout: float = 0.5

        def __call__(self, x):
            return x

    with pytest.raises(ValueError, match="Wrong keeps running statistics or has dropout"):
        networks.model(Wrong(), {}, likelihoods.categorical)


# The transformer

TINY = networks.Transformer(num_classes=7, width=16, num_layers=2, num_heads=2, context=6)


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 7, (3, 6))


@pytest.mark.long
def test_the_transformer_computes_what_it_says(x64, key, tokens):
    params, draw = init(TINY, key, tokens), np.random.default_rng(1).normal
    # Biases and norms start at 0 and 1, where a mistake with them would not show.
    params = jax.tree.map(lambda x: x + 0.1 * draw(size=x.shape), jax.device_get(params))
    logits = np.asarray(jax.jit(networks.apply_fn(TINY))(params, tokens))
    assert logits.shape == (3, 6, 7)
    shorter = jax.eval_shape(partial(networks.init, TINY), key, tokens[:, :2])
    assert count(params) == count(shorter)
    for sequence, expected in zip(tokens, logits, strict=True):
        plainly = plain_transformer(params, sequence)
        np.testing.assert_allclose(plainly, expected, rtol=1e-9, atol=1e-12)


def plain_transformer(params, tokens):
    """Return the logits [L, C] of one sequence, each position and head on its own."""
    hidden = params["tokens"]["embedding"][tokens] + params["positions"]["embedding"]
    hidden = plain_blocks(params, hidden, lambda t: t + 1)
    return affine(params["head"], plain_norm(params["norm"], hidden))


def plain_blocks(params, hidden, seen):
    """Let each position t and head attend to the first seen(t) positions, in two blocks."""
    for block in (params["block1"], params["block2"]):
        normed = plain_norm(block["norm1"], hidden)
        query, key, value = (affine(block[name], normed) for name in ("query", "key", "value"))
        mixed = []
        for t in range(len(hidden)):
            heads = []
            for head in (slice(0, 8), slice(8, 16)):
                scores = np.exp(key[: seen(t), head] @ query[t, head] / 8**0.5)
                heads.append(scores / scores.sum() @ value[: seen(t), head])
            mixed.append(np.concatenate(heads))
        hidden = hidden + affine(block["mix"], np.stack(mixed))
        inner = np.maximum(affine(block["dense1"], plain_norm(block["norm2"], hidden)), 0)
        hidden = hidden + affine(block["dense2"], inner)
    return hidden


@pytest.mark.long
def test_the_vision_transformer_computes_what_it_says(x64, key):
    network = networks.VisionTransformer(num_classes=3, patch=2, width=16, num_heads=2)
    draw = np.random.default_rng(1).normal
    images = draw(size=(2, 4, 6, 3))
    params = init(network, key, images)
    params = jax.tree.map(lambda x: x + 0.1 * draw(size=x.shape), jax.device_get(params))
    logits = np.asarray(jax.jit(networks.apply_fn(network))(params, images))
    for image, expected in zip(images, logits, strict=True):
        corners = [(row, column) for row in (0, 2) for column in (0, 2, 4)]
        patches = np.stack([image[r : r + 2, c : c + 2].reshape(-1) for r, c in corners])
        hidden = affine(params["patches"], patches) + params["positions"]
        hidden = plain_norm(params["norm"], plain_blocks(params, hidden, lambda t: 6))
        np.testing.assert_allclose(affine(params["head"], hidden.mean(0)), expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("network", "shape", "message"),
    [
        (networks.VisionTransformer(width=6), (2, 8, 8, 1), "width is 6 and num_heads 4"),
        (networks.VisionTransformer(), (2, 8, 6, 1), "8, 6, 1.*multiples of patch=4"),
        (networks.VisionTransformer(), (2, 64), "expected images"),
    ],
)
def test_images_without_whole_patches_are_refused(key, network, shape, message):
    with pytest.raises(ValueError, match=message):
        networks.init(network, key, np.zeros(shape))


def affine(layer, hidden):
    return hidden @ layer["kernel"] + layer["bias"]


def plain_norm(layer, hidden):
    hidden = hidden - hidden.mean(-1, keepdims=True)
    scale = np.sqrt((hidden**2).mean(-1, keepdims=True) + 1e-6)
    return hidden / scale * layer["scale"] + layer["bias"]


def test_no_logit_sees_a_later_token_and_every_logit_sees_the_earlier_ones(x64, key, tokens):
    params = init(TINY, key, tokens)
    apply = jax.jit(networks.apply_fn(TINY))
    before = np.asarray(apply(params, tokens))
    for place in range(6):
        other = (tokens + (np.arange(6) == place)) % 7
        changed = (before != apply(params, other)).any((0, 2))
        np.testing.assert_array_equal(changed, np.arange(6) >= place)


def test_a_shorter_sequence_has_the_logits_of_the_beginning(x64, key, tokens):
    params = init(TINY, key, tokens)
    apply = jax.jit(networks.apply_fn(TINY))
    beginning = np.asarray(apply(params, tokens))[:, :4]
    np.testing.assert_allclose(apply(params, tokens[:, :4]), beginning, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_accuracy_of_a_transformer_is_that_of_the_next_token(x64, key, tokens):
    params = init(TINY, key, tokens)
    model = Model(networks.apply_fn(TINY), likelihoods.categorical)
    targets = np.asarray(jax.jit(model.apply)(params, tokens)).argmax(-1)
    assert metrics.accuracy(model, params, Examples(tokens, targets)) == 1
    # Positions count, not whole sequences.
    targets[0, :5] += 1
    wrong = Examples(tokens, targets % 7)
    np.testing.assert_allclose(metrics.accuracy(model, params, wrong), 13 / 18, rtol=1e-6)


@pytest.mark.long
def test_kfac_covers_every_leaf_of_a_transformer(key, tokens):
    model = TINY.clone(num_layers=1)
    params = init(model, key, tokens)
    information = fisher.kfac(
        Model(networks.apply_fn(model), likelihoods.categorical),
        params,
        Examples(tokens, tokens),
        kind=fisher.empirical,
    )
    covered = {leaf for layer in information.layers for leaf in (layer.leaf, layer.bias) if leaf}
    assert covered == set(tree.names(params))


@pytest.mark.parametrize(
    ("model", "tokens", "error", "message"),
    [
        (TINY, np.zeros((2, 7), int), ValueError, r"shape \(1, 7\).*context=6.*shorter"),
        (TINY, np.zeros(5, int), ValueError, r"expected tokens \[B, L\]"),
        (TINY, np.zeros((2, 5)), TypeError, "dtype float32.*integers from 0 to 6"),
        (TINY.clone(num_heads=3), np.zeros((2, 5), int), ValueError, "width is 16 and num_heads 3"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(key, model, tokens, error, message):
    with pytest.raises(error, match=message):
        networks.init(model, key, tokens)
