"""Laws of merging adapters by their products, against dense matrices in NumPy's float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import adapters, solvers
from fisherjax.adapters import Adapter

INPUTS, OUTPUTS = 9, 7
WEIGHTS = [1.0, 3.0, 2.0]
SHARES = np.array(WEIGHTS) / 6
# Ranks and scales differ; the second client adapts another layer too.
RANKS = {"one": (2, 4, 3), "two": (None, 1, None)}
PRECISION = {"float32": 2e-6, "float64": 1e-13}
EXACT = solvers.conjugate_gradients(tolerance=1e-12, max_iterations=500)


def draw_adapter(source, rank, scale, dtype):
    a = source.normal(size=(rank, INPUTS)).astype(dtype)
    return Adapter(a, source.normal(size=(OUTPUTS, rank)).astype(dtype), scale)


def draw_factor(source, size, rank, dtype):
    x = source.normal(size=(size, rank)) * source.lognormal(size=(size, 1))
    return (x @ x.T / rank).astype(dtype)


def draw(dtype="float64", seed=0):
    """Return the adapters of three clients and their factors, some of which are singular."""
    source = np.random.default_rng(seed)
    clients, factors = [], []
    for i, scale in enumerate((0.5, 2.0, 1.0)):
        ranks = {name: RANKS[name][i] for name in RANKS if RANKS[name][i]}
        clients.append({n: draw_adapter(source, r, scale, dtype) for n, r in ranks.items()})
        sizes = {"input": (INPUTS, 5 + i), "output": (OUTPUTS, 6)}
        factors.append(
            {
                name: {side: draw_factor(source, *x, dtype) for side, x in sizes.items()}
                for name in RANKS
            }
        )
    return clients, factors


def dense(adapter):
    """The change of V, written out."""
    a, b = np.asarray(adapter.a, np.float64), np.asarray(adapter.b, np.float64)
    return float(adapter.scale) * (b @ a).T


def change_gauge(client, seed):
    """Return (R A, B R^-1) for an invertible R, whose condition is moderate."""
    source = np.random.default_rng(seed)

    def change(adapter):
        rank = len(adapter.a)
        r = np.linalg.qr(source.normal(size=(rank, rank)))[0] * source.uniform(0.3, 3, rank)
        a, b = r @ adapter.a, adapter.b @ np.linalg.inv(r)
        return Adapter(a.astype(adapter.a.dtype), b.astype(adapter.b.dtype), adapter.scale)

    return {name: change(adapter) for name, adapter in client.items()}


def close(found, expected, tolerance):
    error = np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected)
    assert error < tolerance, error


def inputs_only(factors):
    return [{name: {"input": pair["input"]} for name, pair in x.items()} for x in factors]


def metric(factor, size):
    """A square root of a factor, which may be a diagonal or None."""
    if factor is None:
        return np.eye(size)
    values, vectors = np.linalg.eigh(np.diag(factor) if np.ndim(factor) == 1 else factor)
    return vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T


def blocks(factors, name):
    """Each client's share of the dense Kronecker products."""
    for share, x in zip(SHARES, factors, strict=True):
        output = np.asarray(x[name].get("output", np.eye(OUTPUTS)), np.float64)
        yield share * np.kron(np.asarray(x[name]["input"], np.float64), output)


def matrix_of(factors, name, damping):
    system = sum(blocks(factors, name))
    return system + damping * np.trace(system) / len(system) * np.eye(len(system))


def solution(clients, factors, name, damping):
    """The minimum of the quadratic, as one dense system."""
    changes = [dense(x[name]) if name in x else np.zeros((INPUTS, OUTPUTS)) for x in clients]
    pairs = zip(blocks(factors, name), changes, strict=True)
    rhs = sum(block @ change.ravel() for block, change in pairs)
    mean = sum(share * change.ravel() for share, change in zip(SHARES, changes, strict=True))
    system = matrix_of(factors, name, damping)
    shift = (system - matrix_of(factors, name, 0.0))[0, 0]
    return np.linalg.solve(system, rhs + shift * mean).reshape(INPUTS, OUTPUTS)


