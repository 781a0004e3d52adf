"""What merging achieves, at once or in chunks, and what it refuses."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, fisher, merging, solvers, training
from fisherjax._layers.layer import Layer
from fisherjax.algorithms import Update

WEIGHTS = np.array([3.0, 0.0, 5.0, 1.0, 2.0])
PARAMS = {"w": jnp.zeros((3, 2))}


def apply(params, x):
    return x @ params["w"]


MODEL, BASE = fj.Model(apply, fj.likelihoods.categorical), optax.sgd(0.5, 0.9)
FEDAVG = algorithms.fedavg()
METHODS = {
    "fedavg": FEDAVG,
    "fisher_merge": algorithms.fisher_merge(MODEL),
    "fedfisher diagonal": algorithms.fedfisher(MODEL, fisher=fisher.diagonal, damping=0.5),
    "fedfisher full": algorithms.fedfisher(MODEL, fisher=fisher.full, damping=0.5),
    "regmean": algorithms.regmean(MODEL),
    "fednova": algorithms.fednova(),
    "scaffold": algorithms.scaffold(),
}


def models(*values):
    return Update({"params": {"w": jnp.asarray(values, float)[:, None]}}, FEDAVG.kind)


FIVE = models(0, 1, 2, 3, 4)


def rows(updates, chosen):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[chosen]), updates)


@pytest.fixture(scope="module")
def updates():
    source = np.random.default_rng(0)
    data = source.normal(size=(40, 3)).astype(np.float32), source.integers(0, 2, 40)
    federation = clients.federation(data, np.split(np.arange(40), [9, 20, 25, 32]))
    sent = {}
    for name, method in METHODS.items():
        trained = training.train(
            MODEL,
            PARAMS,
            federation,
            key=jax.random.key(0),
            optimizer=method.optimizer(BASE),
            epochs=2,
            batch_size=4,
        )
        sent[name] = merging.summarize(method, trained, federation, key=jax.random.key(0))
    return sent


# In chunks.


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shards", [[[0, 1, 2, 3, 4]], [[2], [0, 4], [1, 3]], [[1], [4, 3, 2, 0]]])
def test_sums_of_servers_are_those_of_one_however_clients_are_divided(name, shards, updates):
    # The second client has no weight: a server may have clients of no weight only.
    def chunks(shard):
        return [(rows(updates[name], [i]), WEIGHTS[[i]]) for i in shard]

    found = [merging.sum_stream(METHODS[name], PARAMS, chunks(shard)) for shard in shards]
    assert sum(number for _, number in found) == 5
    sums = jax.tree.map(lambda *parts: sum(parts), *(part for part, _ in found))
    merged, *_ = merging.merge_sums(METHODS[name], PARAMS, sums, jnp.arange(5))
    together, *_ = merging.merge(METHODS[name], PARAMS, updates[name], WEIGHTS)
    chex.assert_trees_all_close(merged, together, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4], [2, 4]])
def test_chunks_merge_to_what_all_merge_to_at_once(updates, name, cuts):
    expected, state, _ = merging.merge(METHODS[name], PARAMS, updates[name], WEIGHTS)
    parts = np.split(np.arange(5), cuts)
    chunks = ((rows(updates[name], part), WEIGHTS[part]) for part in parts)
    merged, streamed, _ = merging.merge_stream(METHODS[name], PARAMS, chunks)
    chex.assert_trees_all_close(merged, expected, rtol=2e-4, atol=1e-6)
    chex.assert_trees_all_close(streamed, state, rtol=1e-5, atol=1e-7)


def test_lists_stream_too_and_weights_are_equal_without_any():
    one_by_one = (([rows(models(x), 0)], None) for x in (1.0, 2.0, 6.0))
    merged, *_ = merging.merge_stream(FEDAVG, {"w": jnp.zeros(1)}, one_by_one)
    assert merged["w"] == pytest.approx(3.0)


def test_later_chunks_of_the_same_shape_compile_nothing(compilations):
    counts = []

    def chunks():
        for seed in range(4):
            counts.append(count())
            w = np.random.default_rng(seed).normal(size=(7, 3)).astype(np.float32)
            yield Update({"params": {"w": w}}, FEDAVG.kind), None

    with compilations() as count:
        merging.merge_stream(FEDAVG, {"w": jnp.zeros(3)}, chunks())
    assert counts[2] == counts[3]


def test_a_diverged_client_is_counted_over_all_chunks_or_left_out():
    def chunks():
        yield FIVE, WEIGHTS
        yield models(1.0, np.nan), [1, 1]

    start = {"w": jnp.zeros(1)}
    with pytest.raises(ValueError, match=r"clients \[6\] are not finite .*client 6: leaf 'par"):
        merging.merge_stream(FEDAVG, start, chunks())
    with pytest.warns(UserWarning, match="Left out.* client 6 for leaf 'params/w'"):
        merged, *_ = merging.merge_stream(FEDAVG, start, chunks(), on_nonfinite="drop")
    expected = (WEIGHTS @ np.arange(5.0) + 1) / (WEIGHTS.sum() + 1)
    assert merged["w"] == pytest.approx(expected)


KRONECKER = algorithms.fedfisher(MODEL)


@pytest.mark.parametrize(
    ("method", "chunks", "error", "words"),
    [
        (KRONECKER, [(FIVE, WEIGHTS)], ValueError, "Kronecker"),
        (FEDAVG, [], ValueError, "no chunks"),
        (FEDAVG, [(FIVE, 0 * WEIGHTS)], ValueError, "None of the 5 clients has weight"),
        (FEDAVG, [(FIVE, WEIGHTS[:2])], ValueError, r"shape \(2,\); expected \(5,\)"),
        (FEDAVG, [(FIVE, -WEIGHTS)], ValueError, "non-negative"),
        (FEDAVG, [FIVE], ValueError, r"Chunk 0 is a Update; expected a pair"),
        (FEDAVG, [(FIVE.values, WEIGHTS)], TypeError, "updates is a dict"),
        (METHODS["fednova"], [(FIVE, WEIGHTS)], ValueError, "holds 'params', but"),
    ],
)
def test_what_cannot_be_streamed_is_refused(method, chunks, error, words):
    with pytest.raises(error, match=words):
        merging.merge_stream(method, {"w": jnp.zeros(1)}, chunks)


def test_chunks_of_other_networks_are_refused():
    other = Update({"params": {"w": jnp.zeros((2, 3))}}, FEDAVG.kind)
    with pytest.raises(ValueError, match=r"Chunk 1 holds .*\(3,\).* but chunk 0 .*\(1,\)"):
        merging.merge_stream(FEDAVG, {"w": jnp.zeros(1)}, [(FIVE, None), (other, None)])


# Weights of any size.


@pytest.mark.parametrize("scale", [1e38, 1.0, 1e-40])
@pytest.mark.parametrize("name", METHODS)
def test_weights_are_scaled_on_the_host_whatever_their_size(updates, name, scale):
    """In float32 the large ones would overflow in their sum, and the small ones vanish."""
    expected, *_ = merging.merge(METHODS[name], PARAMS, updates[name], WEIGHTS)
    weights = scale * WEIGHTS
    merged, *_ = merging.merge(METHODS[name], PARAMS, updates[name], weights)
    chex.assert_trees_all_close(merged, expected, rtol=1e-5, atol=1e-7)
    chunks = ((rows(updates[name], part), weights[part]) for part in ([1], [0, 2], [3, 4]))
    streamed, *_ = merging.merge_stream(METHODS[name], PARAMS, chunks)
    chex.assert_trees_all_close(streamed, expected, rtol=2e-4, atol=1e-6)


# Inside somebody's jit.


@pytest.mark.parametrize("name", METHODS)
def test_updates_may_be_closed_over_inside_jit(updates, name):
    method, sent = METHODS[name], updates[name]
    expected, *_ = merging.merge(method, PARAMS, sent, WEIGHTS)
    found = [jax.jit(lambda w: merging.merge(method, PARAMS, sent, w)[0])(jnp.asarray(WEIGHTS))]
    if method.model is None:  # and params, or nothing at all
        found.append(jax.jit(lambda p: merging.merge(method, p, sent, WEIGHTS)[0])(PARAMS))
        found.append(jax.jit(lambda: merging.merge(method, PARAMS, sent, WEIGHTS)[0])())
    for merged in found:
        chex.assert_trees_all_close(merged, expected, rtol=1e-5, atol=1e-6)


def test_merges_may_be_mapped_over_weights():
    many = jnp.array([[1.0, 0, 0, 0, 0], [0, 0, 0, 0, 3.0], [1, 1, 1, 1, 1]])
    merged = jax.vmap(lambda w: merging.merge(FEDAVG, {"w": jnp.zeros(1)}, FIVE, w)[0])(many)
    np.testing.assert_allclose(merged["w"][:, 0], [0, 4, 2])


# Any pytree of params.


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "container"),
    [
        ("fedavg", list),
        ("fedavg", tuple),
        pytest.param("fednova", list, marks=pytest.mark.slow),
        ("scaffold", list),
        pytest.param("fedfish_last_epoch", list, marks=pytest.mark.slow),
    ],
)
def test_params_may_be_lists_of_pairs(name, container):
    """As JAX's tutorials write a network: [(W, b), ...]."""
    source = np.random.default_rng(0)

    def network(params, x):
        for kernel, bias in params[:-1]:
            x = jnp.tanh(x @ kernel + bias)
        return x @ params[-1][0] + params[-1][1]

    def draw():
        shapes = [((3, 4), (4,)), ((4, 2), (2,))]
        pairs = (tuple(source.normal(size=s).astype(np.float32) for s in two) for two in shapes)
        return container(pairs)

    start = draw()
    data = source.normal(size=(12, 3)).astype(np.float32), source.integers(0, 2, 12)
    federation = clients.federation(data, np.split(np.arange(12), [5]))
    mask = container([(True, True), (True, False)])
    model = fj.Model(network, fj.likelihoods.categorical, mask=mask)
    method, key = algorithms.make(name, model), jax.random.key(0)
    options = {"key": key, "optimizer": method.optimizer(BASE), "epochs": 2, "batch_size": 4}
    trained = training.train(model, start, federation, **options)
    assert trained.params[1][1] is None
    assert np.all(trained.models[1][1] == start[1][1])
    updates = merging.summarize(method, trained, federation, key=key)
    merged, *_ = merging.merge(method, start, updates, federation.weights)
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, start)
    experiment = fj.rounds.federated(
        model, method, cohort=2, optimizer=BASE, epochs=2, batch_size=4
    )
    state = experiment.init(start, 2)
    [(after, _)] = fj.rounds.run(experiment, state, federation, key=key, rounds=1)
    chex.assert_trees_all_equal_shapes_and_dtypes(after.params, start)
    if updates.values.keys() != {"params"}:
        return
    # A list of models is not mistaken for one, nor one for a list.
    given = [rows(trained.params, i) for i in range(2)]
    listed = merging.summarize(method, given, federation, key=key)
    chex.assert_trees_all_equal(listed.values, updates.values)
    averaged = jax.tree.map(lambda leaf: np.average(leaf, 0, [5, 7]), trained.models)
    chex.assert_trees_all_close(merged, averaged, rtol=1e-5, atol=1e-6)


