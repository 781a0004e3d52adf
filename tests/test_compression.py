"""Codecs: bounds of rounding, bytes by the formula, and what the server makes of what arrives."""

import math
import operator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fisherjax as fj
from fisherjax import compression
from fisherjax.algorithms import Update
from fisherjax.compression import (
    compose,
    compressed,
    decode,
    differences,
    encode,
    quantized,
    roots,
    triangles,
    truncated,
    water_filling,
)
from fisherjax.compression.stream import _nibbles, _read, _written, divided

SIZES = {  # inputs and outputs of layers: the FedFisher authors' networks without biases
    "LeNet": ((25, 6), (150, 16), (256, 120), (120, 84), (84, 10)),
    "FedNet": ((75, 32), (800, 64), (1600, 512), (512, 128), (128, 10)),
}
QUICK = settings(deadline=None, max_examples=8)
FLOATS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
# Few pairs of shape and bits: each is compiled.
ROUNDED = st.sampled_from([((), 3), ((1,), 8), ((7,), 2), ((7,), 24), ((3, 4), 9)]).flatmap(
    lambda case: st.tuples(arrays(np.float32, case[0], elements=FLOATS), st.just(case[1]))
)


def apply(params, x):
    return jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"]) @ params["last"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)
START = {
    "first": {"kernel": jnp.zeros((6, 5)), "bias": jnp.zeros(5)},
    "last": jnp.zeros((5, 3)),
}
METHODS = {
    "fedavg": fj.algorithms.fedavg(),
    "kfac": fj.algorithms.fedfisher(MODEL),
    "diagonal": fj.algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal, damping=1.0),
    "full": fj.algorithms.fedfisher(MODEL, fisher=fj.fisher.full, damping=1.0),
    "regmean": fj.algorithms.regmean(MODEL),
}


def _federation():
    source = np.random.default_rng(0)
    inputs = source.normal(size=(60, 6)).astype(np.float32)
    return fj.clients.federation((inputs, source.integers(0, 3, 60)), np.split(np.arange(60), [25]))


FEDERATION = _federation()


@pytest.fixture(scope="module")
def trained():
    source = np.random.default_rng(1)
    start = jax.tree.map(lambda x: jnp.asarray(source.normal(size=x.shape), jnp.float32), START)
    how = {"optimizer": optax.sgd(0.3), "epochs": 3, "batch_size": 10}
    return fj.training.train(MODEL, start, FEDERATION, key=jax.random.key(0), **how)


@pytest.fixture(scope="module")
def sent(trained):
    """What clients send of each method, uncompressed."""
    key = jax.random.key(1)
    return {n: fj.merging.summarize(m, trained, FEDERATION, key=key) for n, m in METHODS.items()}


# Codecs run inside of compiled programs; eagerly each of their operations is one.
@partial(jax.jit, static_argnums=0)
def _there_and_back(codecs, values):
    """What comes out of each codec's messages, and the messages."""
    packed = [codec.encode(values, None) for codec in codecs]
    return [decode(own, {}) for own in packed], packed


@jax.jit
def _each_decoded(packed, start):
    return jax.lax.map(lambda own: decode(own, start), packed)


def _decoded(codec, update, start):
    return _each_decoded(encode(update, codec, start=start).values["update"], start)


_divided = jax.jit(divided, static_argnums=2)


def _shifted(params, shift):
    return jax.tree.map(lambda x: np.asarray(x) + np.float32(shift), params)


def _worst(left, right):
    left, right = (map(np.asarray, jax.tree.leaves(side)) for side in (left, right))
    pairs = zip(left, right, strict=True)
    return float(max(np.abs(x - y).max() / np.abs(x).max() for x, y in pairs))


# --- the quantiser


@QUICK
@given(ROUNDED)
@example((np.full(7, np.finfo(np.float32).tiny), 24))  # a level is no normal number
def test_rounding_is_within_half_a_level_and_done_once(case):
    x, bits = case
    codecs = (quantized(bits),)
    [found], [packed] = _there_and_back(codecs, {"x": x})
    found = np.asarray(found["x"])
    bound = np.abs(x).max() / (2 * (2 ** (bits - 1) - 1))
    assert found.shape == x.shape
    assert np.abs(found - x).max() <= bound * (1 + 1e-5) + 2e-7 * np.abs(x).max()
    # What has been rounded is not changed by rounding.
    [again], _ = _there_and_back(codecs, {"x": found})
    np.testing.assert_allclose(again["x"], found, rtol=1e-6, atol=1e-7 * np.abs(x).max())
    if x.size > 1:
        assert compression.size(packed) == math.ceil(x.size * bits / 8) + 4
    else:  # one number is sent as it is
        assert compression.size(packed) == 4


