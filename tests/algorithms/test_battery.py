"""Laws of merging, for every row of the registry of methods."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, training
from fisherjax._layers.graph import Wiring
from fisherjax.algorithms import LAWS, METHODS, Update
from tests.methods import MERGED, OF_STATISTICS, SOME_SLOW, exactly, laws

SIZES = (7, 3, 9, 5)
WEIGHTS = np.array([0.1, 0.4, 0.2, 0.3])
BASE = optax.sgd(0.5, 0.9)


def apply(params, x):
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    return hidden @ params["second"]["kernel"]


def make(name):
    model = fj.Model(apply, fj.likelihoods.categorical)
    return algorithms.make(name, model, **exactly(name))


def draw_params(seed):
    draw = np.random.default_rng(seed).normal
    shapes = {"first": {"bias": (3,), "kernel": (4, 3)}, "second": {"kernel": (3, 2)}}
    return jax.tree.map(
        lambda shape: jnp.asarray(draw(size=shape)), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )


def train(algorithm, start, federation):
    return training.train(
        fj.Model(apply, fj.likelihoods.categorical),
        start,
        federation,
        key=jax.random.key(1),
        optimizer=algorithm.optimizer(BASE),
        epochs=2,
        batch_size=3,
    )


def summarize(algorithm, trained, federation):
    return merging.summarize(algorithm, trained, federation, key=jax.random.key(0))


@pytest.fixture(scope="module")
def world():
    """Four clients of different sizes, in float64."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    source = np.random.default_rng(0)
    data = source.normal(size=(24, 4)), source.integers(0, 2, 24)
    partition = np.split(source.permutation(24), np.cumsum(SIZES)[:-1])
    yield SimpleNamespace(
        data=data, federation=clients.federation(data, partition), start=draw_params(0), rows={}
    )
    jax.config.update("jax_enable_x64", before)


def prepared(world, name):
    """Make the algorithm of a row, train the clients by it, and let them send."""
    if name not in world.rows:
        algorithm = make(name)
        trained = train(algorithm, world.start, world.federation)
        updates = summarize(algorithm, trained, world.federation)
        world.rows[name] = SimpleNamespace(
            name=name,
            algorithm=algorithm,
            trained=trained,
            models=[pick(trained.params, client) for client in range(4)],
            updates=updates,
            main="params" if "params" in updates.values else "change",
            adds_up=algorithm.reduce is not None,
        )
    return world.rows[name]


@pytest.fixture(params=MERGED)
def row(request, world):
    return prepared(world, request.param)


@pytest.fixture
def merge(row, world):
    def merge(updates, weights=WEIGHTS, start=world.start, **options):
        return merging.merge(row.algorithm, start, updates, weights, **options)[0]

    return merge


def on_host(function, *trees):
    """Apply NumPy to the leaves: each eager operation of JAX on a new shape is another program."""
    return jax.tree.map(lambda *x: jnp.asarray(function(*map(np.asarray, x))), *trees)


def pick(stacked, rows):
    return on_host(lambda leaf: leaf[np.asarray(rows)], stacked)


def changed(updates, **values):
    return Update(updates.values | values, updates.kind)


def assert_same(left, right, tolerance=1e-9):
    chex.assert_trees_all_equal_shapes_and_dtypes(left, right)
    chex.assert_trees_all_close(left, right, rtol=1e-9 if tolerance else 0, atol=tolerance)


def plain_mean(stacked, weights):
    return on_host(lambda leaf: np.tensordot(weights, leaf, 1), stacked)


# The laws, each a list of pairs that are equal where it holds.


def identity(row, world, merge):
    """Whatever else clients found out: only the models are equal."""
    one = row.models[2]
    equal = on_host(lambda leaf: np.broadcast_to(leaf, (4, *leaf.shape)), one)
    trained = row.trained._replace(params=equal)
    yield merge(summarize(row.algorithm, trained, world.federation)), one


def single_client(row, world, merge):
    for client in range(4):
        yield merge([pick(row.updates, client)], None), row.models[client]


def order(row, world, merge):
    places = [2, 0, 3, 1]
    yield merge(pick(row.updates, places), WEIGHTS[places]), merge(row.updates)


def weights(row, world, merge):
    expected = merge(row.updates)
    yield merge(row.updates, 1e5 * WEIGHTS), expected
    yield merge(row.updates, [1, 4, 2, 3]), expected
    yield merge(row.updates, None), merge(row.updates, [3] * 4)