@pytest.fixture(params=[(), pytest.param(("x64",), marks=pytest.mark.long)], ids=["32", "64"])
def dtype(request):
    for fixture in request.param:
        request.getfixturevalue(fixture)
    return jnp.result_type(float).name


def test_the_mean_is_that_of_the_dense_changes(dtype):
    """Also of unequal ranks and scales, and of a layer that only one client adapts."""
    clients, _ = draw(dtype)
    merged = adapters.merge(clients, WEIGHTS)
    one = sum(s * dense(client["one"]) for s, client in zip(SHARES, clients, strict=True))
    close(adapters.product(merged["one"]), one, PRECISION[dtype])
    close(adapters.product(merged["two"]), SHARES[1] * dense(clients[1]["two"]), PRECISION[dtype])
    assert [len(merged[name].a) for name in RANKS] == [9, 1]


@pytest.mark.parametrize(
    "choose",
    [lambda x: None, inputs_only, pytest.param(lambda x: x, marks=pytest.mark.long)],
    ids=["mean", "input factors", "both factors"],
)
def test_a_change_of_gauge_changes_nothing(dtype, choose):
    clients, factors = draw(dtype)
    others = [change_gauge(client, seed) for seed, client in enumerate(clients)]
    # The factors do change: what merges by them merges something else.
    assert np.linalg.norm(others[0]["one"].a - clients[0]["one"].a) > 1
    # Conjugate gradients that stop in the same step are the same function of the same products.
    for rank in (None, 3):
        merge = partial(adapters.merge, weights=WEIGHTS, factors=choose(factors), rank=rank)
        first, second = (merge(x)["one"] for x in (clients, others))
        close(adapters.product(second), dense(first), 10 * PRECISION[dtype])


def test_one_adapter_comes_back_as_the_same_product(dtype):
    clients, factors = draw(dtype)
    for held in (None, inputs_only(factors)):
        for rank in (None, 2):
            found = adapters.merge(clients[:1], [2.0], held and held[:1], rank=rank)
            close(adapters.product(found["one"]), dense(clients[0]["one"]), 1e-6)
    # A rank that is enough: the sum of an adapter with itself has its rank.
    twice = adapters.weighted_sum([clients[0]["one"]] * 2, [0.25, 0.75])
    close(adapters.product(adapters.truncate(twice, 2)), dense(clients[0]["one"]), 1e-6)


@pytest.mark.long
def test_of_one_client_the_mean_is_what_curvature_gives():
    """The solver begins there; the cut of the rank is in the metric of both factors."""
    clients, factors = draw("float32")
    found = adapters.merge(clients[:1], [2.0], factors[:1], rank=2)
    close(adapters.product(found["one"]), dense(clients[0]["one"]), 1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("choose", "tolerance"),
    [(inputs_only, 1e-12), pytest.param(lambda x: x, 1e-9, marks=pytest.mark.long)],
    ids=["input factors", "both factors"],
)
def test_factors_weigh_the_changes_as_the_dense_quadratic_does(choose, tolerance):
    clients, factors = draw()
    held = choose(factors)
    for damping in (1.0, 0.1):
        merged = adapters.merge(clients, WEIGHTS, held, damping=damping, solver=EXACT)
        for name in RANKS:
            close(dense(merged[name]), solution(clients, held, name, damping), tolerance)


@pytest.mark.long
@pytest.mark.usefixtures("x64")
def test_in_the_span_of_the_factors_the_solution_is_the_best_one():
    """That is the Galerkin solution, from dense bases; its rank is that of all adapters."""
    clients, factors = draw(seed=7)
    # The third has the second's inputs, so that the stacked A has less than its nine rows.
    clients[2]["one"] = clients[2]["one"]._replace(a=clients[1]["one"].a[:3])
    how = {"factors": factors, "damping": 0.3, "in_span": True, "solver": EXACT}
    found = adapters.merge(clients, WEIGHTS, **how)["one"]
    rows = np.concatenate([x["one"].a for x in clients[:2]])
    columns = np.concatenate([x["one"].b for x in clients], axis=1)
    v, u = np.linalg.qr(rows.T)[0], np.linalg.svd(columns)[0]
    span = np.kron(v, u)
    best, system = solution(clients, factors, "one", 0.3), matrix_of(factors, "one", 0.3)
    core = np.linalg.solve(span.T @ system @ span, span.T @ system @ best.ravel())
    close(dense(found), (span @ core).reshape(INPUTS, OUTPUTS), 1e-8)
    # Where the adapters span all, it is the solution itself.
    wide = [{"one": x["one"]} for x in draw(seed=8)[0]]
    merge = partial(adapters.merge, wide, WEIGHTS, factors, solver=EXACT)
    close(dense(merge(in_span=True)["one"]), dense(merge()["one"]), 1e-8)
    # A change of gauge changes nothing.
    others = [change_gauge(client, seed) for seed, client in enumerate(clients)]
    close(dense(adapters.merge(others, WEIGHTS, **how)["one"]), dense(found), 1e-8)