@pytest.mark.parametrize("bits", [3, 8])
def test_the_ceiling_is_above_by_less_than_a_level(bits):
    x = np.random.default_rng(0).normal(size=50).astype(np.float32)
    [[found], [packed]] = _there_and_back((quantized(bits, ceiling=True),), {"x": x})
    level = np.abs(x).max() / (2 ** (bits - 1) - 1)
    above = np.asarray(found["x"]) - x
    assert above.min() >= -1e-6
    assert above.max() < level * (1 + 1e-5)
    assert above.mean() > level / 4  # rounding to the nearest has no bias
    assert compression.size(packed) == math.ceil(50 * bits / 8) + 4


def test_rounding_follows_the_scale():
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    codecs = (quantized(5),)
    [small], [large] = (_there_and_back(codecs, {"x": x * np.float32(s)})[0] for s in (1, 2**20))
    np.testing.assert_array_equal(np.float32(2**20) * np.asarray(small["x"]), large["x"])


@pytest.mark.parametrize(
    ("name", "bits", "rank", "ratio"),
    [
        ("LeNet", 9, 50, 1.034),
        ("LeNet", 8, 50, 0.975),
        ("FedNet", 9, 243, 1.025),
        ("FedNet", 8, 243, 0.966),
    ],
)
def test_the_papers_codec_takes_the_bytes_of_its_formula(name, bits, rank, ratio):
    sides = [side for pair in SIZES[name] for side in pair]
    values = {
        "params": [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in SIZES[name]],
        "grams": [jax.ShapeDtypeStruct((side, side), jnp.float32) for side in sides],
    }
    codec = compose(truncated(), quantized({"params": 16, "grams": bits}))
    packed = jax.eval_shape(lambda own: codec.encode(own, None), values)
    assert packed["grams"][2].left.shape[-1] == min(rank, sides[2])
    d = sum(a * o for a, o in SIZES[name])
    ranks = [min(side, rank) for side in sides]
    weights = 16 * d + 32 * len(SIZES[name])
    factors = sum(bits * (2 * n * r + r) + 3 * 32 for n, r in zip(sides, ranks, strict=True))
    # Every array ends at a whole byte.
    pieces = len(SIZES[name]) + 3 * len(sides)
    assert 0 <= 8 * compression.size(packed) - (weights + factors) < 8 * pieces
    assert 8 * compression.size(packed) / (32 * d) == pytest.approx(ratio, abs=1e-3)


# --- symmetric matrices