def empty(row, world, merge):
    """Even where products of two such numbers overflow."""
    without = merge(pick(row.updates, [0, 2, 3]), [1, 2, 3])
    for factor in (-100, 1e200):
        by = np.array([1, factor, 1, 1.0])
        disturbed = on_host(lambda x, by=by: (x.T * by).T, row.updates)
        yield merge(disturbed, [1, 0, 2, 3]), without


def shift(row, world, merge):
    """The start and all models move; the curvatures stay."""
    by = draw_params(9)
    moved = row.updates
    if "params" in moved.values:
        moved = changed(moved, params=on_host(np.add, moved.values["params"], by))
    start = on_host(np.add, world.start, by)
    yield merge(moved, start=start), on_host(np.add, merge(row.updates), by)


def equal_curvatures(row, world, merge):
    what = {"fisher", "grams"} & set(row.updates.values)
    equal = {
        name: on_host(lambda x: np.broadcast_to(x[1], x.shape), row.updates.values[name])
        for name in what
    }
    yield merge(changed(row.updates, **equal)), plain_mean(row.trained.params, WEIGHTS)


# Each with its tolerance.
CHECKS = {
    "identity": (identity, 1e-12),
    "single client": (single_client, 1e-12),
    "order": (order, 1e-9),
    "weights": (weights, 1e-9),
    "empty": (empty, 1e-9),
    "shift": (shift, 1e-9),
    "equal curvatures": (equal_curvatures, 1e-9),
}
ELSEWHERE = {"frozen", "layerwise", "statistics"}
"""Laws of test_private.py and test_batch_norm.py."""


def test_every_law_is_defined_once_and_tested():
    assert LAWS.keys() == CHECKS.keys() | ELSEWHERE | {"damping", "exchange"}
    for name, own in METHODS.items():
        unknown = set(own.laws) - LAWS.keys()
        assert not unknown, f"{name} lists laws that algorithms.LAWS does not define: {unknown}"
        assert len(set(own.laws)) == len(own.laws), name


def test_every_method_is_a_function_of_the_package():
    for name, own in METHODS.items():
        factory = getattr(own.factory, "func", own.factory)
        found = getattr(algorithms, factory.__name__, None)
        assert found is factory, f"{name}: name {factory.__name__} in __all__ of registry.py"
        assert factory.__name__ in algorithms.__all__


@pytest.mark.parametrize("law", CHECKS)
def test_the_laws_of_a_row_hold_and_no_others(row, world, merge, law):
    pairs, tolerance = CHECKS[law]
    if law in laws(row.name):
        for left, right in pairs(row, world, merge):
            assert_same(left, right, tolerance)
        return
    apart = trained_apart(row, world)
    errors = [
        np.abs(np.subtract(a, b)).max()
        for left, right in pairs(apart, world, merge)
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    ]
    assert max(errors) > 1e-3, f"{law!r} holds for {row.name}: list it in the laws of its row"


def trained_apart(row, world):
    """Models of starts of their own, whose units do not correspond; the rest was found out."""
    models = [draw_params(20 + client) for client in range(4)]
    stacked = on_host(lambda *x: np.stack(x), *models)
    trained = row.trained._replace(params=stacked)
    updates = summarize(row.algorithm, trained, world.federation)
    new = {"trained": trained, "models": models, "updates": updates}
    return SimpleNamespace(**vars(row) | new)


EXCHANGED = [name for name in METHODS if "exchange" in laws(name) and name not in OF_STATISTICS]


@pytest.mark.long
@pytest.mark.parametrize("name", EXCHANGED)
def test_an_exchange_changes_the_model_without_training(world, name):
    given = make(name), world.start, world.federation
    found = merging.exchange(*given, key=jax.random.key(0))[0]
    errors = jax.tree.map(lambda a, b: np.abs(np.subtract(a, b)).max(), found, world.start)
    assert max(jax.tree.leaves(errors)) > 1e-3


@pytest.mark.parametrize("row", SOME_SLOW, indirect=True)
def test_files_read_of_uploads_what_clients_send(row):
    reads, sent = METHODS[row.name].reads, row.updates.values.keys()
    assert reads is not None, f"clients send updates: say in `reads` of {row.name} what files read"
    if isinstance(reads, str):
        return
    assert reads.keys() | {"params"} == sent, f"`reads` of {row.name}: expected what clients send"
    for name, kind in reads.items():
        assert isinstance(row.updates.values[name], kind)
    # Files are merged a layer at a time, but for what couples layers.
    together = {Wiring, fj.fisher.Dense} & set(reads.values())
    assert together or "layerwise" in laws(row.name), f"files merge {row.name} layer by layer"