CLOSE, SOLVED = {"rtol": 1e-4}, {"rtol": 1e-3, "atol": 1e-3}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("regmean", CLOSE),
        ("fedfisher_kfac", SOLVED),
        pytest.param("fedfisher_full", SOLVED, marks=pytest.mark.slow),
        pytest.param("fisher_merge", CLOSE, marks=pytest.mark.slow),
    ],
)
def test_lists_of_pairs_are_taken_apart_into_layers(name, tolerance):
    def network(params, x):
        [(kernel, bias)] = params
        return x @ kernel + bias

    def named(params, x):
        return network([(params["kernel"], params["bias"])], x)

    source = np.random.default_rng(0)
    data = source.normal(size=(12, 3)).astype(np.float32), source.integers(0, 2, 12)
    federation = clients.federation(data, np.split(np.arange(12), [5]))
    kernels, biases = source.normal(size=(2, 3, 2)), source.normal(size=(2, 2))
    stacked = {"kernel": jnp.asarray(kernels, float), "bias": jnp.asarray(biases, float)}
    results = []
    for apply_, params in ((named, stacked), (network, [(stacked["kernel"], stacked["bias"])])):
        method = algorithms.make(name, fj.Model(apply_, fj.likelihoods.categorical))
        trained = training.Trained(params)
        updates = merging.summarize(method, trained, federation, key=jax.random.key(0))
        start = jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], np.float32), params)
        results.append(merging.merge(method, start, updates, federation.weights)[0])
    [(kernel, bias)] = results[1]
    np.testing.assert_allclose(kernel, results[0]["kernel"], **tolerance)
    np.testing.assert_allclose(bias, results[0]["bias"], **tolerance)


