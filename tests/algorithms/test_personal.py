"""Laws of methods that make a model for each client, for every row of their table."""

import dataclasses
from functools import partial

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, networks, rounds, tree
from fisherjax.algorithms import fedavg, fedbn, fedper, single_set, weighted_fedavg

SIZES = (7, 1, 0, 9, 5)
SGD = optax.sgd(0.1)  # one, as programs are known by it
HOW = {"optimizer": SGD, "epochs": 2, "batch_size": 4}
KEY = jax.random.key(0)


class Small(flax.linen.Module):
    """A dense layer, its BatchNorm, and a head."""

    @flax.linen.compact
    def __call__(self, inputs, train=False):
        hidden = flax.linen.Dense(6, param_dtype=float, name="body")(inputs)
        wide = {"param_dtype": float, "force_float32_reductions": False}
        norm = partial(flax.linen.BatchNorm, momentum=0.8, name="norm", **wide)
        hidden = norm(use_running_average=not train)(hidden)
        return flax.linen.Dense(3, param_dtype=float, name="head")(jax.nn.relu(hidden))


@pytest.fixture
def world(x64):
    """Five clients of three classes: one example, none, and a class that nobody else has."""
    source = np.random.default_rng(0)
    x, y = source.normal(size=(22, 4)), source.integers(0, 2, 22)
    y[-5:] = 2
    federation = clients.federation((x, y), np.split(np.arange(22), np.cumsum(SIZES)[:-1]))
    # In their order: a selection names its clients, and another structure is another program.
    federation = clients.select(federation, np.arange(5))
    start = jax.jit(lambda: networks.init(Small(), KEY, x))()
    return federation, start, networks.model(Small(), start, fj.likelihoods.categorical)


def make(name, model):
    options = dict.fromkeys(algorithms.required(name), "head")
    options |= {"temperature": 0.2} if "temperature" in algorithms.options(name) else {}
    return algorithms.make(name, model, **options)


def play(world, method, number, *, cohort=5, state=None, federation=None):
    """Play rounds; the last state, every client's model, and what happened."""
    own, start, model = world
    federation = own if federation is None else federation
    experiment = rounds.federated(model, method, cohort=cohort, **HOW)
    state = experiment.init(start, federation) if state is None else state
    *_, (state, done) = rounds.run(experiment, state, federation, key=KEY, rounds=number)
    return state, experiment.models(state, 5), done


@pytest.fixture(params=algorithms.personal())
def method(request, world):
    return make(request.param, world[2])


@pytest.mark.long
def test_a_run_that_goes_on_from_what_was_saved_is_the_whole_run(world, method):
    whole, *_ = play(world, method, 3, cohort=3)
    first, *_ = play(world, method, 2, cohort=3)
    saved = jax.tree.map(jnp.asarray, jax.device_get(first))
    again, *_ = play(world, method, 1, cohort=3, state=saved)
    chex.assert_trees_all_equal(whole, again)


@pytest.mark.long
def test_the_order_of_clients_is_that_of_their_models(world, method):
    order = np.array([3, 0, 4, 2, 1])
    expected = play(world, method, 2)[1]
    found = play(world, method, 2, federation=clients.select(world[0], order))[1]
    chex.assert_trees_all_close(
        found, jax.tree.map(lambda x: np.asarray(x)[order], expected), rtol=1e-9, atol=1e-12
    )


def test_every_clients_model_is_finite_and_moves_where_it_has_examples(world, method):
    start, models = world[1], play(world, method, 2)[1]
    assert tree.finite_by_client(models).all()
    head = np.asarray(models["params"]["head"]["bias"])
    moved = np.abs(head - np.asarray(start["params"]["head"]["bias"])).max(1) > 0
    assert moved[np.array(SIZES) > 0].all()


def test_who_sits_a_round_out_keeps_its_model(world, method):
    state, before, _ = play(world, method, 1, cohort=3)
    _, after, done = play(world, method, 1, cohort=3, state=state)
    away = np.setdiff1d(np.arange(5), done.cohort)
    before, after = jax.device_get((before, after))
    private = state.local.leaves if hasattr(state.local, "leaves") else {}
    own = tree.names(before) if method.link.personal or not private else tuple(private)
    own += tuple(state.statistics)
    for name, old, new in zip(
        tree.names(before), jax.tree.leaves(before), jax.tree.leaves(after), strict=True
    ):
        if name in own:
            np.testing.assert_array_equal(old[away], new[away])


