"""Layers with many inputs or outputs: what answers their residuals, and what comes out."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import _wide_layers, quadratic, solvers
from fisherjax._layers.layer import Layer
from fisherjax.fisher import Kronecker
from fisherjax.fisher.operators import Template

# Laws of any width, so of an eighth of what is wide otherwise. No other test has layers of LARGE:
# how wide a layer must be is compiled in.
WIDE, RANK, DIRECTIONS = 96, 48, 12
LARGE, FEW, CLIENTS = WIDE + 7, 3, 3
WEIGHTS = np.array([0.2, 0.5, 0.3])
OTHER = {"input": "output", "output": "input"}
# As in a merge, one program each; eagerly every operation is one.
SET_UP, ANSWER = jax.jit(_wide_layers.preconditioner), jax.jit(_wide_layers.precondition)


@pytest.fixture(scope="module", autouse=True)
def _narrower():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_wide_layers, "WIDE", WIDE)
        patch.setattr(_wide_layers, "RANK", RANK)
        yield


@pytest.fixture(scope="module")
def factors():
    """Factors of clients that see other directions, with eigenvalues from 1e3 to 1e-3."""
    source = np.random.default_rng(0)

    def client():
        turn, _ = np.linalg.qr(source.normal(size=(LARGE, DIRECTIONS)))
        spread = np.geomspace(1e3, 1e-3, DIRECTIONS)
        root = np.linalg.qr(source.normal(size=(FEW, FEW)))[0] * np.array([3.0, 1.0, 0.1])
        return {"large": (turn * spread) @ turn.T, "few": root @ root.T}

    clients = [client() for _ in range(CLIENTS)]
    return {size: np.stack([own[size] for own in clients]) for size in clients[0]}


@pytest.fixture(scope="module", params=["input", "output"])
def side(request):
    return request.param


@pytest.fixture(scope="module")
def models():
    return np.random.default_rng(1).normal(size=(CLIENTS, LARGE, FEW))


def merging(factors, models, side, scale=1.0):
    """Stacked operators and models of a layer that is wide on one side, beside a narrow one."""
    wide = {side: scale * factors["large"], OTHER[side]: factors["few"]}
    few = np.array(factors["few"])
    layers, kernel = {"wide": wide, "narrow": {"input": few, "output": few}}, models
    if side == "output":
        kernel = models.swapaxes(1, 2)
    params = {"wide": kernel, "narrow": models[:, :FEW]}
    shapes = {name: leaf.shape[1:] for name, leaf in params.items()}
    template = Template.of(jax.tree.map(lambda leaf: leaf[0], params))
    names = tuple(Layer(name, None, shape) for name, shape in shapes.items())
    return jax.tree.map(jnp.asarray, (Kronecker(layers, {}, names, template), params))


def dense_answer(factors, models, damping):
    """The wide layer's merge by a float64 solve of the system written out."""
    pairs = zip(WEIGHTS, factors["large"], factors["few"], models, strict=True)
    means = np.trace(factors["large"], axis1=1, axis2=2) * np.trace(
        factors["few"], axis1=1, axis2=2
    )
    shift = damping * WEIGHTS @ means / (LARGE * FEW)
    matrix, rhs = shift * np.eye(LARGE * FEW), shift * np.tensordot(WEIGHTS, models, 1).ravel()
    for weight, left, right, model in pairs:
        matrix += weight * np.kron(left, right)
        rhs += weight * (left @ model @ right).ravel()
    return np.linalg.solve(matrix, rhs).reshape(LARGE, FEW)


def solved(fishers, params, damping=1.0, tolerance=1e-8):
    problem = quadratic.quadratic(fishers, params, jnp.asarray(WEIGHTS), damping)
    return solvers.conjugate_gradients(tolerance)(problem)


@pytest.mark.long
def test_the_merge_is_that_of_the_system_written_out(factors, models, side, x64):
    expected = dense_answer(factors, models, 0.3)
    found = solved(*merging(factors, models, side), damping=0.3, tolerance=1e-11)
    wide = found.params["wide"]
    np.testing.assert_allclose(wide if side == "input" else wide.T, expected, rtol=1e-6, atol=1e-7)
    assert all(jax.tree.leaves(found.info.converged))


@pytest.mark.slow
def test_a_wide_layer_alone_is_merged_as_beside_a_narrow_one(factors, models, x64):
    fishers, params = merging(factors, models, "input")
    changes = {"factors": {"wide": fishers.factors["wide"]}, "layers": fishers.layers[:1]}
    kept = {"wide": params["wide"]}
    template = Template.of(jax.tree.map(lambda leaf: leaf[0], kept))
    alone = dataclasses.replace(fishers, **changes, template=template)
    found = solved(alone, kept, tolerance=1e-11).params["wide"]
    beside = solved(fishers, params, tolerance=1e-11).params["wide"]
    np.testing.assert_allclose(found, beside, rtol=1e-8, atol=1e-9)


