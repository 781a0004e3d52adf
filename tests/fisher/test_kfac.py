"""Kronecker factors against two other computations: the full Fisher, and flax interception."""

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import Examples, Model, fisher, likelihoods, nn

CATEGORICAL = likelihoods.categorical


@pytest.mark.parametrize("name", ["categorical", "gaussian", "bernoulli"])
def test_each_dense_layer_is_exact_for_one_example(mlp, name):
    apply, params, x = mlp
    arguments = Model(apply, getattr(likelihoods, name)), params, Examples(x[:1])
    blocks, full = (f(*arguments).dense() for f in (fisher.kfac, fisher.full))
    first = 5 + 4 * 5
    np.testing.assert_allclose(blocks[:first, :first], full[:first, :first], rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(blocks[first:, first:], full[first:, first:], rtol=1e-10, atol=1e-13)
    assert (blocks[:first, first:] == 0).all()


def test_one_dense_layer_of_many_classes_is_exact_for_one_example(x64):
    def apply(params, x):
        return x @ params["kernel"] + params["bias"]

    draw = np.random.default_rng(0).normal
    params = {"kernel": jnp.asarray(draw(size=(3, 40))), "bias": jnp.asarray(draw(size=40))}
    x = jnp.asarray(draw(size=(1, 3)))
    arguments = Model(apply, CATEGORICAL), params, Examples(x)
    left, right = (f(*arguments).dense() for f in (fisher.kfac, fisher.full))
    np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-13)


class Convolutions(flax.linen.Module):
    """Two convolutions and a dense layer."""

    settings: tuple  # (features, kernel, strides, padding, use_bias) of each convolution
    convolution: object

    @flax.linen.compact
    def __call__(self, x):
        for features, kernel, strides, padding, use_bias in self.settings:
            x = flax.linen.Conv(
                features,
                kernel,
                strides,
                padding,
                use_bias=use_bias,
                param_dtype=float,
                conv_general_dilated=self.convolution,
            )(x)
            x = flax.linen.relu(x)
        return flax.linen.Dense(3, param_dtype=float)(x.reshape(x.shape[0], -1))


class Positions(flax.linen.Module):
    """Dense layers applied at each position of a sequence; outputs [B, L, 3]."""

    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.relu(flax.linen.Dense(4, param_dtype=float)(x))
        x = x + flax.linen.Dense(1, use_bias=False, param_dtype=float)(x[:, ::-1])
        return flax.linen.Dense(3, param_dtype=float)(x)


ASYMMETRIC = ((0, 1), (2, 0))
GRID = [
    ((24, (3, 3), (1, 1), "VALID", True), (2, (3, 2), (2, 2), "SAME", False)),
    ((3, (3, 2), (1, 2), ASYMMETRIC, False), (2, (3, 3), (2, 2), "VALID", True)),
    ((2, (2, 3), (1, 2), "SAME", True), (3, (1, 1), (1, 1), ASYMMETRIC, True)),
    ((3, (3, 3), (2, 2), ASYMMETRIC, True), (2, (2, 2), (1, 2), "VALID", False)),
]


def drawn(model, x):
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(size=leaf.shape)),
        jax.eval_shape(model.init, jax.random.key(0), x)["params"],
    )