# The same by other ways.


@pytest.mark.parametrize("row", SOME_SLOW, indirect=True)
def test_compiled_and_plain_merges_agree(row, world, merge):
    compiled = jax.jit(lambda p, u, w: merging.merge(row.algorithm, p, u, w)[0])
    assert_same(compiled(world.start, row.updates, jnp.asarray(WEIGHTS)), merge(row.updates))


def test_a_list_of_updates_is_the_same_as_a_stack(row, merge):
    updates = [pick(row.updates, client) for client in range(4)]
    assert_same(merge(updates), merge(row.updates), 0)


def test_chunks_stream_to_what_all_merge_to_at_once(row, world, merge):
    weights = 10 * WEIGHTS
    chunks = [(pick(row.updates, rows), weights[rows]) for rows in ([3, 0], [1, 2])]
    if not row.adds_up:
        with pytest.raises(ValueError, match=r"every client's update at once"):
            merging.merge_stream(row.algorithm, world.start, chunks)
        return
    merged, _, _ = merging.merge_stream(row.algorithm, world.start, chunks)
    assert_same(merged, merge(row.updates))


def test_sums_of_groups_of_clients_add_up(row, world, merge):
    algorithm, weights = row.algorithm, jnp.asarray(WEIGHTS)
    assert (algorithm.reduce is not None) == row.adds_up
    if not row.adds_up:
        return
    groups = [
        jax.jit(algorithm.reduce)(pick(row.updates.values, rows), weights[np.asarray(rows)])
        for rows in ([3, 0], [1, 2])
    ]
    sums = on_host(np.add, *groups)
    state = algorithm.link.init(world.start, 4)
    key = jax.random.key(0)
    merged, after, _ = algorithm.aggregate(key, sums, world.start, state, jnp.arange(4))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
    assert_same(merged, merge(row.updates))


def test_updates_go_through_a_file(row, world, merge, tmp_path):
    """Each client writes one; the server knows the structure from `jax.eval_shape`."""
    algorithm, stacked = row.algorithm, row.trained
    alone = training.Trained(
        row.models[0], world.start, stacked.steps[0], None, pick(stacked.extras, 0)
    )
    examples, private = clients.view(world.federation, 0), algorithm.link.init_client(world.start)
    like, _ = jax.eval_shape(algorithm.summarize, jax.random.key(0), alone, examples, private)
    loaded = []
    for client in range(4):
        path = tmp_path / f"client{client}.safetensors"
        fj.files.save_arrays(path, pick(row.updates, client))
        loaded.append(fj.files.load_arrays(path, like=Update(like, algorithm.kind)))
    assert_same(merge(loaded), merge(row.updates), 0)


# What is compiled again, and what is the same object.


def test_a_second_merge_compiles_nothing(row, merge, compilations):
    merge(row.updates)
    others = on_host(lambda leaf: leaf * 2, row.updates)
    with compilations() as count:
        merge(others, [0.3, 0.2, 0.4, 0.1])
    assert count() == 0


def test_made_again_of_equal_arguments_it_compiles_nothing(row, world, compilations):
    with compilations() as count:
        again = make(row.name)
        trained = train(again, world.start, world.federation)
        updates = summarize(again, trained, world.federation)
    assert count() == 0
    assert again is row.algorithm
    chex.assert_trees_all_equal(updates, row.updates)


def test_equal_bases_give_the_same_optimiser(row):
    assert row.algorithm.optimizer(BASE) is make(row.name).optimizer(BASE)
    assert row.algorithm.optimizer(BASE) is not row.algorithm.optimizer(optax.sgd(0.5, 0.9))


# What merge gives and what it refuses.


@pytest.mark.parametrize("row", SOME_SLOW, indirect=True)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_structure_and_dtype_are_those_of_params(row, world, merge, dtype):
    def narrow(params):
        return on_host(lambda leaf: leaf.astype(dtype), params)

    start = narrow(world.start)
    updates = changed(row.updates, **{row.main: narrow(row.updates.values[row.main])})
    merged = merge(updates, start=start)
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, start)
    wide = on_host(lambda leaf: leaf.astype(float), merged)
    coarse = dtype == "bfloat16"
    chex.assert_trees_all_close(wide, merge(row.updates), rtol=0, atol=0.2 if coarse else 1e-3)
    if not {"single client", "empty"} <= {*laws(row.name)}:
        return
    # By weight: fewer clients would be another program.
    alone = merge(updates, [0, 0, 1, 0], start=start)
    # A change is added to the start, which rounds.
    rounding = 4 * float(jnp.finfo(dtype).eps) if row.main == "change" else 0
    chex.assert_trees_all_close(
        on_host(lambda leaf: leaf.astype(float), alone),
        on_host(lambda leaf: leaf.astype(float), narrow(row.models[2])),
        rtol=rounding,
        atol=rounding,
    )