# What is refused.


BAD = {
    "too few weights": (dict(weights=[1, 2]), ValueError, r"shape \(2,\); expected \(3,\)"),
    "negative weight": (dict(weights=[1, -1, 1]), ValueError, "non-negative"),
    "no weight at all": (dict(weights=[0, 0, 0]), ValueError, "Every weight is zero"),
    "NaN weight": (dict(weights=[1, float("nan"), 1]), ValueError, "finite"),
    "infinite weight": (dict(weights=[1, float("inf"), 1]), ValueError, "finite"),
    "words for weights": (dict(weights=["a", "b", "c"]), TypeError, "expected numbers"),
    "no updates": (dict(updates=[]), ValueError, "empty list"),
    "a plain dict": (dict(updates={"params": {"w": 1.0}}), TypeError, "updates is a dict"),
    "a plain list": (dict(updates=[{"w": 1.0}]), TypeError, "update of client 0 is a dict"),
    "other lengths": (
        dict(updates=Update({"params": {"v": jnp.ones(2), "w": jnp.ones((3, 1))}}, "params")),
        ValueError,
        r"leading axes {'params/v': 2, 'params/w': 3}",
    ),
    "other shape": (dict(params={"w": jnp.ones(2)}), ValueError, r"\(1,\).*params has .*\(2,\)"),
    "other names": (dict(params={"v": jnp.ones(1)}), ValueError, "'w'.*params has .*'v'"),
    "integer params": (dict(params={"w": jnp.ones(1, int)}), TypeError, "'w' of params .*int"),
    "option": (dict(on_nonfinite="ignore"), ValueError, "'ignore'; expected 'raise' or 'drop'"),
}


