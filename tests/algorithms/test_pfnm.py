"""PFNM: widths, shrinkage, matches and what is refused."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax._layers.graph import wiring
from fisherjax._layers.layer import assemble, matrix
from fisherjax.algorithms import Update, pfnm
from fisherjax.algorithms._unit_matching import Prior, _assigned
from fisherjax.fisher.operators import Template

IMAGES = np.random.default_rng(0).normal(size=(5, 16, 16, 3)).astype(np.float32)


def channels_first(params, x):
    """[C, H, W] and kernels [outputs, inputs], as in PyTorch, with biases."""
    x = x.transpose(0, 3, 1, 2)
    x = jax.lax.conv_general_dilated(x, params["conv"], (4, 4), "VALID")
    x = jax.nn.relu(x + params["shift"][:, None, None])
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense"].T)
    return x @ params["head"].T + params["bias"]


SHAPES = {"conv": (3, 3, 4, 4), "shift": (3,), "dense": (5, 48), "head": (4, 5), "bias": (4,)}


def drawn(shapes, seed):
    source = np.random.default_rng(seed)
    return jax.tree.map(lambda x: source.normal(size=x.shape).astype(x.dtype), shapes)


def of_module(module):
    shapes = jax.eval_shape(lambda: fj.networks.init(module, jax.random.key(0), IMAGES))
    return fj.networks.apply_fn(module, any_width=True), shapes


def by_hand():
    return channels_first, {k: jax.ShapeDtypeStruct(v, np.float32) for k, v in SHAPES.items()}


NETWORKS = {
    "LeNet": partial(of_module, fj.networks.LeNet()),
    "MLP": partial(of_module, fj.networks.MLP((7, 6), use_bias=True)),
    "channels first": by_hand,
}


def networks(name):
    """Give apply and three clients' params."""
    apply, shapes = NETWORKS[name]()
    return apply, [drawn(shapes, seed) for seed in range(3)]


def merge(apply, models, counts=None, weights=None, **options):
    method = pfnm(fj.Model(apply, fj.likelihoods.categorical), **options)
    found = wiring(apply, models[0], IMAGES)
    counts = np.ones((len(models), found.layers[-1].columns)) if counts is None else counts
    stacked = jax.tree.map(lambda *x: np.stack(x), *models)
    values = {"params": stacked, "counts": counts, "wiring": found}
    merged, _, info = fj.merging.merge(method, models[0], Update(values, method.kind), weights)
    return merged, info