def test_without_output_factors_the_rank_does_not_grow():
    clients, factors = draw("float32")
    merged = adapters.merge(clients, WEIGHTS, inputs_only(factors))
    assert [len(merged[name].a) for name in RANKS] == [9, 1]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.long), 5])
@pytest.mark.parametrize(
    "sides", [(None, None), ("full", "full"), ("low", "low"), ("diagonal", "full"), ("full", None)]
)
def test_truncation_is_the_best_of_its_rank_in_the_metric(sides, rank):
    """The error is that of Eckart and Young for the dense weighted matrix."""
    source = np.random.default_rng(3)
    makers = {
        "full": lambda size: draw_factor(source, size, 2 * size, "float64"),
        "low": lambda size: draw_factor(source, size, 3, "float64"),
        "diagonal": lambda size: source.uniform(0.1, 3, size),
    }
    sizes = {"input": INPUTS, "output": OUTPUTS}
    kinds = dict(zip(sizes, sides, strict=True))
    factors = {s: None if kind is None else makers[kind](sizes[s]) for s, kind in kinds.items()}
    left, right = (metric(factors[side], sizes[side]) for side in sizes)
    clients, _ = draw()
    stacked = adapters.weighted_sum([x["one"] for x in clients], SHARES)
    found = adapters.truncate(stacked, rank, factors)
    assert found.a.shape == (rank, INPUTS)
    weighted = left @ dense(stacked) @ right
    rest = np.linalg.svd(weighted, compute_uv=False)[rank:]
    error = np.linalg.norm(left @ (dense(stacked) - dense(found)) @ right)
    np.testing.assert_allclose(error, np.sqrt((rest**2).sum()), rtol=1e-9, atol=1e-7)
    # The same of a matrix that comes in full.
    other = adapters.truncate(adapters.from_product(jnp.asarray(dense(stacked))), rank, factors)
    if error > 1e-6:
        close(left @ dense(other) @ right, left @ dense(found) @ right, 1e-8)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("side", ["input", "output"])
def test_the_mean_of_factors_is_their_sum_if_clients_share_one_side(side):
    _, factors = draw()
    shared = {side: factors[0]["one"][side]}
    held = [x["one"] | shared for x in factors]
    mean = adapters.mean_factors(held, SHARES)
    found = np.kron(mean["input"], mean["output"])
    expected = sum(s * np.kron(x["input"], x["output"]) for s, x in zip(SHARES, held, strict=True))
    close(found / np.trace(found), expected / np.trace(expected), 1e-12)


@pytest.mark.usefixtures("x64")
def test_clients_without_curvature_in_a_layer_do_not_vote_there():
    """They may lack its factors if they do not adapt it; the damping still knows their zero."""
    clients, factors = draw()
    factors = inputs_only(factors)
    zero = {"input": np.zeros((INPUTS, INPUTS))}
    known = [{"two": x["two"] if i == 1 else zero, "one": x["one"]} for i, x in enumerate(factors)]
    absent = [x if i == 1 else {"one": x["one"]} for i, x in enumerate(factors)]
    found = adapters.merge(clients, WEIGHTS, absent)["two"]
    close(dense(found), solution(clients, known, "two", 1.0), 1e-12)


@pytest.mark.long
def test_factors_that_are_all_zero_give_the_mean():
    clients, factors = draw("float32")
    zero = jax.tree.map(np.zeros_like, inputs_only(factors))
    mean, best = (adapters.merge(clients, WEIGHTS, rank=rank) for rank in (None, 2))
    merged, few = (adapters.merge(clients, WEIGHTS, zero, rank=rank) for rank in (None, 2))
    close(dense(merged["one"]), dense(mean["one"]), 1e-6)
    close(dense(few["one"]), dense(best["one"]), 1e-5)