def patches(x, module):
    """Inputs of a layer as [N, T, rows of its kernel], by lax's own patches, channels first."""
    if isinstance(module, flax.linen.Dense):
        return x.reshape(len(x), -1, x.shape[-1])
    size, channels = module.kernel_size, x.shape[-1]
    cut = jax.lax.conv_general_dilated_patches(
        x, size, module.strides, module.padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    cut = cut.reshape(len(x), -1, channels, np.prod(size)).swapaxes(2, 3)
    return cut.reshape(*cut.shape[:2], -1)


def intercepted(model, params, x, columns_of):
    """Kronecker factors by adding a disturbance to each layer's output and differentiating."""
    shapes = {}

    def run(disturbances, record):
        def interceptor(call, args, kwargs, context):
            y, module = call(*args, **kwargs), context.module
            if not isinstance(module, flax.linen.Dense | flax.linen.Conv):
                return y
            name = "/".join((*module.path, "kernel"))
            shapes[name] = y.shape
            record[name] = patches(args[0], module)
            if module.use_bias:
                record[name] = jnp.pad(record[name], ((0, 0), (0, 0), (0, 1)), constant_values=1)
            return y + disturbances.get(name, 0)

        with flax.linen.intercept_methods(interceptor):
            return model.apply({"params": params}, x), record

    jax.eval_shape(lambda: run({}, {}))
    zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    z, pullback, inputs = jax.vjp(lambda eps: run(eps, {}), zeros, has_aux=True)
    (tangents,) = jax.vmap(pullback)(columns_of(z))
    factors = {}
    for name, a in inputs.items():
        g = tangents[name].reshape(-1, *a.shape[:2], shapes[name][-1])
        factors[name] = {
            "input": jnp.einsum("nta,ntb->ab", a, a) / len(x),
            "output": jnp.einsum("kntg,knth->gh", g, g) / (len(x) * a.shape[1]),
        }
    return factors


def assert_factors_agree(factors, expected):
    assert factors.keys() == expected.keys()
    for name, factor in factors.items():
        for side, value in factor.items():
            scale = np.abs(expected[name][side]).max()
            assert scale > 0
            np.testing.assert_allclose(value, expected[name][side], atol=1e-10 * scale, rtol=0)


@pytest.mark.parametrize("settings", GRID)
def test_convolution_factors_equal_those_of_interception(x64, settings):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7, 6, 2)))
    native = Convolutions(settings, None)
    params = drawn(native, x)
    expected = jax.jit(lambda p, x: intercepted(native, p, x, CATEGORICAL.factor))(params, x)
    for convolution in (None, nn.conv_general_dilated):
        model = Convolutions(settings, convolution)

        def apply(params, x, model=model):
            return model.apply({"params": params}, x)

        found = fisher.kfac(Model(apply, CATEGORICAL), params, Examples(x), batch_size=2)
        assert_factors_agree(found.factors, expected)


