"""The server's quadratic against the formula written out with dense matrices."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import quadratic, solvers, tree
from fisherjax._layers.layer import Layer
from fisherjax.fisher import Dense, Diagonal, Kronecker
from fisherjax.fisher.operators import Template, ravel

SHAPES = {"dense": {"bias": (2,), "kernel": (3, 2)}, "rest": (2,)}
BLOCKS = {"dense": [0, 1, 2, 3, 4, 5, 6, 7], "rest": [8, 9]}  # in the order of ravel
LEAVES = {"bias": [0, 1], "kernel": [2, 3, 4, 5, 6, 7], "rest": [8, 9]}
WEIGHTS = [0.2, 0.5, 0.3]


def draw(seed):
    source = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(source.normal(size=shape)),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def gram(size, rank, seed):
    """Draw a matrix whose eigenvalues are 0 and between 1 and 2."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, rank)))
    return jnp.asarray(basis * np.linspace(1, 2, rank) @ basis.T)


def make_diagonal(params, seed):
    del seed
    # The first column is without curvature.
    seen = np.array([0.0, 1.0])
    return Diagonal(jax.tree.map(lambda x: jnp.asarray(np.square(x) * seen), params))


def make_dense(params, seed):
    return Dense(gram(10, 2, seed), Template.of(params))


def make_kronecker(params, seed):
    template = Template.of(params)
    factors = {"dense/kernel": {"input": gram(4, 1, seed), "output": gram(2, 2, seed)}}
    layers = (Layer("dense/kernel", "dense/bias", (3, 2)),)
    return Kronecker(factors, {"rest": jnp.asarray(np.abs(params["rest"]))}, layers, template)


STRUCTURES = {"diagonal": make_diagonal, "dense": make_dense, "kronecker": make_kronecker}


def make(structure, seed):
    """An operator of low rank, so that the sum over three clients stays singular."""
    return STRUCTURES[structure](draw(seed), seed)


@pytest.fixture(params=STRUCTURES)
def structure(request, x64):
    return request.param


@pytest.fixture
def clients(structure):
    return [make(structure, seed) for seed in range(3)], [draw(10 + seed) for seed in range(3)]


@pytest.fixture
def weights(x64):
    return jnp.array(WEIGHTS)


def written_out(clients):
    """The clients' matrices and models as NumPy's."""
    fishers, models = clients
    dense, flat = jax.jit(type(fishers[0]).dense), jax.jit(ravel)
    return [np.asarray(dense(f)) for f in fishers], [np.asarray(flat(w)) for w in models]


def strengths(structure, matrices, damping):
    """lambda of each parameter: damping times the mean of its block's diagonal, averaged."""
    blocks = {"diagonal": LEAVES, "kronecker": BLOCKS, "dense": {"all": list(range(10))}}[structure]
    diagonal = np.average([np.diagonal(f) for f in matrices], axis=0, weights=WEIGHTS)
    pull = np.zeros(10)
    for name, indices in blocks.items():
        # What is a diagonal beside Kronecker factors is not damped.
        is_damped = (structure, name) != ("kronecker", "rest")
        pull[indices] = is_damped * damping * diagonal[indices].mean()
    return pull