@pytest.mark.long
def test_triangles_lose_nothing(sent):
    for name in ("kfac", "full", "regmean"):
        plain, method = sent[name], compressed(METHODS[name], triangles())
        packed = encode(plain, triangles())
        open_, arrived = (
            fj.merging.merge(m, START, u)[0] for m, u in ((METHODS[name], plain), (method, packed))
        )
        for one, other in zip(*map(jax.tree.leaves, (open_, arrived)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert compression.size(packed) < compression.size(plain)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_a_triangle_is_folded_without_a_gap(size):
    matrix = np.arange(1.0, 1 + size**2).reshape(size, size)
    matrix = (matrix + matrix.T).astype(np.float32)
    [found], [packed] = _there_and_back((triangles(),), {"grams": {"w": matrix}})
    assert packed["grams"]["w"].entries.size == size * (size + 1) // 2
    np.testing.assert_array_equal(found["grams"]["w"], matrix)


@pytest.mark.long
def test_all_singular_triplets_and_all_columns_are_the_matrix(sent):
    for codec in (truncated(99), roots(), compose(roots(99), quantized(24))):
        assert _worst(sent["kfac"].values, _decoded(codec, sent["kfac"], START)) < 1e-5


@QUICK
@given(st.sampled_from([(1, 2), (3, 5), (5, 5), (9, 2)]), st.integers(0, 2**31))
def test_truncation_is_the_best_of_its_rank_and_roots_stay_semidefinite(ranks_and_bits, seed):
    size, (rank, bits) = 5, ranks_and_bits
    half = np.random.default_rng(seed).normal(size=(size, size))
    matrix = (half @ half.T).astype(np.float32)
    codecs = truncated(rank), roots(rank), compose(roots(rank), quantized(bits))
    found, _ = _there_and_back(codecs, {"grams": {"w": matrix}})
    *exact, rough = (np.asarray(own["grams"]["w"], np.float64) for own in found)
    # Eckart and Young: the error is the next eigenvalue.
    own = np.linalg.eigvalsh(half @ half.T)[::-1]
    for one in exact:
        expected = own[rank] if rank < size else 0
        assert np.linalg.norm(matrix - one, 2) == pytest.approx(expected, abs=1e-4 * own[0])
    np.testing.assert_array_equal(rough, rough.T)
    assert np.linalg.eigvalsh(rough)[0] >= -1e-6 * own[0]


def test_gram_matrices_that_rounding_made_indefinite_still_merge(sent):
    """Weak inputs keep more of their correlation with a strong one than of their variance."""

    def uneven(gram):
        scale = np.full(gram.shape[-1], 0.4, np.float32)
        scale[0] = 1
        return np.broadcast_to(np.outer(scale, scale), gram.shape)

    grams = jax.tree.map(uneven, sent["regmean"].values["grams"])
    update = Update(sent["regmean"].values | {"grams": grams}, sent["regmean"].kind)
    method = compressed(METHODS["regmean"], quantized({"grams": 4}))
    found = fj.merging.merge(method, START, encode(update, quantized({"grams": 4})))[0]
    exact = fj.merging.merge(METHODS["regmean"], START, update)[0]
    assert _worst(exact, found) < 0.5


@pytest.mark.slow
@settings(deadline=None, max_examples=3)
@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.integers(0, 2**31))
def test_layers_of_any_shape_come_back_from_every_codec(inputs, outputs, has_bias, seed):
    source = np.random.default_rng(seed)
    shapes = {"kernel": (inputs, outputs)} | ({"bias": (outputs,)} if has_bias else {})
    params = {name: jnp.asarray(source.normal(size=x), jnp.float32) for name, x in shapes.items()}
    layer = fj._layers.layer.Layer("kernel", "bias" if has_bias else None, (inputs, outputs))
    halves = [source.normal(size=(n, n + 1)) for n in (inputs + has_bias, outputs)]
    first, second = (jnp.asarray(half @ half.T, jnp.float32) for half in halves)
    factors = {"kernel": {"input": first, "output": second}}
    template = fj.fisher.operators.Template.of(params)
    fisher = fj.fisher.Kronecker(factors, {}, (layer,), template)
    values = {"params": params, "fisher": fisher}
    start = jax.tree.map(jnp.zeros_like, params)
    numbers = sum(x.size for x in jax.tree.leaves(params))
    for codec in (triangles(), truncated(99), roots(), differences(), quantized(24)):
        assert _worst(values, decode(codec.encode(values, start), start)) < 1e-5
    packed = water_filling(60.0).encode(values, start)
    assert _worst(values, decode(packed, start)) < 2e-3
    assert compression.size(packed) <= 60 * 4 * numbers


# --- differences


def test_differences_round_the_way_and_not_the_place(trained):
    for shift in (0.0, 1e3):
        start, params = _shifted(trained.start, shift), _shifted(trained.params, shift)
        update = Update({"params": params}, "params")
        codec = compose(differences(), quantized(8))
        found = _decoded(codec, update, start)["params"]
        for x, y, origin in zip(*map(jax.tree.leaves, (update.values, found, start)), strict=True):
            x, y = np.asarray(x), np.asarray(y)
            bound = np.abs(x - origin).max() / 254
            assert np.abs(x - y).max() <= bound + 1e-6 * shift


def test_differences_need_the_start_that_the_server_has(sent):
    weighted = fj.algorithms.weighted_fedavg(MODEL)
    for codec in (differences(), compose(differences(), quantized(8)), water_filling(1.0)):
        with pytest.raises(ValueError, match="every client another model"):
            compressed(weighted, codec)
    method = compressed(METHODS["fedavg"], differences())
    models = [START, _shifted(START, 1.0)]
    with pytest.raises(ValueError, match=r"The model that the clients started from is unknown"):
        fj.merging.summarize(method, models, FEDERATION, key=jax.random.key(0))


# --- bits where they are needed


@partial(jax.jit, static_argnums=2)
def _streamed(values, costs, budget):
    """Steps, widths and bits of arrays, and what is read from them."""
    columns = [x.reshape(len(x), -1) for x in values]
    steps, widths = divided(columns, costs, budget)
    bits = _written(columns, steps, widths, budget)
    slots = [
        compression.Slot(s, _nibbles(w), x.shape, "float32")
        for s, w, x in zip(steps, widths, columns, strict=True)
    ]
    return steps, widths, bits, _read(slots, bits)


@pytest.mark.long
@QUICK
@given(st.integers(0, 2**31), st.sampled_from([0.3, 2.0, 9.0]))
@example(1, 2.0)
@example(54, 0.3)
def test_columns_of_any_width_come_back_to_half_a_step(seed, each):
    source = np.random.default_rng(seed)
    shapes = [(3, 4), (7,), (5, 1), (1, 3)]
    values = [
        (source.normal(size=s) * 10.0 ** source.integers(-3, 3)).astype(np.float32) for s in shapes
    ]
    values[1] = values[1] * np.float32(source.integers(0, 2))
    costs = [np.float32(10.0 ** source.integers(-4, 4)) for _ in shapes]
    budget = 8 * math.ceil(each * sum(x.size for x in values) / 8)
    steps, widths, bits, read = _streamed(values, costs, budget)
    needed = sum(len(x) * int(np.sum(w)) for x, w in zip(values, widths, strict=True))
    assert needed <= budget
    assert bits.nbytes == budget // 8
    for x, step, found in zip(values, steps, read, strict=True):
        assert np.abs(x.reshape(len(x), -1) - found).max() <= step * (0.5 + 1e-4)


def _cost(update, found, weights):
    """What the server loses: how much higher its true quadratic is at the merge of `found`."""
    method = METHODS["kfac"]
    true = fj.quadratic.quadratic(update.values["fisher"], update.values["params"], weights, 1.0)
    true = fj.quadratic.in_fisher_units(true)
    best, reached = (
        update.values["fisher"].blocks(fj.merging.merge(method, START, u, weights)[0])
        for u in (update, Update(found, method.kind))
    )
    way = jax.tree.map(jnp.subtract, reached, best)
    return float(fj.tree.inner(way, true.matvec(way)))


@pytest.mark.long
def test_more_bytes_are_a_better_merge(trained, sent):
    weights, update, start = jnp.array([0.4, 0.6]), sent["kfac"], trained.start
    sizes, lost = (0.7, 1.0, 1.4), []
    for size in sizes:
        used = compression.size(encode(update, water_filling(size), start=start)) / 2 / (4 * 50)
        assert size - 0.02 <= used <= size
        lost.append(_cost(update, _decoded(water_filling(size), update, start), weights))
    assert lost[0] > 2 * lost[1] > 4 * lost[2]


def test_the_same_bits_cost_less_where_they_are_needed():
    source = np.random.default_rng(0)
    columns = [source.normal(size=(40, 5)).astype(np.float32) for _ in range(3)]
    costs = [np.float32(cost) for cost in (1.0, 1e-2, 1e-4)]

    def lost(believed):
        steps, widths = map(jax.device_get, _divided(columns, believed, 4800))
        assert sum(40 * int(width.sum()) for width in widths) > 0.9 * 4800
        rounded = [step * np.round(x / step) for x, step in zip(columns, steps, strict=True)]
        errors = zip(costs, columns, rounded, strict=True)
        return sum(float(cost * np.square(x - y).sum()) for cost, x, y in errors)

    assert lost(costs) < 0.1 * lost([np.float32(1)] * 3)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_with_bytes_enough_every_method_merges_as_if_nothing_had_been_done(name, trained, sent):
    method = compressed(METHODS[name], water_filling(80.0))
    packed = fj.merging.summarize(method, trained, FEDERATION, key=jax.random.key(1))
    found = fj.merging.merge(method, trained.start, packed, FEDERATION.weights)[0]
    plain = fj.merging.merge(METHODS[name], trained.start, sent[name], FEDERATION.weights)[0]
    for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3 * float(np.abs(x).max()) + 1e-6)