@pytest.mark.slow
def test_alone_is_training_again_and_again(world):
    federation, start, model = world
    state, _, done = play(world, single_set(), 2)
    chex.assert_trees_all_equal(state.local, done.trained.params)
    chex.assert_trees_all_equal(state.params, start)
    first = jax.tree.map(lambda x: np.asarray(x)[:1], state.local)
    alone = clients.select(federation, [0])
    # Nobody else's examples matter.
    one = rounds.federated(model, single_set(), cohort=1, **HOW)
    *_, (state, _) = rounds.run(one, one.init(start, alone), alone, key=KEY, rounds=2)
    chex.assert_trees_all_close(state.local, first, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_of_a_small_temperature_everybody_is_alone(world):
    cold = weighted_fedavg(world[2], temperature=1e-6)
    found, expected = play(world, cold, 2)[1], play(world, single_set(), 2)[1]
    present = np.flatnonzero(SIZES)
    found, expected = map(jax.tree.leaves, jax.device_get((found, expected)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a[present], b[present], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_where_nobody_trains_its_norms_fedbn_is_federated_averaging(world):
    federation, start, model = world
    mask = jax.tree.map(lambda _: True, start["params"])
    mask["norm"] = jax.tree.map(lambda _: False, mask["norm"])
    whole = {"params": mask, "moments": jax.tree.map(lambda _: False, start["moments"])}
    still = fj.Model(model.apply, model.likelihood, None, whole)
    both = [play((federation, start, still), m, 2)[1] for m in (fedbn(), fedavg())]
    chex.assert_trees_all_close(*both, rtol=1e-12)


# FedFish and FedLPA send the diagonal and the factors that others do.
@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["fedfisher_kfac", "regmean", "fedfish", "fedlpa"])
def test_any_merge_can_leave_norms_to_the_clients(world, wrapped):
    """The shared layers are those of the merge; each client's norms and statistics its own."""
    method = fedbn(algorithms.make(wrapped, world[2]))
    state, models, done = play(world, method, 1)
    models, done = jax.device_get((models, done))
    trained = done.trained.models
    norm = trained["params"]["norm"]
    chex.assert_trees_all_equal(models["params"]["norm"], norm)
    chex.assert_trees_all_equal(models["moments"], trained["moments"])
    assert not (norm["scale"][0] == norm["scale"][3]).any()
    body = models["params"]["body"]["kernel"]
    np.testing.assert_array_equal(body[0], body[3])
    assert tree.finite_leaves(state.params).all()


def test_what_is_sent_are_shared_leaves_and_prototypes(world):
    federation, start, model = world

    def bytes_of(*methods):
        made = [rounds.federated(model, m, cohort=5, **HOW) for m in methods]
        return [one.traffic(start, federation) for one in made]

    def size(values):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(values))

    # Where moments are counted from never changes, and is not sent.
    moments = {n: x for n, x in start["moments"]["norm"].items() if n != "shift"}
    norms = size(start["params"]["norm"]) + size(moments)
    head, prototypes = size(start["params"]["head"]), 3 * 6 * 8
    everything = size(start["params"]) + size(moments)
    names = ("single_set", "fedper", "fedbn", "weighted_fedavg", "weighted_fedbn")
    found = bytes_of(*(make(name, model) for name in names))
    expected = [
        (0, 0),
        (everything - head, everything - head),
        (everything - norms, everything - norms),
        (everything, everything + prototypes),
        (everything - norms, everything - norms + prototypes),
    ]
    assert [tuple(one) for one in found] == expected


def scaled(fisher, scale):
    """Multiply a Fisher by a number, of each product of factors one."""
    if isinstance(fisher, fj.fisher.Kronecker):
        factors = {
            name: factor | {"output": np.asarray(factor["output"]) * scale}
            for name, factor in fisher.factors.items()
        }
        entries = jax.tree.map(lambda x: np.asarray(x) * scale, fisher.entries)
        return dataclasses.replace(fisher, factors=factors, entries=entries)
    return jax.tree.map(lambda x: np.asarray(x) * scale, fisher)


@pytest.mark.long
@pytest.mark.parametrize("fisher", [fj.fisher.diagonal, fj.fisher.kfac])
def test_clients_are_as_alike_as_their_fishers_are_parallel(world, fisher):
    federation, start, model = world
    method = weighted_fedavg(model, temperature=0.5, fisher=fisher)
    models = [
        start | {"params": jax.tree.map(lambda x, i=i: np.asarray(x) + 0.1 * i, start["params"])}
        for i in range(5)
    ]
    sent = merging.summarize(method, models, federation, key=KEY)
    similarity = np.asarray(merging.merge(method, start, sent, federation.weights)[2])
    present = np.flatnonzero(SIZES)
    dense = jax.jit(jax.vmap(lambda one: one.dense()))(sent.values["fisher"])
    flat = np.asarray(dense).reshape(5, -1)[present]
    unit = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    powers = np.exp(unit @ unit.T / 0.5)
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(
        similarity[np.ix_(present, present)], expected, rtol=1e-9, atol=1e-12
    )
    assert not similarity[:, 2].any()
    # Scale is no likeness: neither a client's nor one that squares would lose.
    values = dict(sent.values)
    values["fisher"] = scaled(values["fisher"], 1e-200)
    tiny = dataclasses.replace(sent, values=values)
    again = merging.merge(method, start, tiny, federation.weights)[2]
    np.testing.assert_allclose(again, similarity, rtol=1e-9, atol=1e-12)


def test_a_layer_is_its_own_leaves_and_no_others():
    params = {name: {"kernel": jnp.zeros(1)} for name in ("dense1", "dense10", "old_dense1")}
    assert list(fedper("dense1").link.init_client(params).leaves) == ["dense1/kernel"]


NORMS = (
    *("BatchNorm_0/scale", "params/bn2/bias", "LayerNorm_1/scale", "moments/layer3/mean"),
    *(
        "features/1/running_var",
        "layers/1/scale",
        "post_ln/scale",
        "bn1/scale",
        "embed_norm/weight",
    ),
    *("encoder/input_layernorm/weight", "ln_f/bias", "BatchNorm2d_3/weight", "b/norm/scale/value"),
    *("batch_norm/~/offset", "q_norm/scale", "bn1_scale", "GroupNorm_0/bias", "RMSNorm_4/scale"),
)
OTHERS = (
    *("dense1/kernel", "params/cabn/bias", "bnd/w", "encoder/normal_map/kernel", "normal_map/bias"),
    *("abnormality_head/kernel", "WeightNorm_0/Dense_0/kernel/scale", "norm_head/bias"),
    *("norm1/linear/weight", "bn_embed/bias", "weight_norm/g", "logit_scale", "SpectralNorm_0/u"),
)


@pytest.mark.parametrize("name", NORMS)
def test_normalisations_are_known_by_name(name):
    assert algorithms.is_normalization(name)


@pytest.mark.parametrize("name", OTHERS)
def test_other_leaves_are_known_by_name(name):
    assert not algorithms.is_normalization(name)


def test_names_that_say_nothing_are_refused_and_the_equations_are_named():
    """A vector that may be a scale is neither kept nor averaged by a guess."""
    size = jnp.ones(2)
    dense, norm = {"kernel": jnp.ones((2, 2)), "bias": size}, {"scale": size, "bias": size}
    kept = fedbn().link.init_client({"normal_head": dense, "post": norm}).leaves
    assert list(kept) == ["post/bias", "post/scale"]
    shortcut = {"0": {"weight": jnp.ones((2, 2))}, "1": {"weight": size}}
    unclear = {"bn1": norm, "downsample": shortcut}
    with pytest.raises(ValueError, match=r"\['downsample/1/weight'\].*normalizations\(model"):
        fedbn().link.init_client(unclear)
    names = frozenset({"bn1/scale", "bn1/bias", "downsample/1/weight"})
    method = fedbn(where=names)
    assert set(method.link.init_client(unclear).leaves) == names
    assert method is fedbn(where=frozenset(names))
    with pytest.raises(ValueError, match=r"lists \['bn2/scale'\], which are no leaves"):
        fedbn(where=frozenset({"bn2/scale"})).link.init_client(unclear)


@pytest.mark.long
def test_what_equations_find_is_kept_and_the_rest_is_merged(world):
    federation, start, model = world
    names = algorithms.normalizations(model, start, federation.inputs)
    assert set(fedbn().link.init_client(start).leaves) == names
    found, expected = (play(world, m, 2)[1] for m in (fedbn(where=names), fedbn()))
    chex.assert_trees_all_equal(found, expected)


def test_networks_and_names_that_do_not_fit_are_refused(world):
    _, start, _ = world
    with pytest.raises(ValueError, match=r"no leaf of \['dense/kernel'\]"):
        fedbn().link.init_client({"dense": {"kernel": jnp.zeros(1)}})
    with pytest.raises(ValueError, match=r"every leaf of \['norm/scale'\]"):
        fedbn().link.init_client({"norm": {"scale": jnp.zeros(1)}})
    with pytest.raises(ValueError, match=r"No layer is called .dense9..*params/body/kernel"):
        fedper("dense9").link.init_client(start)
    with pytest.raises(TypeError, match="head is 3; expected the name of a layer"):
        fedper(3)
    with pytest.raises(ValueError, match="Did you mean 'fedper'"):
        algorithms.make("fed_per", None)
    with pytest.raises(TypeError, match="head"):
        algorithms.make("fedper", None)
    with pytest.raises(TypeError, match="fisher"):
        weighted_fedavg(world[2], fisher="kfac")


@pytest.mark.long
def test_a_merge_of_nothing_is_refused(world):
    federation, start, _ = world
    sent = merging.summarize(single_set(), [start] * 5, federation, key=KEY)
    with pytest.raises(ValueError, match="rounds"):
        merging.merge(single_set(), start, sent, federation.weights)