@pytest.mark.parametrize("fault", BAD)
def test_merge_refuses_bad_input(fault):
    change, error, words = BAD[fault]
    arguments = {"params": {"w": jnp.zeros(1)}, "updates": models(1, 2, 3), "weights": [1, 2, 3]}
    with pytest.raises(error, match=words):
        merging.merge(FEDAVG, **arguments | change)


def test_dropping_every_client_is_refused():
    start, updates = {"w": jnp.zeros(1)}, models(np.nan, 1.0)
    with pytest.warns(UserWarning, match="Left out"), pytest.raises(ValueError, match="No client"):
        merging.merge(FEDAVG, start, updates, [1, 0], on_nonfinite="drop")


def fishers_of(params, entries, kind):
    values = {"params": {"w": jnp.asarray(params)}, "fisher": fisher.Diagonal({"w": entries})}
    return Update(values, kind)


def test_a_merged_model_that_is_not_finite_names_leaf_and_client():
    """Though every update is: a product overflows."""
    method = algorithms.fisher_merge(MODEL)
    updates = fishers_of([[1.0], [1e30], [1.0]], jnp.array([[1.0], [2e30], [1e35]]), method.kind)
    start = {"w": jnp.zeros(1)}
    words = r"Leaf 'w' of the merged model is not finite.*client {} .*'fisher/entries/w'"
    with pytest.raises(ValueError, match=words.format(2)):
        merging.merge(method, start, updates)
    with pytest.raises(ValueError, match=words.format(1)):  # the other has no weight
        merging.merge(method, start, updates, [1, 1, 0])
    with pytest.raises(ValueError, match=r"Leaf 'w' of the merged model .* of some client are"):
        merging.merge_stream(method, start, [(updates, None)])
    merged, *_ = merging.merge(method, start, rows(updates, [0, 2]))
    assert np.isfinite(merged["w"]).all()