@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_the_system_is_the_gradient_of_the_loss(structure, clients, weights, damping):
    fishers, models = clients
    problem = quadratic.quadratic(tree.stack(fishers), tree.stack(models), weights, damping)
    problem = quadratic.in_fisher_units(problem)
    matrices, points = written_out(clients)
    mean = np.average(points, axis=0, weights=WEIGHTS)
    pull = strengths(structure, matrices, damping)

    @jax.jit
    @jax.grad
    def gradient(flat):
        terms = (
            0.5 * p * (flat - w) @ f @ (flat - w)
            for p, f, w in zip(WEIGHTS, matrices, points, strict=True)
        )
        return sum(terms) + 0.5 * jnp.sum(pull * (flat - mean) ** 2)

    def residual(params):
        products = problem.matvec(fishers[0].blocks(params))
        return ravel(problem.restore(jax.tree.map(np.subtract, products, problem.rhs)))

    for seed in range(2):
        x = draw(20 + seed)
        np.testing.assert_allclose(residual(x), gradient(ravel(x)), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(ravel(problem.restore(problem.init)), mean, rtol=1e-10, atol=1e-12)
    assert jax.tree.structure(problem.restore(problem.init)) == jax.tree.structure(models[0])


@pytest.mark.long
def test_every_solver_finds_the_pseudo_inverse_solution(structure, clients, weights):
    """W* = Wbar + F^+ (sum p F W - F Wbar), with F singular: Lemma 1 of the FedFisher paper."""
    problem = quadratic.quadratic(*map(tree.stack, clients), weights, 0.0)
    matrices, points = written_out(clients)
    total = np.average(matrices, axis=0, weights=WEIGHTS)
    product = np.einsum("m,mij,mj->i", WEIGHTS, matrices, points)
    mean = np.average(points, axis=0, weights=WEIGHTS)
    inverse = np.linalg.pinv(total, rtol=1e-10, hermitian=True)
    assert np.linalg.matrix_rank(total) < 10
    expected = mean + inverse @ (product - total @ mean)
    methods = [solvers.conjugate_gradients(1e-12), solvers.gradient_descent(steps=20_000)]
    methods += [solvers.closed_form()] * problem.is_diagonal
    for solve in methods:
        np.testing.assert_allclose(ravel(solve(problem).params), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", ["diagonal", "dense"], indirect=True)
@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_sums_of_clients_give_the_same_system(structure, clients, weights, damping):
    fishers, models = map(tree.stack, clients)
    whole = quadratic.quadratic(fishers, models, weights, damping)
    part = jax.tree.map(lambda x: np.asarray(x)[:2], (fishers, models, weights))
    last = jax.tree.map(lambda x: np.asarray(x)[2:], (fishers, models, weights))
    totals = jax.tree.map(np.add, quadratic.sums(*part), quadratic.sums(*last))
    summed = quadratic.from_sums(totals, damping)
    summed, whole = map(quadratic.in_fisher_units, (summed, whole))
    x = clients[0][0].blocks(draw(5))
    left, right = ((p.matvec(x), p.rhs, p.init) for p in (summed, whole))
    chex.assert_trees_all_close(left, right, rtol=1e-10, atol=1e-12)
    assert summed.is_diagonal == whole.is_diagonal == (structure == "diagonal")


@pytest.mark.parametrize("structure", ["diagonal", "dense"], indirect=True)
def test_weights_of_sums_may_have_any_sum(structure, clients, weights):
    """The quadratic divides by it; without any weight it keeps zero and stays finite."""
    fishers, models = map(tree.stack, clients)
    x = clients[0][0].blocks(draw(5))

    def system(scale):
        problem = quadratic.from_sums(quadratic.sums(fishers, models, scale * weights), 0.7)
        return problem.matvec(x), problem.rhs, problem.init

    assert quadratic.sums(fishers, models, 40 * weights).weight == pytest.approx(40)
    chex.assert_trees_all_close(system(40), system(1), rtol=1e-10, atol=1e-12)
    nothing = system(0)
    chex.assert_trees_all_equal(nothing, jax.tree.map(jnp.zeros_like, nothing))


@pytest.mark.parametrize("structure", ["diagonal", "dense"], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_sums_are_at_least_float32(structure, clients, weights, dtype):
    narrow = jax.tree.map(lambda x: x.astype(dtype), tree.stack(list(zip(*clients, strict=True))))
    totals = quadratic.sums(*narrow, weights.astype(jnp.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(totals)} == {jnp.dtype("float32")}
    problem = quadratic.from_sums(totals, 1.0)
    assert {leaf.dtype for leaf in jax.tree.leaves(problem[1:3])} == {jnp.dtype("float32")}


@pytest.mark.parametrize("structure", ["kronecker"], indirect=True)
def test_kronecker_operators_are_never_summed(clients, weights):
    fishers, models = map(tree.stack, clients)
    with pytest.raises(TypeError, match=r"Kronecker operators do not add up .*`quadratic`"):
        quadratic.sums(fishers, models, weights)


def test_only_a_diagonal_system_has_a_closed_form(structure, clients, weights):
    problem = quadratic.quadratic(*map(tree.stack, clients), weights, 0.7)
    assert problem.is_diagonal == (structure == "diagonal")
    if problem.is_diagonal:
        exact = solvers.conjugate_gradients(1e-12)(problem).params
        found = solvers.closed_form()(problem).params
        chex.assert_trees_all_close(found, exact, rtol=1e-9, atol=1e-9)
    else:
        with pytest.raises(ValueError, match=r"diagonal systems only.*conjugate_gradients\(\)"):
            solvers.closed_form()(problem)


@pytest.mark.parametrize("structure", ["diagonal"], indirect=True)
@pytest.mark.parametrize(
    "wrong", [[0.2, 0.5], [0.2, 0.5, 0.2], [2.0, 5.0, 3.0], [0.0, 0.0, 0.0], [np.nan, 0.5, 0.5]]
)
def test_weights_sum_to_one_and_are_as_many_as_clients(clients, wrong):
    with pytest.raises(ValueError, match=r"weights have shape .*each of 3 clients and sum one"):
        quadratic.quadratic(*map(tree.stack, clients), jnp.array(wrong), 0.7)


@pytest.mark.parametrize("structure", ["diagonal"], indirect=True)
@pytest.mark.parametrize("damping", [-1e-3, np.nan, np.inf])
def test_damping_is_finite_and_not_negative(clients, weights, damping):
    fishers, models = map(tree.stack, clients)
    with pytest.raises(ValueError, match=r"damping is .*; expected a finite number, zero or more"):
        quadratic.quadratic(fishers, models, weights, damping)
    with pytest.raises(ValueError, match=r"damping is .*; expected a finite number, zero or more"):
        quadratic.from_sums(quadratic.sums(fishers, models, weights), damping)


def test_damping_is_relative_to_each_block(structure, clients, weights):
    """Scaling the Fisher of one block scales its damping: the solution does not change."""
    fishers, models = clients
    problem = quadratic.quadratic(tree.stack(fishers), tree.stack(models), weights, 0.3)
    scaled = [jax.tree.map(lambda x: 1e-4 * x, f) for f in fishers]
    if not fishers[0].adds_up:
        scaled = [
            dataclasses.replace(
                f,
                factors={
                    "dense/kernel": f.factors["dense/kernel"]
                    | {"input": 1e-4 * f.factors["dense/kernel"]["input"]}
                },
            )
            for f in fishers
        ]
    rescaled = quadratic.quadratic(tree.stack(scaled), tree.stack(models), weights, 0.3)
    solve = solvers.conjugate_gradients(1e-12)
    left, right = (solve(p).params for p in (problem, rescaled))
    chex.assert_trees_all_close(left, right, rtol=1e-9, atol=1e-9)


def test_solvers_compile_once_for_problems_of_one_shape(structure, clients, weights, compilations):
    fishers, models = map(tree.stack, clients)
    solve = solvers.conjugate_gradients()
    solve(quadratic.quadratic(fishers, models, weights, 1.0))
    others, other_weights = jax.tree.map(lambda x: 2 * x, (fishers, models)), weights[::-1]
    with compilations() as count:
        solve(quadratic.quadratic(*others, other_weights, 0.5))
    assert count() == 0


def test_the_problem_crosses_jit_as_data(structure, clients, weights):
    fishers, models = map(tree.stack, clients)
    build = jax.jit(lambda f, w, p: quadratic.quadratic(f, w, p, 0.5))
    problem, traced = (
        quadratic.quadratic(fishers, models, weights, 0.5),
        build(fishers, models, weights),
    )
    solve = solvers.conjugate_gradients(1e-12)
    left, right = (solve(p).params for p in (problem, traced))
    chex.assert_trees_all_close(left, right, rtol=1e-9, atol=1e-9)
    methods = [solve] + [solvers.closed_form()] * problem.is_diagonal
    for method in methods:
        inside = jax.jit(lambda problem, method=method: method(problem).params)(problem)
        chex.assert_trees_all_close(inside, left, rtol=1e-9, atol=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("structure", ["kronecker"], indirect=True)
def test_preconditioning_finds_the_same_solution_in_fewer_products(structure, weights):
    """Factors whose eigenvalues span five decades, alike but not equal over clients."""

    def client(seed):
        source = np.random.default_rng(seed)
        sides = {}
        for side, size in (("input", 13), ("output", 12)):
            spread = np.logspace(-5, 0, size) * source.uniform(0.7, 1.4, size)
            turn = np.eye(size) + 0.02 * source.normal(size=(size, size))
            sides[side] = jnp.asarray(turn * spread @ turn.T)
        params = {"kernel": jnp.asarray(source.normal(size=(13, 12)))}
        layers = (Layer("kernel", None, (13, 12)),)
        return Kronecker({"kernel": sides}, {}, layers, Template.of(params)), params

    fishers, models = map(tree.stack, zip(*map(client, range(3)), strict=True))
    problem = quadratic.quadratic(fishers, models, weights, 1e-3)
    plain = quadratic.quadratic(fishers, models, weights, jnp.float64(1e-3))._replace(
        precondition=lambda x: x
    )
    solve = solvers.conjugate_gradients(1e-8, max_iterations=1000)
    (left, fast), (right, slow) = solve(problem), solve(plain)
    assert fast.converged["kernel"]
    assert slow.converged["kernel"]
    np.testing.assert_allclose(left["kernel"], right["kernel"], atol=1e-4)
    assert 2 * fast.iterations["kernel"] < slow.iterations["kernel"]


@pytest.mark.parametrize("structure", ["diagonal"], indirect=True)
def test_a_damped_diagonal_takes_one_product(clients, weights):
    fishers, models = map(tree.stack, clients)
    totals = quadratic.sums(fishers, models, weights)
    for problem in (
        quadratic.quadratic(fishers, models, weights, 0.1),
        quadratic.from_sums(totals, 0.1),
        quadratic.from_sums(totals, jnp.asarray(0.1)),
    ):
        info = solvers.conjugate_gradients(1e-6)(problem).info
        assert set(map(int, jax.tree.leaves(info.iterations))) == {1}
        assert all(jax.tree.leaves(info.converged))


@pytest.mark.parametrize("structure", ["kronecker"], indirect=True)
def test_a_layer_without_curvature_keeps_the_mean_under_preconditioning(clients, weights):
    fishers, models = map(tree.stack, clients)
    nothing = jax.tree.map(jnp.zeros_like, fishers)
    problem = quadratic.quadratic(nothing, models, weights, 1.0)
    solution = solvers.conjugate_gradients()(problem)
    chex.assert_trees_all_equal(solution.params, problem.restore(problem.init))
    assert set(map(int, jax.tree.leaves(solution.info.status))) == {solvers.Status.NO_CURVATURE}


def single(operators):
    """Operators of clients in float32, stacked; definite, so that the solution is unique."""
    one = tree.stack(operators)
    return jax.tree.map(lambda x: x.astype(jnp.float32), one)


def written_in_double(fishers, models, damping, weights=WEIGHTS):
    """The merge by dense float64 matrices, made of the same float32 numbers."""
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (fishers, models))
    parts = [jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), wide) for i in range(len(weights))]
    matrices, points = written_out(tuple(zip(*parts, strict=True)))
    structure = {Diagonal: "diagonal", Dense: "dense", Kronecker: "kronecker"}[type(fishers)]
    pull = np.diag(strengths(structure, matrices, damping))
    mean = np.average(points, axis=0, weights=weights)
    total = np.average(matrices, axis=0, weights=weights) + pull
    product = np.einsum("m,mij,mj->i", weights, matrices, points) + pull @ mean
    # Blocks have scales of their own, which a solve of all of them at once would not survive.
    size = 1 / np.sqrt(np.diagonal(total))
    return size * np.linalg.solve(size[:, None] * total * size, size * product)


@pytest.mark.parametrize("exponent", [-30, -15, 20, 30])
def test_the_scale_of_a_layer_is_of_no_consequence(structure, clients, weights, exponent):
    """Fishers times 1e-30 to 1e+30, in float32, whichever factor the scale is in."""
    fishers, models = single(clients[0]), single(clients[1])
    solve = solvers.conjugate_gradients(1e-6)

    def merged(change):
        system = jax.tree_util.tree_map_with_path(change, fishers)
        return solve(quadratic.quadratic(system, models, weights.astype(jnp.float32), 0.3)).params

    expected = ravel(merged(lambda path, x: x))
    for kept in ("input", "output", "neither"):

        def change(path, x, kept=kept):
            names = {getattr(part, "key", None) for part in path}
            return x if kept in names else x * jnp.float32(10.0**exponent)

        np.testing.assert_allclose(ravel(merged(change)), expected, rtol=1e-4, atol=1e-5)
    assert np.abs(expected - ravel(merged(lambda path, x: 0 * x))).max() > 0.1


@pytest.mark.parametrize("exponent", [-33, -20, 0, 20, 30])
def test_conjugate_gradients_solve_an_undamped_diagonal_of_any_scale(exponent):
    """A leaf and an entry of another one have curvature of vanishing or of huge size."""
    draw = np.random.default_rng(0)
    entries = {name: draw.exponential(size=(3, 40)).astype(np.float32) for name in ("a", "b")}
    entries["a"][:, :5] = 0  # coordinates in which no client has curvature keep the mean
    entries["a"][:, 7] *= np.float32(10.0**exponent)
    entries["b"] *= np.float32(10.0**exponent)
    models = {name: draw.normal(size=(3, 40)).astype(np.float32) for name in entries}
    totals = quadratic.sums(Diagonal(entries), models, jnp.asarray(WEIGHTS, jnp.float32))
    found = solvers.conjugate_gradients()(quadratic.from_sums(totals, 0.0)).params
    for name, x in models.items():
        curvature = np.asarray(WEIGHTS)[:, None] * entries[name].astype(np.float64)
        total = curvature.sum(0)
        quotient = (curvature * x).sum(0) / np.where(total > 0, total, 1)
        wanted = np.where(total > 0, quotient, np.average(x, axis=0, weights=WEIGHTS))
        np.testing.assert_allclose(found[name], wanted, rtol=1e-4, atol=1e-4)


def test_the_largest_numbers_of_float32_are_at_scale_one_what_they_were():
    """Also where the power of two that divides them has no normal number as its inverse."""
    numbers = jnp.float32(2.0**127) * jnp.array([1.9, -1.0, 0.1], jnp.float32)
    scaled, exponents = Diagonal({"w": numbers}).at_scale_one()
    np.testing.assert_array_equal(np.ldexp(scaled.entries["w"], exponents["w"]), numbers)


@pytest.mark.parametrize("damping", [0.1, 1.0])
@pytest.mark.parametrize("scales", [(1, 1e-30, 1e-12), (1e30, 1, 1e18), (1e-20, 0, 1e-17)])
def test_the_scale_of_a_client_is_its_vote(structure, clients, weights, scales, damping):
    """What float32 gives is what float64 makes of the same uploads."""
    models = single(clients[1])
    fishers = [
        # Half of the scale in each factor.
        jax.tree.map(lambda x, s=s, f=f: x * (s if x.ndim != 2 or f.adds_up else s**0.5), f)
        for f, s in zip(clients[0], scales, strict=True)
    ]
    fishers = single(fishers)
    problem = quadratic.quadratic(fishers, models, weights.astype(jnp.float32), damping)
    found = ravel(solvers.conjugate_gradients(1e-6)(problem).params)
    np.testing.assert_allclose(
        found, written_in_double(fishers, models, damping), rtol=1e-4, atol=1e-5
    )
    if fishers.adds_up:
        totals = quadratic.sums(fishers, models, weights.astype(jnp.float32))
        summed = solvers.conjugate_gradients(1e-6)(quadratic.from_sums(totals, damping))
        np.testing.assert_allclose(ravel(summed.params), found, rtol=1e-4, atol=1e-5)