def test_a_client_without_weight_may_have_any_factors():
    clients, _ = draw("float32")
    wrong = {"one": clients[0]["one"]._replace(a=np.full((2, INPUTS), np.inf, "float32"))}
    found = adapters.merge([wrong, *clients[1:]], [0, 3, 2])
    expected = adapters.merge(clients[1:], [3, 2])
    close(dense(found["one"]), dense(expected["one"]), 1e-6)


def test_merges_are_programs_that_map_over_problems():
    """Under jit and vmap, with the weights as arguments."""
    clients, factors = draw("float32")
    held = inputs_only(factors)

    @partial(jax.vmap, in_axes=(None, None, 0))
    def merge(clients, factors, weights):
        return adapters.product(adapters.merge(clients, weights, factors, rank=2)["one"])

    weights = jnp.asarray([WEIGHTS, [1.0, 0.0, 0.0]])
    first, second = jax.jit(merge)(clients, held, weights)
    close(first, dense(adapters.merge(clients, WEIGHTS, held, rank=2)["one"]), 1e-5)
    close(second, dense(clients[0]["one"]), 1e-5)


def test_half_precision_is_merged_in_float32():
    clients, _ = draw("float32")
    halves = [
        {n: x._replace(a=jnp.asarray(x.a, jnp.bfloat16), b=jnp.asarray(x.b, jnp.bfloat16))}
        for client in clients
        for n, x in client.items()
        if n == "one"
    ]
    merged = adapters.merge(halves, WEIGHTS)["one"]
    assert merged.a.dtype == merged.b.dtype == jnp.float32
    expected = sum(s * dense(x["one"]) for s, x in zip(SHARES, halves, strict=True))
    close(dense(merged), expected, 1e-6)


def test_the_distance_of_two_changes_is_that_of_the_matrices():
    clients, _ = draw("float32")
    one, other = clients[0]["one"], clients[1]["one"]
    expected = np.linalg.norm(dense(one) - dense(other)) / np.linalg.norm(dense(one))
    np.testing.assert_allclose(adapters.distance(one, other), expected, rtol=1e-5)
    assert adapters.distance(one._replace(scale=0.0), one._replace(scale=0.0)) == 0


def test_bad_input_is_named():
    clients, factors = draw("float32")
    short = {"one": clients[0]["one"]._replace(a=np.ones((2, INPUTS + 1), "float32"))}
    torn = {"one": clients[0]["one"]._replace(a=np.ones((3, INPUTS), "float32"))}
    lacking = [{"two": factors[0]["two"]}, *factors[1:]]
    biased = [jax.tree.map(lambda x: np.pad(x, (0, 1)), factors[0]), *factors[1:]]
    mixed = [*inputs_only(factors)[:1], *factors[1:]]
    for wrong, words in (
        ({"adapters": [{}, {}]}, "There are no adapters"),
        ({"adapters": [short, *clients[1:]]}, "'one' change a matrix .*10, 7.* in client 0"),
        ({"adapters": [torn, *clients[1:]]}, "client 0: the adapter of 'one' has factors"),
        ({"factors": lacking}, "client 0 adapts .'one'. and has no factors"),
        ({"factors": biased}, "client 0: the input factor of 'one' has shape .*without a bias"),
        ({"factors": factors[:2]}, "factors has 2 clients; expected 3"),
        ({"factors": mixed}, "'output' for all clients or for none"),
        ({"weights": [1, 2]}, "expected \\(3,\\)"),
        ({"weights": [0, 0, 0]}, "Every weight is zero"),
        ({"rank": 0}, "the rank of 'one' is 0"),
        ({"damping": 0.0}, "damping"),
    ):
        with pytest.raises(ValueError, match=words):
            adapters.merge(**{"adapters": clients, "weights": WEIGHTS} | wrong)
    with pytest.raises(TypeError, match=r"expected an adapters\.Adapter"):
        adapters.merge([{"one": np.ones((3, 3))}])