@pytest.mark.parametrize("kind", [fisher.true, fisher.empirical])
def test_sequence_factors_equal_those_of_interception(x64, targets_for, kind):
    """Positions whose tangent vanishes, as after a ReLU, count too."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 4)))
    model = Positions()
    params = drawn(model, x)
    y = targets_for("categorical", jnp.zeros((5, 3, 3)))

    def apply(params, x):
        return model.apply({"params": params}, x)

    examples = Examples(x, y)
    found = fisher.kfac(Model(apply, CATEGORICAL), params, examples, kind=kind, batch_size=2)
    expected = jax.jit(lambda p: intercepted(model, p, x, lambda z: kind(CATEGORICAL, z, y)))(
        params
    )
    assert_factors_agree(found.factors, expected)


def test_a_kernel_that_sees_the_whole_image_once_is_exact_for_one_example(x64):
    """One output location: a convolution is a dense layer, and its scale must be the same."""

    def apply(params, x):
        y = nn.conv_general_dilated(
            x, params["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.tanh(y + params["bias"]).reshape(x.shape[0], -1)

    draw = np.random.default_rng(0).normal
    params = {"kernel": jnp.asarray(draw(size=(3, 2, 2, 4))), "bias": jnp.asarray(draw(size=4))}
    x = jnp.asarray(draw(size=(1, 3, 2, 2)))
    arguments = Model(apply, CATEGORICAL), params, Examples(x)
    left, right = (f(*arguments).dense() for f in (fisher.kfac, fisher.full))
    np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-12)


class Troubled(flax.linen.Module):
    """A good dense layer in front of something that K-FAC does not cover."""

    trouble: str

    @flax.linen.compact
    def __call__(self, x):
        images = x.reshape(-1, 4, 4, 2)
        conv = {"use_bias": False, "name": "bad"}
        match self.trouble:
            case "BatchNorm":
                x = flax.linen.BatchNorm(use_running_average=True, name="bad")(x)
            case "LayerNorm":
                x = flax.linen.LayerNorm(name="bad")(x)
            case "shared":
                layer = flax.linen.Dense(32, use_bias=False, name="bad")
                x = layer(flax.linen.relu(layer(x)))
            case "dilated":
                x = flax.linen.Conv(2, (2, 2), kernel_dilation=2, **conv)(images)
            case "transposed":
                x = flax.linen.ConvTranspose(2, (2, 2), (2, 2), **conv)(images)
            case "grouped":
                x = flax.linen.Conv(2, (2, 2), feature_group_count=2, **conv)(images)
            case "one-dimensional":
                x = flax.linen.Conv(2, (2,), **conv)(x.reshape(-1, 16, 2))
            case "cast":
                x = flax.linen.Dense(3, use_bias=False, dtype=jnp.bfloat16, name="bad")(x)
            case "attention":
                x = x.reshape(-1, 8, 4)
                x = flax.linen.MultiHeadDotProductAttention(2, use_bias=False, name="bad")(x)
            case "unused":
                self.param("bad", flax.linen.initializers.ones, (3,))
            case "checkpointed":
                x = flax.linen.remat(flax.linen.Dense)(3, use_bias=False, name="bad")(x)
        return flax.linen.Dense(3, name="good")(x.reshape(x.shape[0], -1).astype(jnp.float32))


TROUBLES = {
    "BatchNorm": r"'params/bad/scale': it scales or shifts .*BatchNorm",
    "LayerNorm": r"'params/bad/bias': it scales or shifts .*LayerNorm",
    "shared": r"'params/bad/kernel': .*shared weights",
    "dilated": r"'params/bad/kernel': .*dilated",
    "transposed": r"'params/bad/kernel': .*transposed",
    "grouped": r"'params/bad/kernel': .*grouped",
    "one-dimensional": r"'params/bad/kernel': .*not recognised.*two-dimensional",
    "cast": r"'params/bad/kernel': it is cast to bfloat16 .*one dtype",
    "attention": r"'params/bad/query/kernel': .*3 axes",
    "unused": r"'params/bad': it is not used",
    "checkpointed": r"'params/bad/kernel': it is used inside remat",
}


def troubled(trouble):
    model, x = (
        Troubled(trouble),
        jnp.asarray(np.random.default_rng(0).normal(size=(2, 32)), "float32"),
    )
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.1, leaf.dtype), shapes)
    return model.apply, variables, x


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_is_not_covered_is_refused_by_name_and_reason(trouble):
    apply, variables, x = troubled(trouble)
    with pytest.raises(ValueError, match=TROUBLES[trouble]) as refusal:
        fisher.kfac(Model(apply, CATEGORICAL), variables, Examples(x))
    assert "good" not in str(refusal.value)
    assert "fallback=fisher.diagonal" in str(refusal.value)


@pytest.mark.parametrize("trouble", ["BatchNorm", "shared"])
def test_fallback_gives_the_rest_a_diagonal_or_nothing(trouble):
    apply, variables, x = troubled(trouble)
    arguments = Model(apply, CATEGORICAL), variables, Examples(x)
    mixed = fisher.kfac(*arguments, fallback=fisher.diagonal)
    without = fisher.kfac(*arguments, fallback=fisher.zero)
    exact = fisher.diagonal(*arguments)
    assert mixed.factors.keys() == without.factors.keys() == {"params/good/kernel"}
    left, right = mixed.template.by_name(exact.entries), mixed.entries
    assert (
        right.keys()
        == without.entries.keys()
        == left.keys() - {"params/good/kernel", "params/good/bias"}
    )
    for name, value in right.items():
        np.testing.assert_allclose(value, left[name], rtol=1e-5)
        assert (without.entries[name] == 0).all()
    chex.assert_trees_all_close(mixed.factors, without.factors, rtol=1e-6)


def test_jitted_networks_are_seen_through(mlp):
    apply, params, x = mlp
    plain, jitted = (
        fisher.kfac(Model(f, CATEGORICAL), params, Examples(x)) for f in (apply, jax.jit(apply))
    )
    chex.assert_trees_all_close(plain, jitted, rtol=1e-10, atol=1e-14)


def test_fallback_and_zero_are_only_what_they_are(mlp):
    arguments = Model(mlp.apply, CATEGORICAL), mlp.params, Examples(mlp.inputs)
    with pytest.raises(ValueError, match=r"fallback is .*expected None, fisher\.diagonal"):
        fisher.kfac(*arguments, fallback=fisher.full)
    with pytest.raises(TypeError, match="is an option"):
        fisher.zero(*arguments)
