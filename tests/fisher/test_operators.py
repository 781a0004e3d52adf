"""Laws that hold for every Fisher operator, on pytrees of odd shapes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherjax import tree
from fisherjax._layers.layer import Layer
from fisherjax.fisher import Dense, Diagonal, Kronecker, KroneckerSum, kfac_operator
from fisherjax.fisher.operators import Template, ravel

SHAPES = {"conv": {"bias": (2,), "kernel": (2, 1, 3, 2)}, "dense": (4, 3), "rest": [(), (2, 2)]}
LAYERS = (Layer("conv/kernel", "conv/bias", (2, 1, 3, 2)), Layer("dense", None, (4, 3)))


def is_shape(node):
    return isinstance(node, tuple)


def draw(shapes, seed):
    source = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(source.normal(size=s)), shapes, is_leaf=is_shape)


def gram(size, seed):
    """Draw a positive semi-definite matrix [size, size], singular where size is above 2."""
    factor = np.random.default_rng(seed).normal(size=(size, max(1, size - 1)))
    return jnp.asarray(factor @ factor.T)


def make_diagonal(params, seed):
    del seed
    return Diagonal(jax.tree.map(jnp.square, params))


def make_dense(params, seed):
    return Dense(gram(ravel(params).size, seed), Template.of(params))


def make_kronecker(params, seed):
    template = Template.of(params)
    sizes = {"conv/kernel": (7, 2), "dense": (4, 3)}
    factors = {
        name: {"input": gram(a, seed), "output": gram(o, seed + 1)}
        for name, (a, o) in sizes.items()
    }
    entries = {name: jnp.square(template.by_name(params)[name]) for name in ("rest/0", "rest/1")}
    return Kronecker(factors, entries, LAYERS, template)


STRUCTURES = {"diagonal": make_diagonal, "dense": make_dense, "kronecker": make_kronecker}


def make(structure, seed=0):
    return STRUCTURES[structure](draw(SHAPES, seed), seed)


@pytest.fixture(params=STRUCTURES)
def structure(request, x64):
    return request.param


@pytest.fixture
def operator(structure):
    return make(structure)


@pytest.fixture
def vector(x64):
    return draw(SHAPES, 7)


def assert_same(left, right):
    chex.assert_trees_all_close(left, right, rtol=1e-10, atol=1e-12)


def in_one_line(value):
    text = repr(value)
    return str(value) == text and "\n" not in text and len(text) < 200


def test_an_operator_is_printed_in_one_line_whatever_its_leaves_are(operator):
    """Arrays, stacks, shapes, tracers, and the bare objects of a pytree that is rebuilt."""
    seen = []

    @jax.jit
    def inside(operator):
        seen.append(in_one_line(operator))
        seen.append("float64" in repr(operator))
        return operator

    stack = jax.tree.map(lambda x: jnp.stack([x, x, x]), operator)
    shapes = jax.eval_shape(inside, operator)
    leaves, structure = jax.tree.flatten(operator)
    odd = [jax.tree.unflatten(structure, [x] * len(leaves)) for x in (object(), 1, "x" * 500, 1j)]
    exponents = jax.tree.map(tree.exponent, operator)
    for value in (inside(operator), shapes, stack, exponents, *odd):
        assert in_one_line(value)
    assert all(seen)
    assert repr(operator) == repr(shapes)
    # Nothing else changes: equal by identity of leaves as before, and a pytree.
    assert jax.tree.structure(operator) == structure
    many = {f"a leaf of a very long name {i}" * 9: jnp.ones(3) for i in range(300)}
    assert in_one_line(Diagonal(many))


def test_a_printed_operator_says_how_much_of_what_it_is(x64):
    assert repr(make("diagonal")) == "Diagonal(5 leaves, 31 numbers, float64)"
    assert repr(make("dense")) == "Dense(5 leaves, 31 parameters, float64)"
    said = "5 leaves, 1 convolution and 1 dense layers, 31 parameters, float64)"
    assert repr(make("kronecker")) == f"Kronecker({said}"
    three = jax.tree.map(lambda x: jnp.stack([x, x, x]), make("kronecker"))
    assert repr(three) == f"Kronecker(3 stacked, {said}"
    assert repr(KroneckerSum(three)) == f"KroneckerSum(Kronecker(3 stacked, {said})"
    layers = tuple(Layer(f"{'long' * 99}{i}", None, (2,) * (i % 5)) for i in range(9999))
    many = Kronecker({}, {}, layers, Template(None, ((2, 2),) * 9999))
    assert in_one_line(many)


def test_mv_is_multiplication_by_the_dense_matrix(operator, vector):
    product = operator.mv(vector)
    chex.assert_trees_all_equal_shapes(product, vector)
    np.testing.assert_allclose(
        ravel(product), operator.dense() @ ravel(vector), rtol=1e-10, atol=1e-12
    )


def test_times_multiplies_the_matrix_and_keeps_dtypes(operator):
    operators = [operator]
    if isinstance(operator, Kronecker):
        operators.append(KroneckerSum(jax.tree.map(lambda x: jnp.stack([x, -x, x]), operator)))
    for own in operators:
        product = own.times(jnp.float32(2.5))
        chex.assert_trees_all_equal_shapes_and_dtypes(product, own)
        assert_same(product.dense(), 2.5 * own.dense())


def test_the_matrix_is_symmetric_positive_semi_definite(operator):
    matrix = operator.dense()
    np.testing.assert_allclose(matrix, matrix.T, rtol=1e-10, atol=1e-12)
    assert jnp.linalg.eigvalsh(matrix).min() > -1e-10


def test_diagonal_and_trace_are_those_of_the_matrix(operator, vector):
    diagonal = operator.diagonal()
    chex.assert_trees_all_equal_shapes(diagonal, vector)
    np.testing.assert_allclose(
        ravel(diagonal), jnp.diagonal(operator.dense()), rtol=1e-10, atol=1e-12
    )
    np.testing.assert_allclose(
        operator.trace(), jnp.trace(operator.dense()), rtol=1e-10, atol=1e-12
    )


def test_blocks_put_together_give_the_params_back(operator, vector):
    assert_same(operator.restore(operator.blocks(vector)), vector)
    blocks = operator.blocks(vector)
    assert_same(operator.blocks(operator.restore(blocks)), blocks)


def test_block_products_are_the_product(operator, vector):
    product = operator.restore(operator.block_mv(operator.blocks(vector)))
    assert_same(product, operator.mv(vector))


def test_block_means_are_mean_eigenvalues(operator, vector):
    """tr(F_l) / size of the block, so that they weigh up to the trace."""
    means = operator.block_means()
    sizes = jax.tree.map(jnp.size, operator.blocks(vector))
    np.testing.assert_allclose(tree.inner(means, sizes), operator.trace(), rtol=1e-10, atol=1e-12)
    # No block leans on another's scale: each mean is that of its own products with unit vectors.
    blocks = operator.blocks(operator.diagonal())
    assert_same(means, jax.tree.map(jnp.mean, blocks))


def test_operators_survive_jit_vmap_and_flattening(structure, operator, vector):
    leaves, structure_of_tree = jax.tree.flatten(operator)
    rebuilt = jax.tree.unflatten(structure_of_tree, leaves)
    expected = operator.mv(vector)
    assert_same(jax.jit(lambda f, v: f.mv(v))(rebuilt, vector), expected)
    assert_same(jax.jit(lambda f: f.trace())(operator), operator.trace())
    assert_same(jax.jit(lambda f: f.dense())(operator), operator.dense())
    others = [make(structure, seed) for seed in range(3)]
    together = jax.vmap(lambda f: f.mv(vector))(tree.stack(others))
    assert_same(together, tree.stack([other.mv(vector) for other in others]))


def test_a_kronecker_block_acts_as_input_times_v_times_output(vector):
    operator = make("kronecker")
    a, g = operator.factors["conv/kernel"]["input"], operator.factors["conv/kernel"]["output"]
    product = operator.mv(vector)["conv"]
    v = np.vstack([np.reshape(vector["conv"]["kernel"], (6, 2)), vector["conv"]["bias"]])
    expected = (np.kron(a, g) @ v.ravel()).reshape(7, 2)
    np.testing.assert_allclose(
        product["kernel"].reshape(6, 2), expected[:-1], rtol=1e-10, atol=1e-12
    )
    np.testing.assert_allclose(product["bias"], expected[-1], rtol=1e-10, atol=1e-12)


def test_kronecker_operators_without_layers_are_diagonals(x64):
    entries = {"w": jnp.array([1.0, 2.0])}
    operator = Kronecker({}, entries, (), Template.of(entries))
    assert_same(operator.dense(), jnp.diag(entries["w"]))
    assert_same(operator.mv(entries), Diagonal(entries).mv(entries))


def test_a_sum_of_kronecker_operators_is_not_the_operator_of_summed_factors(x64, vector):
    """Why the server adds products: this is the mistake that looks most natural."""
    left, right = make("kronecker", 0), make("kronecker", 5)
    summed = jax.tree.map(jnp.add, left, right)
    exact = left.dense() + right.dense()
    assert jnp.linalg.norm(summed.dense() - exact) > 0.1 * jnp.linalg.norm(exact)


shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.dictionaries(st.sampled_from("abcdef"), shapes, min_size=1))
def test_templates_unravel_what_ravel_flattened(shapes):
    params = draw(shapes, 0)
    template = Template.of(params)
    back = template.unravel(ravel(params))
    assert jax.tree.map(jnp.shape, back) == shapes
    np.testing.assert_array_equal(ravel(back), ravel(params))
    named = template.by_name(params)
    assert tuple(named) == template.names() == tree.names(params)
    assert template.restore(named).keys() == params.keys()
    assert hash(template) == hash(Template.of(back))
    assert template == Template.of(back)


@pytest.mark.long
def test_the_inverse_splits_the_shift_over_the_factors_by_their_scale(x64):
    operator, shifts = make("kronecker"), {"conv/kernel": 0.3, "dense": 2.0, "rest/0": 1.0}
    shifts = {name: jnp.asarray(x) for name, x in (shifts | {"rest/1": 0.5}).items()}
    inverse = operator.inverse(shifts)
    for name, factor in operator.factors.items():
        added = {}
        for side, matrix in factor.items():
            shifted = jnp.linalg.inv(inverse.factors[name][side])
            added[side] = (shifted - matrix)[0, 0]
            identity = jnp.eye(len(matrix))
            np.testing.assert_allclose(shifted - matrix, added[side] * identity, atol=1e-9)
        assert added["input"] * added["output"] == pytest.approx(float(shifts[name]))
        scales = {side: jnp.trace(x) / len(x) for side, x in factor.items()}
        ratio = scales["input"] / scales["output"]
        assert added["input"] / added["output"] == pytest.approx(float(ratio))
    for name, entries in operator.entries.items():
        np.testing.assert_allclose(inverse.entries[name] * (entries + shifts[name]), 1, rtol=1e-12)


@pytest.mark.parametrize("fault", [-10.0, -1.0, np.nan])
def test_where_a_factor_is_not_definite_the_identity_stands_in_wherever_that_shows(fault):
    matrix, identity = gram(5, 0), jnp.eye(5)
    for place in range(5):
        # At -1 the shifted matrix is singular to the last bit: a pivot of zero, not below it.
        base = matrix if fault < -1 else jnp.zeros((5, 5))
        broken = base.at[place, place].set(fault)
        chex.assert_trees_all_equal(kfac_operator.inverse(broken, jnp.asarray(1.0)), identity)
    sound = kfac_operator.inverse(matrix, jnp.asarray(1.0))
    np.testing.assert_allclose(sound @ (matrix + identity), identity, atol=1e-5)