def change(found, params, each):
    """Change the matrix [a, o] of each layer, with its place."""
    template = Template.of(params)
    # In one piece: by itself each operation is another program.
    whole = jax.jit(lambda leaves: [matrix(layer, leaves) for layer in found.layers])
    matrices = jax.device_get(whole(template.by_name(params)))
    values = {
        layer.kernel: each(place, value)
        for place, (layer, value) in enumerate(zip(found.layers, matrices, strict=True))
    }
    return template.restore(jax.jit(lambda values: assemble(found.layers, values))(values))


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_identical_clients_come_back_smaller(name):
    apply, (one, *_) = networks(name)
    # Far from zero: of a unit that hardly does anything it pays to make a new one.
    one = jax.tree.map(lambda leaf: 4 * leaf, one)
    found = wiring(apply, one, IMAGES)
    how = {"prior_precision": 0.5, "prior_mean": 0.0}
    merged, info = merge(apply, [one] * 3, **how)
    last = len(found.layers) - 1
    order = [info.places[layer.kernel][0] for layer in found.layers[:-1]]

    def expected(place, value):
        if place:
            outer, inner = found.spans[place]
            rows = found.layers[place].rows
            kernel = value[:rows].reshape(outer, -1, inner, value.shape[1])
            moved = np.empty_like(kernel)
            moved[:, order[place - 1]] = kernel
            value = np.concatenate([moved.reshape(rows, -1), value[rows:]])
        if place == last:
            return value
        moved = np.empty_like(value)
        moved[:, order[place]] = value
        return moved * 3 / 3.5

    smaller = change(found, one, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), merged, smaller)
    for places in info.places.values():
        for own in places[1:]:
            np.testing.assert_array_equal(own, places[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_the_order_of_a_clients_units_does_not_matter(name):
    apply, models = networks(name)
    # Alike: units that share no input would be matched with any other equally well.
    models = [jax.tree.map(lambda a, b: 2 * a + b, models[0], other) for other in models]
    found, source = wiring(apply, models[0], IMAGES), np.random.default_rng(3)
    orders = [source.permutation(layer.columns) for layer in found.layers]
    orders[-1] = np.arange(found.layers[-1].columns)

    def moved(place, value):
        if place:
            outer, inner = found.spans[place]
            rows = np.arange(found.layers[place].rows).reshape(outer, -1, inner)
            rows = rows[:, orders[place - 1]].ravel()
            value = np.concatenate([value[rows], value[len(rows) :]])
        return value[:, orders[place]]

    other = change(found, models[1], moved)
    expected, _ = merge(apply, models)
    merged, _ = merge(apply, [models[0], other, models[2]])
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, expected)
    outputs = jax.jit(apply)(expected, IMAGES)
    np.testing.assert_allclose(jax.jit(apply)(merged, IMAGES), outputs, rtol=1e-3, atol=1e-3)


def dense(params, x):
    return jax.nn.relu(x.reshape(len(x), -1)[:, :6] @ params["a"]) @ params["b"]


def test_units_that_nobody_shares_stay_apart_and_are_halved():
    source = np.random.default_rng(0)
    kernels = 50 * np.eye(6, dtype=np.float32).reshape(6, 3, 2).swapaxes(0, 1)
    heads = [source.normal(size=(2, 3)).astype(np.float32) for _ in range(3)]
    models = [{"a": a, "b": b} for a, b in zip(kernels, heads, strict=True)]
    merged, _ = merge(dense, models)
    assert merged["a"].shape == (6, 6)
    # The mean of what the clients compute, each halved: a network that none of them is.
    outputs = sum(dense(model, IMAGES) for model in models) / 3
    np.testing.assert_allclose(dense(merged, IMAGES), outputs / 2, rtol=1e-4, atol=1e-3)


def test_a_full_layer_takes_one_new_unit_from_a_client():
    kernels = 50 * np.eye(6, dtype=np.float32).reshape(6, 3, 2).swapaxes(0, 1)
    models = [{"a": a, "b": np.ones((2, 3), np.float32)} for a in kernels]
    merged, info = merge(dense, models, most_new=2, sweeps=1)
    assert merged["a"].shape[1] < 6
    assert all(len(set(own)) == 2 for own in info.places["a"])


def test_clients_are_matched_again_in_an_order_of_the_key():
    source = np.random.default_rng(0)
    models = [
        {"a": source.standard_normal((6, 5), np.float32), "b": np.ones((5, 3), np.float32)}
        for _ in range(4)
    ]
    once, twice = (merge(dense, models, sweeps=number)[1].places["a"] for number in (1, 2))
    assert any((a != b).any() for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("misplaced", [False, True])
def test_the_prior_is_of_biases_but_where_the_papers_code_has_it(misplaced):
    apply, (one, *_) = networks("MLP")
    merged, info = merge(apply, [one], misplaced_prior=misplaced)
    first, second = (info.places[f"dense{n}/kernel"][0] for n in (1, 2))
    np.testing.assert_allclose(
        merged["dense1"]["bias"][first], (one["dense1"]["bias"] + 0.1) / 2, rtol=1e-5
    )
    kernel, bias = np.array(one["dense2"]["kernel"]), np.array(one["dense2"]["bias"])
    if misplaced:
        # The first of the merged layer's inputs, whichever unit that is.
        kernel[first == 0] += 0.1
    else:
        bias += 0.1
    np.testing.assert_allclose(merged["dense2"]["bias"][second], bias / 2, rtol=1e-5)
    np.testing.assert_allclose(merged["dense2"]["kernel"][first][:, second], kernel / 2, rtol=1e-5)


def test_classes_are_averaged_by_who_has_them():
    a = np.eye(6, dtype=np.float32)
    heads = np.random.default_rng(1).normal(size=(2, 6, 3)).astype(np.float32)
    models = [{"a": 9 * a, "b": head} for head in heads]
    merged, info = merge(dense, models, counts=np.array([[4.0, 0, 0], [1, 5, 0]]))
    shares = np.array([[0.8, 0, 0.5], [0.2, 1, 0.5]])
    expected = np.einsum("mac,mc->ac", heads, shares)
    np.testing.assert_allclose(merged["b"][info.places["a"][0]], expected, rtol=1e-5)


def test_a_client_without_weight_is_left_out():
    models = [
        {"a": x.standard_normal((6, 4), np.float32), "b": x.standard_normal((4, 3), np.float32)}
        for x in map(np.random.default_rng, range(3))
    ]
    expected, _ = merge(dense, models[::2], counts=np.ones((2, 3)))
    merged, _ = merge(dense, models, counts=np.ones((3, 3)), weights=[2, 0, 1])
    jax.tree.map(np.testing.assert_array_equal, merged, expected)


def test_an_assignment_is_the_best_of_all():
    source, prior = np.random.default_rng(5), Prior(0.7, 0.1, 7.0, 5, 700)
    own, totals = source.normal(size=(3, 4)), 2 * source.normal(size=(2, 4))
    popularity, start = np.array([1.0, 2.0]), 0.7 * np.array([0, 0, 0, 0.1])

    def gain(w, place):
        """By coordinates, as the papers write it, one client of unit precision."""
        if place < 2:
            before, strength = totals[place], 0.7 + popularity[place]
            known = math.log(popularity[place] / (4 - popularity[place]))
        else:
            before, strength = start, 0.7
            known = 2 * math.log(7 / 4) - 2 * math.log(place - 1)
        gains = ((w + before) ** 2 / (1 + strength) - before**2 / strength).sum()
        return gains + known

    found = _assigned(prior, start, own, totals, popularity, 4)
    every = itertools.permutations(range(5), 3)
    sums = {p: sum(gain(w, place) for w, place in zip(own, p, strict=True)) for p in every}
    assert max(sums, key=sums.get) == tuple(found)


@pytest.mark.long
@pytest.mark.parametrize("units", [700, 701, 760])
def test_layers_beyond_the_bound_take_every_unit_of_every_client(units):
    """Two clients with one network, in another order: each unit finds its own, and is known."""
    source = np.random.default_rng(0)
    one = {
        "a": 9 * source.normal(size=(6, units)).astype(np.float32),
        "b": source.normal(size=(units, 3)).astype(np.float32),
    }
    order = source.permutation(units)
    other = {"a": one["a"][:, order], "b": one["b"][order]}
    merged, info = merge(dense, [one, other], prior_mean=0.0, prior_precision=0.5)
    assert merged["a"].shape == (6, units)
    first, second = info.places["a"]
    np.testing.assert_array_equal(second, first[order])
    np.testing.assert_allclose(merged["a"][:, first], one["a"] * 2 / 2.5, rtol=1e-5)
    np.testing.assert_allclose(merged["b"][first], one["b"], rtol=1e-5)


@pytest.mark.parametrize("most_new", [1, 2, 3, 4, 5])
def test_a_client_beyond_the_bound_is_matched_as_all_ways_of_it_say(most_new):
    """The first is taken whole; the second by the best of all ways, unit by unit."""
    source, prior = np.random.default_rng(7), Prior(0.7, 0.1, 7.0, 5, most_new)
    own, start = source.normal(size=(4, 3)), 0.7 * np.array([0, 0, 0.1])
    found = _assigned(prior, start, own, np.zeros((0, 3)), np.zeros(0), 2)
    assert sorted(found) == [0, 1, 2, 3]
    # Of a layer of three, as when the widest was taken out to be matched again.
    totals, popularity = start + source.normal(size=(3, 3)), np.ones(3)
    found = _assigned(prior, start, own, totals, popularity, 2)
    places = 3 + max(most_new - 3, 4 - 3, 1)

    def gain(w, place):
        before, strength, known = start, 0.7, 2 * math.log(7 / 2)
        if place < 3:
            before, strength, known = totals[place], 1.7, math.log(1 / (2 - 1))
        else:
            known -= 2 * math.log(place - 2)
        return ((w + before) ** 2 / (1 + strength) - before**2 / strength).sum() + known

    every = itertools.permutations(range(places), 4)
    sums = {p: sum(gain(w, place) for w, place in zip(own, p, strict=True)) for p in every}
    assert max(sums, key=sums.get) == tuple(found)


def test_what_pfnm_cannot_do_is_refused():
    model = fj.Model(dense, fj.likelihoods.categorical)
    with pytest.raises(ValueError, match="the categorical one"):
        pfnm(fj.Model(dense, fj.likelihoods.gaussian))
    with pytest.raises(ValueError, match="sweeps"):
        pfnm(model, sweeps=0)
    with pytest.raises(ValueError, match="prior_mean is nan; expected a finite number"):
        pfnm(model, prior_mean=float("nan"))
    models = [{"a": np.ones((6, 4), np.float32), "b": np.ones((4, 3), np.float32)}] * 2
    federation = fj.clients.federation((IMAGES, np.array([0, 1, 2, 2, 1])), [[0, 1], [2, 3, 4]])
    sent = fj.merging.summarize(pfnm(model), models, federation, key=jax.random.key(0))
    np.testing.assert_array_equal(sent.values["counts"], [[1, 1, 0], [0, 1, 2]])
    other = {"a": np.ones((6, 5), np.float32), "b": np.ones((5, 3), np.float32)}
    with pytest.raises(ValueError, match=r"'a': \(6, 4\).* but params has .*'a': \(6, 5\)"):
        fj.merging.merge(pfnm(model), other, sent)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda sent: fj.merging.merge(pfnm(model), models[0], sent)[0])(sent)
    how = {"optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 2}
    with pytest.raises(ValueError, match="other shapes"):
        fj.rounds.federated(model, pfnm(model), cohort=2, **how)

    def branches(params, x):
        x = x.reshape(len(x), -1)[:, :6]
        return (x @ params["a"] + jnp.tanh(x @ params["c"])) @ params["b"]

    wide = models[0] | {"c": models[0]["a"]}
    method = pfnm(fj.Model(branches, fj.likelihoods.categorical))
    with pytest.raises(ValueError, match="needs a chain of layers"):
        fj.merging.summarize(method, [wide] * 2, federation, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("wrap", "given"),
    [("with_server_optimizer", optax.sgd(1.0)), ("keep_local", lambda name: name == "b")],
    ids=["with_server_optimizer", "keep_local"],
)
def test_wrappers_that_go_on_from_the_merged_model_refuse_another_shape(wrap, given):
    method = pfnm(fj.Model(dense, fj.likelihoods.categorical))
    with pytest.raises(ValueError, match="returns 'wider model'"):
        getattr(fj.algorithms, wrap)(method, given)


def test_a_module_takes_other_widths_only_where_it_is_told_so():
    small, wide = fj.networks.MLP((7,)), fj.networks.MLP((9,))
    params = fj.networks.init(wide, jax.random.key(0), IMAGES)
    expected = fj.networks.apply_fn(wide)(params, IMAGES)
    found = fj.networks.apply_fn(small, any_width=True)(params, IMAGES)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(Exception, match="shape"):
        fj.networks.apply_fn(small)(params, IMAGES)