def test_the_unit_of_the_fishers_does_not_move_bits():
    source = np.random.default_rng(0)
    columns = [source.normal(size=(4, 3)).astype(np.float32) for _ in range(3)]
    costs = np.array([1.0, 0.01, 0.0], np.float32)
    steps, widths = map(jax.device_get, _divided(columns, list(costs), 128))
    # What costs next to nothing has next to no bits.
    assert int(widths[0].sum()) > int(widths[1].sum()) > int(widths[2].sum()) == 0
    for power in (-90, 40):
        others = _divided(columns, list(costs * np.float32(2.0**power)), 128)
        for one, two in zip(jax.tree.leaves((steps, widths)), jax.tree.leaves(others), strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.long
def test_a_client_without_curvature_keeps_its_weights_and_one_that_diverged_is_named(sent):
    update = sent["kfac"]
    silent = jax.tree.map(np.zeros_like, update.values["fisher"])
    found = _decoded(water_filling(1.4), Update(update.values | {"fisher": silent}, ""), START)
    assert _worst(update.values["params"], found["params"]) < 0.2
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found["fisher"]))

    def spoiled(x):
        x = np.array(x)
        x[1, ..., 0] = np.nan
        return x

    for codec in (water_filling(1.4), quantized(6), compose(roots(2), quantized(6))):
        for place in ("params", "fisher"):
            broken = update.values | {place: jax.tree.map(spoiled, update.values[place])}
            method = compressed(METHODS["kfac"], codec)
            packed = encode(Update(broken, METHODS["kfac"].kind), codec, start=START)
            with pytest.raises(ValueError, match=r"clients \[1\] are not finite"):
                fj.merging.merge(method, START, packed)


