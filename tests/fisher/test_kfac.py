"""Kronecker factors against two other computations: the full Fisher, and flax interception."""

import itertools
from functools import partial

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import (
    Examples,
    Model,
    algorithms,
    clients,
    fisher,
    likelihoods,
    merging,
    nn,
    solvers,
    tree,
)

CATEGORICAL = likelihoods.categorical


@jax.jit
def dense(operator):
    """Write an operator out by one program."""
    return operator.dense()


@jax.jit
def blocks_of(operator):
    """Where an operator couples two entries of params, [d, d]."""
    return jax.tree.map(jnp.ones_like, operator).dense() > 0


@pytest.mark.parametrize("name", ["categorical", "gaussian", "bernoulli"])
def test_each_dense_layer_is_exact_for_one_example(mlp, name):
    apply, params, x = mlp
    arguments = Model(apply, getattr(likelihoods, name)), params, Examples(x[:1])
    blocks, full = (np.asarray(dense(f(*arguments))) for f in (fisher.kfac, fisher.full))
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
    left, right = (dense(f(*arguments)) for f in (fisher.kfac, fisher.full))
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


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", GRID[:2] + [pytest.param(x, marks=pytest.mark.slow) for x in GRID[2:]]
)
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


@pytest.mark.long
@pytest.mark.parametrize("kind", [fisher.true, fisher.empirical])
def test_sequence_factors_equal_those_of_interception(x64, targets_for, written_out, kind):
    """Positions whose tangent vanishes, as after a ReLU, count too."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, 4)))
    model = Positions()
    params = drawn(model, x)
    y = targets_for("categorical", jnp.zeros((5, 3, 3)))

    def apply(params, x):
        return model.apply({"params": params}, x)

    examples = Examples(x, y)
    found = fisher.kfac(Model(apply, CATEGORICAL), params, examples, kind=kind, batch_size=2)

    def columns(z):
        return written_out(kind(CATEGORICAL, z, y))

    expected = jax.jit(lambda p: intercepted(model, p, x, columns))(params)
    assert_factors_agree(found.factors, expected)


@pytest.mark.long
@pytest.mark.parametrize("sharing", [fisher.expand, fisher.reduce])
def test_true_factors_of_sequences_are_the_mean_of_empirical_ones_over_all_labels(
    sequence, sharing
):
    apply, params, x = sequence
    labels = np.array(list(itertools.product(range(3), repeat=2)))
    inputs, y = np.repeat(x, len(labels), axis=0), np.tile(labels, (len(x), 1))
    loss = jax.jit(lambda p: CATEGORICAL.negative_log_likelihood(apply(p, inputs), y))
    probabilities = np.exp(-np.asarray(loss(params)))
    labelled = Examples(inputs, y, weights=probabilities)
    model, options = Model(apply, CATEGORICAL), {"sharing": sharing}
    found = fisher.kfac(model, params, Examples(x), kind=fisher.true, **options)
    expected = fisher.kfac(model, params, labelled, kind=fisher.empirical, **options)
    assert_factors_agree(found.factors, expected.factors)


@pytest.mark.long
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
    left, right = (dense(f(*arguments)) for f in (fisher.kfac, fisher.full))
    np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-12)


def embedded(p, x):
    return jnp.tanh(p["e"][(9 * jnp.abs(x)).astype(int) % 5]).sum(1)


def normalized(p, x):
    h = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    return jnp.tanh(h * p["s"] + p["b"]).sum(1)


# name: (apply, shapes of params, shape of inputs), each exact for one example
EXACT = {
    "transposed": (
        lambda p, x: jax.vmap(lambda row: p["v"] @ jnp.tanh(p["w"] @ row + p["b"]))(x),
        {"w": (5, 4), "b": (5,), "v": (3, 5)},
        (4,),
    ),
    "channels first": (
        lambda p, x: jnp.tanh(
            jax.lax.conv_general_dilated(x, p["k"], (1, 1), "VALID") + p["b"]
        ).reshape(len(x), -1),
        {"k": (4, 2, 3, 2), "b": (4, 1, 1)},
        (2, 3, 2),
    ),
    "heads": (
        lambda p, x: jnp.einsum(
            "bhk,hko->bo", jnp.tanh(jnp.einsum("bi,ihk->bhk", x, p["q"]) + p["c"]), p["o"]
        ),
        {"q": (4, 2, 3), "c": (2, 3), "o": (2, 3, 4)},
        (4,),
    ),
    "stack": (
        lambda p, x: jax.lax.scan(lambda h, q: (jnp.tanh(h @ q), None), x, p["w"])[0],
        {"w": (3, 4, 4)},
        (4,),
    ),
    "embedding": (embedded, {"e": (5, 3)}, (1,)),
    "bias by itself": (lambda p, x: jnp.tanh(x + p["b"]).sum(1), {"b": (3,)}, (4, 3)),
}


@pytest.mark.parametrize("name", EXACT)
def test_layers_of_any_form_are_exact_for_one_example(x64, name):
    apply, shapes, input_shape = EXACT[name]
    draw = np.random.default_rng(0).normal
    params = {leaf: jnp.asarray(draw(size=shape)) for leaf, shape in shapes.items()}
    arguments = (
        Model(apply, CATEGORICAL),
        params,
        Examples(jnp.asarray(draw(size=(1, *input_shape)))),
    )
    blocks, full = fisher.kfac(*arguments), dense(fisher.full(*arguments))
    assert not blocks.entries
    expected = np.where(blocks_of(blocks), full, 0)
    np.testing.assert_allclose(dense(blocks), expected, rtol=1e-9, atol=1e-12)


# A shift by itself has a block of all its entries, the mean of those of examples.
@pytest.mark.parametrize(
    ("leaves", "coupled"),
    [("sb", np.kron(np.ones((2, 2)), np.eye(4))), ("s", np.eye(4)), ("b", np.ones((4, 4)))],
    ids=["sb", "s", "b"],
)
def test_scale_and_shift_have_exact_blocks_whatever_the_examples_and_positions(
    x64, leaves, coupled
):
    draw = np.random.default_rng(0).normal
    params = {leaf: jnp.asarray(draw(size=4)) for leaf in leaves}
    fixed = {"s": jnp.ones(4), "b": jnp.zeros(4)}
    model = Model(lambda p, x: normalized(fixed | p, x), CATEGORICAL)
    arguments = model, params, Examples(jnp.asarray(draw(size=(6, 3, 4))))
    blocks, full = fisher.kfac(*arguments), dense(fisher.full(*arguments))
    np.testing.assert_allclose(dense(blocks), coupled * full, rtol=1e-9, atol=1e-12)


def linear(p, x):
    return jnp.einsum("blo,oc->blc", x @ p["w"] + p["b"], p["v"])


def linear_convolution(p, x):
    y = jax.lax.conv_general_dilated(
        x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return (y + p["b"]).mean((1, 2)) @ p["v"]


SHARED = {
    "expand": (linear, (4, 5), (6, 3, 4), fisher.expand),
    "reduce": (lambda p, x: linear(p, x).mean(1), (4, 5), (6, 3, 4), fisher.reduce),
    "reduce, convolution": (linear_convolution, (2, 2, 3, 5), (6, 3, 4, 3), fisher.reduce),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SHARED)
def test_each_way_of_sharing_weights_is_exact_where_the_network_is_linear(x64, name):
    """For any number of examples and positions: Eschenhagen et al., propositions 1 and 2."""
    apply, kernel, inputs, sharing = SHARED[name]
    draw = np.random.default_rng(0).normal
    params = {"w": draw(size=kernel), "b": draw(size=5), "v": draw(size=(5, 2))}
    params = jax.tree.map(jnp.asarray, params)
    examples = Examples(jnp.asarray(draw(size=inputs)))
    arguments = Model(apply, likelihoods.gaussian), params, examples
    exact = partial(fisher.kfac, *arguments, kind=fisher.true)
    blocks, full = exact(sharing=sharing), dense(fisher.full(*arguments, kind=fisher.true))
    expected = np.where(blocks_of(blocks), full, 0)
    np.testing.assert_allclose(dense(blocks), expected, rtol=1e-9, atol=1e-12)
    other = fisher.reduce if sharing is fisher.expand else fisher.expand
    assert np.abs(dense(exact(sharing=other)) - expected).max() > 0.01


@pytest.mark.long
def test_coverage_is_the_share_of_params_with_more_than_a_diagonal():
    apply, variables, x = troubled("nonlinear")
    mixed = fisher.kfac(Model(apply, CATEGORICAL), variables, Examples(x), fallback=fisher.zero)
    bad = variables["params"]["bad"].size
    total = sum(leaf.size for leaf in jax.tree.leaves(variables))
    np.testing.assert_allclose(mixed.coverage, 1 - bad / total)
    # A merge says so.
    method = algorithms.fedfisher(
        Model(apply, CATEGORICAL), fisher=partial(fisher.kfac, fallback=fisher.zero)
    )
    stacked = tree.stack([{"params": variables, "fisher": mixed}])
    updates = algorithms.Update(stacked, method.kind)
    with pytest.warns(UserWarning, match="no client has any curvature"):
        info = merging.merge(method, variables, updates)[2]
    np.testing.assert_allclose(info.covered, mixed.coverage)


class Tokens(flax.linen.Module):
    """A transformer whose embedding is its head."""

    @flax.linen.compact
    def __call__(self, tokens):
        embed = flax.linen.Embed(7, 4, param_dtype=float, name="embed")
        where = flax.linen.Embed(6, 4, param_dtype=float, name="where")
        h = embed(tokens) + where(jnp.arange(tokens.shape[1]))
        normed = flax.linen.LayerNorm(param_dtype=float)(h)
        h = h + flax.linen.MultiHeadDotProductAttention(2, param_dtype=float)(normed)
        return embed.attend(flax.linen.RMSNorm(param_dtype=float)(h))


@pytest.fixture
def tokens(x64):
    model, x = Tokens(), jnp.asarray(np.random.default_rng(0).integers(0, 7, (5, 4)))
    params = drawn(model, x)
    return Model(lambda p, x: model.apply({"params": p}, x), CATEGORICAL), params, x


@pytest.mark.long
def test_padding_leaves_no_trace_in_any_form_of_layer(tokens):
    model, params, x = tokens
    exact = partial(fisher.kfac, model, params, kind=fisher.true)
    plain = exact(Examples(x))
    rows = np.concatenate([np.full((3, 4), 6), x])
    weights = np.array([0.0, 0, 0, 1, 1, 1, 1, 1])
    padded = exact(Examples(rows, weights=weights), batch_size=3)
    assert {leaf for m in plain.layers for leaf in (m.leaf, m.bias)} >= set(plain.template.names())
    chex.assert_trees_all_close(plain, padded, rtol=1e-10, atol=1e-14)


@pytest.mark.long
def test_vmapped_clients_equal_looped_ones_in_any_form_of_layer(tokens):
    model, params, x = tokens
    several = jax.tree.map(lambda leaf: np.stack([leaf, 1.1 * np.asarray(leaf)]), params)

    def one(params):
        return fisher.kfac(model, params, Examples(x), kind=fisher.true)

    looped = [one(jax.tree.map(lambda leaf, i=i: leaf[i], several)) for i in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *looped)
    chex.assert_trees_all_close(jax.vmap(one)(several), stacked, rtol=1e-9, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize(
    "factory",
    [algorithms.fedfisher, pytest.param(algorithms.fedlpa, marks=pytest.mark.slow)],
)
def test_any_form_of_layer_is_merged(tokens, factory):
    """Clients that agree merge to themselves, and curvature decides between those that do not."""
    model, params, x = tokens
    federation = clients.federation((x, x), [[0, 1], [2, 3, 4]])
    other = jax.tree.map(lambda leaf: 1.05 * np.asarray(leaf), params)
    method = factory(model, solver=solvers.conjugate_gradients(1e-10, 2000))

    def merged(models):
        updates = merging.summarize(method, models, federation, key=jax.random.key(0))
        return merging.merge(method, params, updates, federation.weights)

    same, _, _ = merged([params, params])
    chex.assert_trees_all_close(same, params, rtol=1e-6, atol=1e-9)
    between, _, info = merged([params, other])
    assert all(jax.tree.leaves(info.converged))
    mean = jax.tree.map(lambda a, b: 0.4 * np.asarray(a) + 0.6 * b, params, other)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), between, mean)
    assert min(jax.tree.leaves(moved)) > 1e-7


@pytest.mark.long
def test_an_embedding_that_is_the_head_too_keeps_the_trace_of_both(tokens):
    """Against the sum of the Fishers of the two uses, had each an embedding of its own."""
    _, params, x = tokens

    def apart(p, x):
        h = jnp.tanh(p["e"][x]).mean(1)
        return h @ p["f"].T

    def tied(p, x):
        return apart({"e": p, "f": p}, x)

    e = params["embed"]["embedding"]
    one = fisher.kfac(Model(tied, CATEGORICAL), e, Examples(x))
    two = fisher.kfac(Model(apart, CATEGORICAL), {"e": e, "f": e}, Examples(x))
    np.testing.assert_allclose(one.trace(), two.trace(), rtol=1e-10)
    assert one.factors[""]["input"].shape == (7, 7)
    assert (np.linalg.eigvalsh(dense(one)) > -1e-12).all()


class Troubled(flax.linen.Module):
    """A good dense layer in front of something that K-FAC does not cover."""

    trouble: str

    @flax.linen.compact
    def __call__(self, x):
        match self.trouble:
            case "BatchNorm":
                for name in ("bad1", "bad2", "bad3", "bad4"):
                    x = flax.linen.BatchNorm(use_running_average=True, name=name)(x)
            case "normed":
                kernel = self.param("bad", flax.linen.initializers.ones, (32, 32))
                x = x @ (kernel / jnp.linalg.norm(kernel, axis=0))
            case "nonlinear":
                x = x * jnp.exp(self.param("bad", flax.linen.initializers.ones, (32,)))
            case "low rank":
                a, b = (self.param(f"bad{i}", flax.linen.initializers.ones, (32, 32)) for i in "12")
                x = x @ jnp.tanh(a @ b)
            case "relative keys":
                keys = self.param("bad", flax.linen.initializers.ones, (15, 4))
                places = np.arange(8)[:, None] - np.arange(8) + 7
                x = jnp.einsum("bld,lrd->blr", x.reshape(-1, 8, 4), keys[places])
            case "loop":
                kernel = self.param("bad", flax.linen.initializers.ones, (32, 32))
                x = jax.lax.while_loop(
                    lambda state: state[0] < 2,
                    lambda state: (state[0] + 1, state[1] @ kernel),
                    (0, x),
                )[1]
            case "unused":
                self.param("bad", flax.linen.initializers.ones, (3,))
        return flax.linen.Dense(3, name="good")(x.reshape(x.shape[0], -1).astype(jnp.float32))


TROUBLES = {
    "BatchNorm": r"'batch_stats/bad1/mean', .*'batch_stats/bad3/mean' and 1 more: .*running mean",
    "normed": r"'params/bad': mul is applied to it",
    "nonlinear": r"'params/bad': exp is applied to it",
    "low rank": r"'params/bad1', 'params/bad2': dot_general is applied to it",
    "relative keys": r"'params/bad': parts of it are used in different ways",
    "loop": r"'params/bad': it is used inside while",
    "unused": r"'params/bad': it is not used",
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
    sizes = {
        n: s.size for n, s in zip(tree.names(variables), jax.tree.leaves(variables), strict=True)
    }
    bad = sum(size for name, size in sizes.items() if f"'{name}'" in str(refusal.value))
    if "more" not in str(refusal.value):
        assert f", {100 * bad / sum(sizes.values()):.2g} % of all" in str(refusal.value)
    assert "fallback=fisher.diagonal" in str(refusal.value)


def test_a_leaf_without_entries_needs_no_fallback(x64):
    def apply(params, x):
        return x @ params["w"] + x[:, :0] @ params["empty"]

    params, x = {"w": jnp.ones((4, 3)), "empty": jnp.ones((0, 3))}, jnp.eye(4)
    found = fisher.kfac(Model(apply, likelihoods.gaussian), params, Examples(x))
    np.testing.assert_allclose(found.factors["w"]["input"], jnp.eye(4) / 4)
    assert found.diagonal()["empty"].shape == (0, 3)


@pytest.mark.parametrize(("mode", "rows"), [("clip", [2, 0, 0, 1]), ("fill", [1, 0, 0, 0])])
def test_numbers_outside_of_a_table_count_as_the_rows_that_are_read(mode, rows):
    def apply(params, x):
        return params["e"].at[x].get(mode=mode, fill_value=0)[:, 0]

    ids, model = jnp.array([[-9], [0], [9]]), Model(apply, likelihoods.gaussian)
    found = fisher.kfac(model, {"e": jnp.ones((4, 2))}, Examples(ids))
    np.testing.assert_allclose(found.factors["e"]["input"], np.array(rows) / 3, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("trouble", ["normed", "nonlinear"])
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


@pytest.mark.long
def test_leaves_that_fall_back_merge_as_with_a_diagonal_alone(x64):
    """The damping of K-FAC is that of its layers: the rest has the diagonal's, which is none."""

    def apply(p, x):
        return (x * jnp.exp(p["s"])) @ p["w"]

    draw = np.random.default_rng(0).normal
    models = [{"s": jnp.asarray(draw(size=4)), "w": jnp.asarray(draw(size=(4, 3)))} for _ in "ab"]
    data = jnp.asarray(draw(size=(12, 4))), jnp.zeros((12, 3))
    federation = clients.federation(data, [range(5), range(5, 12)])
    merged = {}
    for structure in (partial(fisher.kfac, fallback=fisher.diagonal), fisher.diagonal):
        solver = solvers.conjugate_gradients(tolerance=1e-12)
        options = {"fisher": structure, "solver": solver}
        method = algorithms.fedfisher(Model(apply, likelihoods.gaussian), **options)
        updates = merging.summarize(method, models, federation, key=jax.random.key(0))
        merged[structure], _, _ = merging.merge(method, models[0], updates, federation.weights)
    one, other = merged.values()
    np.testing.assert_allclose(one["s"], other["s"], rtol=1e-8)
    assert np.abs(one["w"] - other["w"]).max() > 1e-3


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