@pytest.mark.long
def test_it_takes_a_fraction_of_the_products_that_the_mean_of_the_factors_takes(
    factors, models, side, x64
):
    fishers, params = merging(factors, models, side)
    problem = quadratic.quadratic(fishers, params, jnp.asarray(WEIGHTS), 0.1)
    mean = jax.tree.map(lambda x: jnp.tensordot(jnp.asarray(WEIGHTS), x, 1), fishers.factors)
    one = Kronecker(mean, {}, fishers.layers, fishers.template)
    shifts = one.block_damping(one.block_means(), 0.1)
    plain = problem._replace(
        precondition=partial(Kronecker.block_mv, one.inverse(shifts)), slack=None
    )
    solve = solvers.conjugate_gradients(1e-6, max_iterations=1000)
    fast, slow = (solve(p).info.iterations["wide"] for p in (problem, plain))
    assert 3 * fast < slow


def test_what_fits_into_the_few_directions_is_solved_to_the_slack(factors, side, x64):
    """Together the clients see 36 directions: the small system is all of it."""
    pair = {side: jnp.asarray(factors["large"]), OTHER[side]: jnp.asarray(factors["few"])}
    own = SET_UP(pair, jnp.asarray(WEIGHTS), jnp.asarray(0.7))
    residual = np.random.default_rng(2).normal(size=(LARGE, FEW))
    residual = residual if side == "input" else residual.T
    answer = ANSWER(own, residual)
    products = np.asarray(pair["input"]) @ np.asarray(answer) @ np.asarray(pair["output"])
    left = np.tensordot(WEIGHTS, products, 1) + 0.7 * np.asarray(answer) - residual
    assert np.linalg.norm(left) <= _wide_layers.SLACK * np.linalg.norm(residual)


@pytest.mark.parametrize("wide", [("input",), ("output",), ("input", "output")])
def test_what_is_flat_beside_the_few_directions_is_solved_to_the_slack(wide, x64):
    """Each client's factors are some directions, and the same curvature in all others."""
    source = np.random.default_rng(4)

    def factor(side):
        size = LARGE if side in wide else FEW
        roots = source.normal(size=(CLIENTS, size, 10 if side in wide else 2))
        flat = np.array([0.1, 0.5, 2.0])[:, None, None] * np.eye(size)
        return 10 * roots @ roots.swapaxes(1, 2) + flat

    pair = {side: factor(side) for side in ("input", "output")}
    residual = source.normal(size=(pair["input"].shape[-1], pair["output"].shape[-1]))
    own = SET_UP(jax.tree.map(jnp.asarray, pair), jnp.asarray(WEIGHTS), jnp.asarray(0.01))
    answer = np.asarray(ANSWER(own, residual))
    products = np.tensordot(WEIGHTS, pair["input"] @ answer @ pair["output"], 1)
    left = products + 0.01 * answer - residual
    assert np.linalg.norm(left) <= _wide_layers.SLACK * np.linalg.norm(residual)


def test_zeros_stay_zeros_and_without_damping_nothing_is_changed(factors, x64):
    pair = {"input": jnp.asarray(factors["large"]), "output": jnp.asarray(factors["few"])}
    residual = np.random.default_rng(3).normal(size=(LARGE, FEW))
    for shift in (0.0, 1.0):
        own = SET_UP(pair, jnp.asarray(WEIGHTS), jnp.asarray(shift))
        chex.assert_trees_all_equal(ANSWER(own, 0 * residual), 0 * residual)
    own = SET_UP(pair, jnp.asarray(WEIGHTS), jnp.asarray(0.0))
    chex.assert_trees_all_equal(ANSWER(own, residual), residual)


@pytest.mark.long
def test_scale_and_clients_without_weight_do_not_matter(factors, models):
    """In float32, as clients send it."""
    narrow = jax.tree.map(np.float32, (factors, models))
    expected = solved(*merging(*narrow, "input"), tolerance=1e-6).params
    for scale in (np.float32(1e-25), np.float32(1e25)):
        found = solved(*merging(*narrow, "input", scale), tolerance=1e-6).params
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)
    fishers, params = merging(*narrow, "input")
    more, other = jax.tree.map(lambda x: np.concatenate([x, 1e6 * x[:1]]), (fishers, params))
    silent = jnp.asarray([*WEIGHTS, 0.0], jnp.float32)
    problem = quadratic.quadratic(more, other, silent, 1.0)
    found = solvers.conjugate_gradients(1e-6)(problem).params
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_derivatives_and_many_dampings_at_once(factors, models, x64):
    fishers, params = merging(factors, models, "input")

    def sizes(damping):
        return jnp.square(solved(fishers, params, damping, 1e-10).params["wide"]).sum()

    dampings = jnp.array([0.1, 1.0])
    together = jax.jit(jax.vmap(sizes))(dampings)
    np.testing.assert_allclose(together, [sizes(damping) for damping in dampings], rtol=1e-6)
    step = 1e-4
    slope = (sizes(jnp.float64(1 + step)) - sizes(jnp.float64(1 - step))) / (2 * step)
    np.testing.assert_allclose(jax.grad(sizes)(jnp.float64(1.0)), slope, rtol=1e-4)


@pytest.mark.long
def test_tables_and_narrow_layers_have_none(x64):
    wide, narrow, entries = np.eye(WIDE), np.eye(WIDE - 1), np.ones((2, WIDE))
    assert _wide_layers.is_wide({"input": narrow, "output": wide})
    assert not _wide_layers.is_wide({"input": narrow, "output": narrow})
    assert not _wide_layers.is_wide({"input": entries, "output": np.stack([wide, wide])})