def test_a_negative_fisher_is_refused_unless_it_has_no_weight():
    method, start = algorithms.fedfisher(MODEL, fisher=fisher.diagonal), {"w": jnp.zeros(1)}
    updates = fishers_of([[1.0], [2.0]], jnp.array([[1.0], [-3.0]]), method.kind)
    with pytest.raises(ValueError, match=r"client 1 is negative: 'fisher/entries/w' has trace -3"):
        merging.merge(method, start, updates)
    chunks = [(rows(updates, [0] * 4), None), (updates, None)]
    with pytest.raises(ValueError, match=r"client 5 is negative"):
        merging.merge_stream(method, start, chunks)
    np.testing.assert_array_equal(merging.merge(method, start, updates, [1, 0])[0]["w"], [1.0])


def test_solves_that_end_otherwise_than_converged_are_told():
    slow = solvers.conjugate_gradients(1e-6, max_iterations=1)
    method = algorithms.fedfisher(MODEL, fisher=fisher.full, solver=slow)
    template = fisher.operators.Template.of({"w": np.zeros(2)})
    start = {"w": jnp.zeros(2)}

    def merge(entries):
        # A diagonal takes one step, and a matrix with two eigenvalues two.
        own = fisher.Dense(jax.vmap(jnp.diag)(jnp.array(entries)), template)
        values = {"params": {"w": jnp.array([[1.0, 5.0], [2.0, 0.0]])}, "fisher": own}
        return merging.merge(method, start, Update(values, method.kind))

    with pytest.warns(UserWarning, match=r"Blocks \['.*'\]: the solver took all its steps"):
        merge([[1.0, 2.0], [3.0, 1.0]])
    with pytest.warns(UserWarning, match=r"Blocks \['.*'\]: no client has any curvature"):
        merged, _, info = merge([[0.0, 0.0], [0.0, 0.0]])
    np.testing.assert_array_equal(merged["w"], [1.5, 2.5])
    assert jax.tree.leaves(info.status) == [solvers.Status.NO_CURVATURE]


def nearest(matrix):
    """The nearest symmetric positive semi-definite matrix, by NumPy."""
    values, vectors = np.linalg.eigh((matrix + matrix.T).astype(float) / 2)
    return vectors * np.maximum(values, 0) @ vectors.T


def quantised(matrix):
    """A matrix in 16 steps, as a careless upload would have it."""
    step = np.abs(matrix).max() / 8
    return np.round(matrix / step) * step