# --- algorithms


@pytest.mark.long
def test_rounds_carry_what_is_sent_and_count_it(compilations, trained):
    codec = compose(differences(), quantized(12))
    method = compressed(METHODS["diagonal"], codec)
    how = {"cohort": 2, "optimizer": optax.sgd(0.3), "epochs": 1, "batch_size": 10}
    played = {}
    for name, algorithm in (("open", METHODS["diagonal"]), ("sent", method)):
        experiment = fj.rounds.federated(MODEL, algorithm, **how)
        state = experiment.init(trained.start, 2)
        how_long = {"key": jax.random.key(3), "rounds": 2}
        *_, (state, _) = fj.rounds.run(experiment, state, FEDERATION, **how_long)
        played[name] = state.params
    assert 0 < _worst(played["open"], played["sent"]) < 0.02
    update = fj.merging.summarize(method, trained, FEDERATION, key=jax.random.key(1))
    up = experiment.traffic(trained.start, FEDERATION).up
    assert (
        up
        == compression.size(update) / 2
        == 2 * (math.ceil(30 * 1.5) + 4) + 2 * (8 + 4) + 2 * (23 + 4)
    )
    chunks = ([jax.tree.map(lambda x, i=i: x[i : i + 1], update), None] for i in range(2))
    streamed = fj.merging.merge_stream(method, trained.start, map(tuple, chunks))[0]
    whole = fj.merging.merge(method, trained.start, update)[0]
    assert _worst(whole, streamed) < 1e-5
    same = compressed(METHODS["diagonal"], compose(differences(), quantized(12)))
    assert same is method
    with compilations() as count:
        fj.merging.summarize(same, trained, FEDERATION, key=jax.random.key(2))
    assert count() == 0


@pytest.mark.long
def test_messages_that_follow_are_compressed_alike():
    method = fj.algorithms.natural_gradient(MODEL)
    small = compressed(method, quantized(16))
    assert [own.kind for own in small] == [f"{own.kind}; 16 bits" for own in method]
    assert all(map(operator.is_, small, compressed(list(method), quantized(16))))
    start = _shifted(START, 0.1)
    ways = [
        fj.merging.exchange(m, start, FEDERATION, key=jax.random.key(0))[0] for m in (method, small)
    ]
    assert _worst(*ways) < 0.05


def test_one_codec_around_another_is_both(trained):
    twice = compressed(compressed(METHODS["fedavg"], differences()), quantized(8))
    once = compressed(METHODS["fedavg"], compose(differences(), quantized(8)))
    merged = []
    for method in (twice, once):
        sent = fj.merging.summarize(method, trained, FEDERATION, key=jax.random.key(1))
        merged.append(fj.merging.merge(method, trained.start, sent)[0])
    for one, two in zip(*map(jax.tree.leaves, merged), strict=True):
        np.testing.assert_array_equal(one, two)


def test_another_codecs_update_is_refused(sent):
    packed = encode(sent["fedavg"], quantized(8))
    for other in (METHODS["fedavg"], compressed(METHODS["fedavg"], quantized(7))):
        with pytest.raises(ValueError, match="this algorithm merges"):
            fj.merging.merge(other, START, packed)


VALUES = {"params": {"w": jnp.ones((3, 2))}}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: quantized(0), "bits is 0; expected"),
        (lambda: quantized(1), "bits is 1; expected 2 to 24"),
        (lambda: quantized({"params": 25}), "bits of params is 25"),
        (lambda: quantized({"fisher": 8}).encode(VALUES, None), r"given for \['fisher'\]"),
        (lambda: truncated(0), "rank"),
        (lambda: roots(-1), "rank"),
        (lambda: truncated().encode(VALUES, None), "no symmetric matrix"),
        (lambda: water_filling(0), "size"),
        (lambda: water_filling(0.1).encode(VALUES, None), "expected more"),
        (lambda: water_filling(1.0).encode({"change": jnp.ones(3)}, None), "no weights"),
        (lambda: compose(quantized(8), 8), "codec is"),
        (lambda: compressed(METHODS["fedavg"], 8), "codec is"),
        (lambda: compressed(None, quantized(8)), "algorithm is"),
    ],
)
def test_bad_input_is_refused_by_name(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()
