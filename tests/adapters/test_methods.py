"""Any method on the changes that adapters make, against the same method on dense kernels."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import adapters, tree
from fisherjax.adapters import Adapter

SHAPES = {"one": (5, 6), "two": (3, 6)}  # the second as PyTorch stores it


def apply(params, inputs):
    return jnp.tanh(inputs @ params["one"]) @ params["two"].T + params["bias"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)
KEY = jax.random.key(0)
source = np.random.default_rng(0)
BASE = {n: source.normal(size=s).astype("f4") for n, s in (SHAPES | {"bias": (3,)}).items()}
DATA = source.normal(size=(30, 5)).astype("f4"), source.integers(3, size=30)
CLIENTS = fj.clients.federation(DATA, [np.arange(8), np.arange(8, 20), np.arange(20, 30)])


def start():
    """Adapters of both kernels, with the name that each layout has."""
    parts = []
    for name, rank, transposed in (("one", 2, False), ("two", 1, True)):
        how = {"rank": rank, "alpha": 3, "transposed": transposed, "key": KEY}
        parts.append(adapters.attach(MODEL, BASE, [name], **how)[1]["adapters"])
    return {"base": BASE, "adapters": parts[0] | parts[1]}


START = start()
# The mask of both.
LORA = adapters.attach(MODEL, BASE, ["one"], rank=2, key=KEY)[0]._replace(
    mask={
        "base": dict.fromkeys(BASE, False),
        "adapters": {name: Adapter(True, True, False) for name in START["adapters"]},
    }
)
DENSE = adapters.dense(MODEL, START)


def trained(seed=1):
    """Three clients whose factors are drawn: to train them takes seconds."""
    draws = np.random.default_rng(seed)
    models = [
        START
        | {
            "adapters": {
                name: Adapter(
                    draws.normal(size=x.a.shape).astype("f4"),
                    draws.normal(size=x.b.shape).astype("f4"),
                    x.scale,
                )
                for name, x in START["adapters"].items()
            }
        }
        for _ in range(3)
    ]
    kinds = fj.leaves.kinds(LORA, START, DATA[0])
    parts = fj.leaves.split_by_kind(kinds, tree.stack(models))
    frozen = fj.leaves.split_by_kind(kinds, START)
    return fj.training.Trained(parts.trained, frozen.trained, frozen=frozen.frozen), models


def merge_dense(algorithm, models):
    """The same method on the dense kernels that the clients have."""
    whole = [adapters.merged(model) for model in models]
    parts = [fj.leaves.split_trained(DENSE, model) for model in whole]
    found = fj.training.Trained(
        tree.stack([x for x, _ in parts]), fj.leaves.trained(DENSE, BASE), frozen=parts[0][1]
    )
    updates = fj.merging.summarize(algorithm, found, CLIENTS, key=KEY)
    return fj.merging.merge(algorithm, BASE, updates, CLIENTS.weights)[0]


FULL_KFAC = partial(fj.algorithms.fedfisher, kind=fj.fisher.true)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda _: fj.algorithms.fedavg(), marks=pytest.mark.long),
        pytest.param(lambda _: fj.algorithms.ties(density=0.5), marks=pytest.mark.slow),
        pytest.param(lambda _: fj.algorithms.task_arithmetic(scaling=0.7), marks=pytest.mark.long),
        pytest.param(fj.algorithms.regmean, marks=pytest.mark.long),
        pytest.param(FULL_KFAC, marks=pytest.mark.long),
    ],
    ids=["fedavg", "ties", "task arithmetic", "regmean", "kfac"],
)
def test_a_merge_is_that_of_the_dense_kernels_if_the_rank_allows(make):
    algorithm = make(DENSE)
    clients, models = trained()
    method = adapters.merge_products(algorithm, LORA, rank=6)
    updates = fj.merging.summarize(method, clients, CLIENTS, key=KEY)
    found, _, _ = fj.merging.merge(method, START, updates, CLIENTS.weights)
    expected = merge_dense(algorithm, models)
    for name, leaf in adapters.merged(found).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-3, atol=2e-4)
    # A client sends factors, and no change in full.
    sent = {n: x for n, x in tree.shapes(updates.values).items() if n.startswith("params/")}
    assert sent == {} or sent["params/adapters/one/a"] == (3, 2, 5)


def test_of_the_starts_rank_the_best_adapter_remains():
    clients, models = trained()
    method = adapters.merge_products(fj.algorithms.fedavg(), LORA)
    updates = fj.merging.summarize(method, clients, CLIENTS, key=KEY)
    found, _, _ = fj.merging.merge(method, START, updates, CLIENTS.weights)
    shares = np.asarray(CLIENTS.weights) / np.sum(CLIENTS.weights)
    for name, rank in (("one", 2), ("two^T", 1)):
        adapter = found["adapters"][name]
        assert adapter.a.shape == START["adapters"][name].a.shape
        assert adapter.scale == START["adapters"][name].scale
        products = [np.asarray(adapters.product(x["adapters"][name]), float) for x in models]
        u, s, v = np.linalg.svd(sum(p * x for p, x in zip(shares, products, strict=True)))
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        np.testing.assert_allclose(adapters.product(adapter), best, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found["base"]["one"], BASE["one"])


@pytest.mark.long
def test_rounds_of_adapters_move_adapters_only():
    method = adapters.merge_products(fj.algorithms.fedavg(), LORA)
    how = {"cohort": 3, "optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 8}
    experiment = fj.rounds.federated(LORA, method, **how)
    first = experiment.init(START, CLIENTS)
    *_, (state, done) = fj.rounds.run(experiment, first, CLIENTS, key=KEY, rounds=2)
    assert np.isfinite(done.loss).all()
    assert np.abs(state.params["adapters"]["one"].b).max() > 0
    np.testing.assert_array_equal(state.params["base"]["one"], BASE["one"])


def test_methods_that_merge_changes_of_the_start_fit():
    for algorithm in (
        *(fj.algorithms.task_arithmetic(), fj.algorithms.ties(), fj.algorithms.iso_c()),
        fj.algorithms.fedfisher(DENSE, centre="start"),
    ):
        assert adapters.merge_products(algorithm, LORA).model is LORA


def test_methods_whose_clients_send_the_same_still_do():
    makers = [partial(FULL_KFAC.func, **(FULL_KFAC.keywords | {"damping": x})) for x in (0.1, 10.0)]
    whole, cut = (adapters.merge_products(makers[0](DENSE), LORA, rank=r) for r in (None, 6))
    other = adapters.merge_products(makers[1](DENSE), LORA)
    assert whole.summarize == cut.summarize == other.summarize
    assert whole.kind == cut.kind == other.kind
    assert whole.summarize != adapters.merge_products(fj.algorithms.regmean(DENSE), LORA).summarize


def test_methods_that_do_not_fit_are_named():
    compressed = fj.compression.compressed(fj.algorithms.fedavg(), fj.compression.quantized(bits=8))
    for algorithm, model, words in (
        (
            fj.algorithms.fedfisher(MODEL),
            LORA,
            "trains .'all'., but the adapters change .'one', 'two'",
        ),
        (fj.algorithms.fedavg(), MODEL, "model has no adapters"),
        (fj.algorithms.scaffold(), LORA, "keep no state"),
        (compressed, LORA, "send arrays as they are"),
    ):
        with pytest.raises(ValueError, match=words):
            adapters.merge_products(algorithm, model)
    with pytest.raises(ValueError, match="rank is 0"):
        adapters.merge_products(fj.algorithms.fedavg(), LORA, rank=0)