@pytest.mark.parametrize("fault", [quantised, np.triu])
@pytest.mark.parametrize("structure", [fisher.kfac, fisher.full])
def test_an_indefinite_or_asymmetric_fisher_becomes_the_nearest_that_is_neither(structure, fault):
    source, shape = np.random.default_rng(1), (12, 5)

    def gram(size):
        basis = source.normal(size=(3, size, size)) * np.logspace(-3, 0, size)
        return np.einsum("mia,mja->mij", basis, basis).astype(np.float32)

    params = {"w": source.normal(size=(3, *shape)).astype(np.float32)}
    template = fisher.operators.Template.of({"w": params["w"][0]})
    layers = (Layer("w", None, shape),)
    matrices = [gram(12), gram(5)] if structure is fisher.kfac else [gram(60)]
    method = algorithms.fedfisher(MODEL, fisher=structure, damping=0.3)

    def merge(change):
        # One client's are at fault.
        mine = [jnp.asarray(np.stack([x[0], change(x[1]), x[2]]), jnp.float32) for x in matrices]
        if structure is fisher.full:
            own = fisher.Dense(*mine, template)
        else:
            own = fisher.Kronecker({"w": dict(input=mine[0], output=mine[1])}, {}, layers, template)
        updates = Update({"params": params, "fisher": own}, method.kind)
        return merging.merge(method, {"w": jnp.zeros(shape)}, updates)[0]["w"]

    eigenvalues = np.linalg.eigvalsh(nearest(fault(matrices[0][1])) - fault(matrices[0][1]))
    assert eigenvalues.max() > 1e-3
    np.testing.assert_allclose(
        merge(fault), merge(lambda x: nearest(fault(x))), rtol=1e-3, atol=1e-4
    )
    assert np.abs(merge(fault) - merge(lambda x: x)).max() > 1e-3
    # What was bound to no device still is: it can meet clients on others.
    assert merge(fault).committed == merge(lambda x: x).committed


# The server's state.


def test_a_state_goes_on_from_merge_to_merge():
    method = algorithms.with_server_optimizer(FEDAVG, optax.sgd(1.0, 0.5))
    params, state = {"w": jnp.zeros(1)}, None
    for expected in (2.0, 3.0, 2.5):  # the momentum: half of the last step is taken again
        params, state, _ = merging.merge(method, params, models(2.0), state=state)
        assert params["w"] == pytest.approx(expected)


# Exchanges


def asking(name):
    """Make a message that clients answer with what they were given, times their first input."""

    def broadcast(params, state, place):
        return params, state

    def summarize(key, trained, examples, private):
        _, state = trained.start
        first = examples.inputs[examples.indices[0]].sum()
        return {"sum": first * (1.0 if isinstance(state, tuple) else state)}, private

    def reduce(updates, weights):
        return algorithms.base.weighted_sum(updates["sum"], weights)

    def aggregate(key, sums, params, state, cohort):
        mean = sums.mean()
        return jax.tree.map(lambda w: w + mean, params), mean, name

    link = algorithms.Link(broadcast=broadcast)
    return algorithms.Algorithm(summarize, aggregate, reduce, kind=name, link=link)


def test_an_exchange_of_several_messages_is_played_to_its_end():
    """Each is given the state and the model that the one before it left."""
    data = np.array([[1.0], [3.0]], np.float32), np.zeros(2)
    federation = clients.federation(data, [[0], [1]])
    method, start, key = (asking("first"), asking("second")), {"w": jnp.zeros(2)}, jax.random.key(0)
    first, second = merging.messages(method, start, federation, key=key)
    assert (first.info, second.info) == ("first", "second")
    assert (first.sent.kind, second.sent.kind) == ("first", "second")
    # Means of 1 and 3; then of 1 x 2 and 3 x 2.
    assert (float(first.state), float(second.state)) == (2.0, 4.0)
    chex.assert_trees_all_equal(second.received, ({"w": jnp.full(2, 2.0)}, jnp.asarray(2.0)))
    chex.assert_trees_all_equal(second.params, {"w": jnp.full(2, 6.0)})
    params, state, info = merging.exchange(method, start, federation, key=key)
    chex.assert_trees_all_equal((params, state, info), second[2:])


@pytest.mark.long
def test_an_exchange_refuses_what_is_no_algorithm_or_federation():
    data = np.ones((2, 1), np.float32), np.zeros(2)
    federation = clients.federation(data, [[0], [1]])
    with pytest.raises(TypeError, match="expected an Algorithm"):
        merging.exchange(3, PARAMS, federation, key=jax.random.key(0))
    with pytest.raises(TypeError, match="federation is a tuple"):
        merging.exchange(FEDAVG, PARAMS, (1, 2), key=jax.random.key(0))