def test_a_diverged_client_is_named(row, merge):
    broken = dict(row.updates.values[row.main])
    kernel = np.array(broken["second"]["kernel"])
    kernel[1, 0, 0], kernel[3, 0, 1] = np.nan, np.inf
    broken["second"] = {"kernel": jnp.asarray(kernel)}
    diverged = changed(row.updates, **{row.main: broken})
    with pytest.raises(ValueError, match=rf"clients \[1, 3\].*'{row.main}/second/kernel'.*'drop'"):
        merge(diverged)
    words = f"Left out.*client 1 for leaf '{row.main}/second/kernel'; client 3 for leaf"
    with pytest.warns(UserWarning, match=words):
        left = merge(diverged, on_nonfinite="drop")
    assert_same(left, merge(row.updates, [0.1, 0, 0.2, 0]))


def test_updates_that_do_not_fit_together_are_named(row, merge):
    def with_first_kernel(update, kernel):
        main = update.values[row.main]
        first = main["first"] | {"kernel": kernel}
        return changed(update, **{row.main: main | {"first": first}})

    updates = [pick(row.updates, client) for client in range(3)]
    good, updates[1] = updates[1], with_first_kernel(updates[1], np.ones((5, 3)))
    words = rf"'.*{row.main}/first/kernel' of client 1 has shape \(5, 3\)"
    with pytest.raises(ValueError, match=words):
        merge(updates, None)
    rest = {k: v for k, v in updates[2].values[row.main].items() if k != "second"}
    updates[1:] = good, changed(updates[2], **{row.main: rest})
    with pytest.raises(ValueError, match="Client 2 has another structure than client 0"):
        merge(updates, None)


def test_an_empty_client_is_legal(row, world):
    """No examples: weight zero, finite update, no influence."""
    partition = np.split(np.arange(24), [9, 9, 17])
    federation = clients.federation(world.data, partition)
    trained = train(row.algorithm, world.start, federation)
    assert trained.steps.tolist() == [6, 0, 6, 6]
    updates = summarize(row.algorithm, trained, federation)
    chex.assert_tree_all_finite(updates)

    def merge(updates, weights):
        return merging.merge(row.algorithm, world.start, updates, weights)[0]

    merged = merge(updates, federation.weights)
    chex.assert_tree_all_finite(merged)
    if "empty" in laws(row.name):
        assert_same(merged, merge(pick(updates, [0, 2, 3]), [9, 8, 7]))


def test_updates_of_another_kind_are_refused_by_name(row, world):
    others = [prepared(world, name) for name in MERGED]
    assert len({other.algorithm.kind for other in others}) >= 9
    for other in others:
        if other.algorithm.kind == row.algorithm.kind:
            continue
        one = [pick(other.updates, client) for client in range(4)]
        for updates in (other.updates, one):
            with pytest.raises(ValueError, match="but this algorithm merges") as refusal:
                merging.merge(row.algorithm, world.start, updates, WEIGHTS)
            message = str(refusal.value)
            assert f"'{other.algorithm.kind}', but" in message
            assert f"merges '{row.algorithm.kind}'" in message


# Damping, where there is one.


@pytest.mark.parametrize("name", [n for n in MERGED if "damping" in algorithms.options(n)])
def test_damping_leads_from_the_solution_to_the_weighted_mean(world, name):
    row = prepared(world, name)
    mean = plain_mean(row.trained.params, WEIGHTS)
    distances = []
    for damping in (0.01, 1.0, 100.0, 1e8):
        options = exactly(name) | {"damping": damping}
        damped = algorithms.make(name, row.algorithm.model, **options)
        merged, _, _ = merging.merge(damped, world.start, row.updates, WEIGHTS)
        gap = jax.tree.map(np.subtract, merged, mean)
        distances.append(np.sqrt(sum(np.vdot(leaf, leaf) for leaf in jax.tree.leaves(gap))))
    holds = np.all(np.diff(distances) < 0) and distances[-1] < 1e-6 < 1e-2 < distances[0]
    assert holds == ("damping" in laws(name)), distances
