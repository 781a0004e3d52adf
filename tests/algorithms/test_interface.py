"""The fields of an algorithm: what it gives, its link, sequences of messages, and stages."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, compression, merging, privacy, rounds, secure_aggregation
from fisherjax.algorithms import Link, Stages
from fisherjax.algorithms.base import GIVES, check_algorithm, keeps_shapes

MODEL = fj.Model(lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"], fj.likelihoods.categorical)
KEY, SGD = jax.random.key(0), optax.sgd(0.5)
SOURCE = np.random.default_rng(0)
DATA = SOURCE.normal(size=(12, 4)).astype(np.float32), np.arange(12, dtype=np.int32) % 3
FEDERATION = fj.clients.federation(DATA, np.split(np.arange(12), [5, 8]))
START = {"a": SOURCE.normal(size=(4, 5)), "b": SOURCE.normal(size=(5, 3))}
START = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), START)
MODELS = [jax.tree.map(lambda x, c=c: x * (1 + c / 10), START) for c in range(3)]
SENT = merging.summarize(algorithms.fedavg(), MODELS, FEDERATION, key=KEY)
MESSAGES = algorithms.natural_gradient(MODEL)


def test_an_algorithm_has_nine_fields_and_a_link_the_rest():
    fields = algorithms.Algorithm._fields
    assert set(fields) == {
        *("summarize", "aggregate", "reduce", "decode", "optimizer", "kind", "model", "gives"),
        "link",
    }
    links = {"init", "init_client", "broadcast", "receive", "personal", "draws"}
    links |= {"whole", "keeps", "mix", "reads_start"}
    assert set(Link._fields) == links
    method = algorithms.fedavg()
    assert method.link == Link()
    assert method.gives == "model"


def test_the_page_of_methods_has_every_field():
    page = (Path(__file__).parents[2] / "docs/how_to/own_method.md").read_text()
    rows = [line.partition(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    named = " ".join(rows)
    for name in (*algorithms.Algorithm._fields, *Link._fields):
        assert f"`{name}`" in named or f"`{name}(" in named, name
    assert not any(f"`{name}`" in named for name in ("then", "resizes", "stages"))


# What a merge gives

PERSONAL = {
    "single_set": algorithms.single_set(),
    "fedper": algorithms.fedper("b"),
    "keep_local": algorithms.keep_local(algorithms.scaffold(), lambda name: name == "a"),
    "weighted_fedavg": algorithms.weighted_fedavg(MODEL),
}
GIVEN = {
    **{name: ("model per client", method) for name, method in PERSONAL.items()},
    "fedavg": ("model", algorithms.fedavg()),
    "kfac": ("model", algorithms.fedfisher(MODEL)),
    "otfusion": ("model", algorithms.otfusion(MODEL)),
    "server": ("model", algorithms.with_server_optimizer(algorithms.fedavg(), SGD)),
    "compressed": ("model", compression.compressed(algorithms.fedavg(), compression.quantized(8))),
    "pfnm": ("wider model", algorithms.pfnm(MODEL)),
    "fedov": ("votes", algorithms.fedov(MODEL)),
}


def _merged_shapes(method):
    models = [jax.tree.map(lambda x, c=c: x + 9 * c * jnp.sign(x), START) for c in range(3)]
    sent = merging.summarize(method, models, FEDERATION, key=KEY)
    return fj.tree.shapes(merging.merge(method, START, sent, key=KEY)[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name in GIVEN if name not in ("keep_local", "single_set")]
)
def test_what_is_merged_has_the_shapes_that_a_method_gives(name):
    gives, method = GIVEN[name]
    assert method.gives == gives
    found, own = _merged_shapes(method), fj.tree.shapes(START)
    assert keeps_shapes(method) == (found == own)
    if gives == "votes":
        assert found == {name: (3, *shape) for name, shape in own.items()}


@pytest.mark.parametrize("name", PERSONAL)
def test_methods_that_give_a_model_per_client_say_so_and_give_several(name):
    method = PERSONAL[name]
    assert method.gives == "model per client"
    how = {"cohort": 3, "optimizer": SGD, "epochs": 1, "batch_size": 4}
    experiment = rounds.federated(MODEL, method, **how)
    start = experiment.init(START, 3)
    *_, (state, _) = rounds.run(experiment, start, FEDERATION, key=KEY, rounds=1)
    models = experiment.models(state, 3)
    first, second = ({n: x[i] for n, x in models.items()} for i in (0, 1))
    assert any(not np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", algorithms.METHODS)
def test_a_row_gives_what_its_algorithm_gives(name):
    options = {"head": "b"} if "head" in algorithms.required(name) else {}
    options |= {"shape": (4, 4, 1)} if "shape" in algorithms.required(name) else {}
    made = algorithms.make(name, MODEL, **options)
    for one in made if type(made) is tuple else (made,):
        assert one.gives == algorithms.METHODS[name].gives


@pytest.mark.parametrize("gives", ["wider model", "votes"])
def test_methods_of_other_shapes_are_refused_where_clients_go_on(gives):
    method = algorithms.fedavg()._replace(gives=gives)
    takers = (
        lambda: rounds.federated(MODEL, method, cohort=1, optimizer=SGD, epochs=1, batch_size=1),
        lambda: algorithms.with_server_optimizer(method, SGD),
        lambda: algorithms.keep_local(method, lambda name: name == "a"),
    )
    for take in takers:
        with pytest.raises(ValueError, match=f"returns '{gives}'.*Merge once, by merging.merge"):
            take()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"gives": "models"},
            ValueError,
            "gives is 'models'; expected 'model' or",
        ),
        ({"gives": True}, ValueError, "gives is True"),
        ({"link": None}, TypeError, "link is a NoneType; expected a Link such as"),
        ({"link": {"init": lambda *_: ()}}, TypeError, "link is a dict"),
    ],
)
def test_fields_that_mean_nothing_are_refused(changes, error, said):
    with pytest.raises(error, match=said):
        merging.merge(algorithms.fedavg()._replace(**changes), START, SENT)
    with pytest.raises(error, match=said):
        check_algorithm(algorithms.fedavg()._replace(**changes))
    assert all(check_algorithm(algorithms.fedavg()._replace(gives=own)) is None for own in GIVES)


# Sequences of messages

ONE = {
    "rounds.federated": lambda m: rounds.federated(
        MODEL, m, cohort=1, optimizer=SGD, epochs=1, batch_size=1
    ),
    "keep_local": lambda m: algorithms.keep_local(m, lambda name: name == "a"),
    "fedbn": algorithms.fedbn,
    "with_server_optimizer": lambda m: algorithms.with_server_optimizer(m, SGD),
    "in_stages": lambda m: algorithms.in_stages(m, print),
    "dense": lambda m: algorithms.dense(MODEL, shape=(4, 4, 1), start=m),
    "privacy.private": lambda m: privacy.private(m, clip=1.0, noise_multiplier=1.0),
    "summarize": lambda m: merging.summarize(m, MODELS, FEDERATION, key=KEY),
    "merge": lambda m: merging.merge(m, START, SENT),
    "merge_stream": lambda m: merging.merge_stream(m, START, [(SENT, FEDERATION.weights)]),
    "contributions": lambda m: secure_aggregation.contributions(m, START, SENT),
    "exchange": lambda m: merging.exchange((m, m), START, FEDERATION, key=KEY),
}


@pytest.mark.parametrize("name", ONE)
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_is_refused_where_one_algorithm_is_expected(name, kind):
    said = r"algorithm is a sequence of 3; expected one Algorithm.*merging\.exchange"
    with pytest.raises(TypeError, match=said):
        ONE[name](kind(MESSAGES))


def adding(number):
    """Make a message after which the model and the state are larger by so much."""

    def summarize(key, trained, examples, private):
        return {"one": jnp.ones(())}, private

    def aggregate(key, received, params, state, cohort):
        return jax.tree.map(lambda w: w + number, params), state + number, ()

    link = Link(init=lambda params, num_clients: jnp.asarray(100.0 * num_clients))
    return algorithms.Algorithm(summarize, aggregate, kind=str(number), link=link)


def test_the_first_of_a_sequence_is_given_the_state_and_each_the_one_before_it_left():
    start, how = {"w": jnp.zeros(2)}, {"key": KEY}
    both = [adding(1.0), adding(20.0)]
    params, state, _ = merging.exchange(both, start, FEDERATION, **how)
    assert (float(params["w"][0]), float(state)) == (21.0, 321.0)
    assert float(merging.exchange(both, start, FEDERATION, state=jnp.array(5.0), **how)[1]) == 26.0
    alone = merging.exchange(both[:1], start, FEDERATION, **how)
    assert float(alone[1]) == float(merging.exchange(both[0], start, FEDERATION, **how)[1]) == 301.0
    assert len(merging.exchange_memory(both, start, FEDERATION, **how)) == 2


@pytest.mark.parametrize("given", [(), [], 3, None, (3,), ("a", "b"), {"first": adding(1.0)}])
def test_what_is_no_sequence_of_algorithms_is_refused(given):
    takers = (
        lambda: merging.exchange(given, START, FEDERATION, key=KEY),
        lambda: merging.exchange_memory(given, START, FEDERATION, key=KEY),
        lambda: compression.compressed(given, compression.quantized(8)),
    )
    for take in takers:
        with pytest.raises(TypeError, match="expected an Algorithm such as"):
            take()


# Stages


def doubling(number=3):
    def begin(key, received, params, state, cohort):
        return params

    def advance(received, work):
        return jax.tree.map(lambda w: 2 * w, work)

    stages = Stages(number, begin, advance, lambda work, state: (work, state, ()))
    return algorithms.fedavg()._replace(aggregate=stages, reduce=None)


def test_stages_are_an_aggregate_as_they_are_and_under_jit():
    method = doubling()
    merge = lambda params: merging.merge(method, params, SENT)[0]  # noqa: E731
    shown = []
    followed = algorithms.in_stages(method, lambda done, work: shown.append((done, work)))
    for found in (merge(START), jax.jit(merge)(START), merging.merge(followed, START, SENT)[0]):
        jax.tree.map(lambda w, x: np.testing.assert_array_equal(w, 8 * x), found, START)
    assert [done for done, _ in shown] == [1, 2, 3]
    np.testing.assert_array_equal(shown[0][1]["a"], 2 * START["a"])


def test_a_wrapper_that_changes_the_merge_is_not_followed_as_if_it_were_not_there():
    """A server's optimiser of rate 1/4 goes a quarter of the way from W to 8 W."""
    wrapped = algorithms.with_server_optimizer(doubling(), optax.sgd(0.25))
    with pytest.raises(ValueError, match="to the algorithm that in_stages returns"):
        algorithms.in_stages(wrapped, print)
    shown = []
    followed = algorithms.in_stages(doubling(), lambda done, _: shown.append(done))
    around = algorithms.with_server_optimizer(followed, optax.sgd(0.25))
    for method in (wrapped, around):
        found = merging.merge(method, START, SENT)[0]
        np.testing.assert_allclose(found["a"], (1 + 7 / 4) * START["a"], rtol=1e-6)
    assert shown == [1, 2, 3]


def test_compressed_uploads_merge_in_the_same_stages():
    method = compression.compressed(doubling(), compression.quantized(8))
    assert isinstance(method.aggregate, Stages)
    shown = []
    sent = merging.summarize(method, MODELS, FEDERATION, key=KEY)
    followed = algorithms.in_stages(method, lambda done, _: shown.append(done))
    found = merging.merge(followed, START, sent)[0]
    np.testing.assert_array_equal(found["b"], 8 * START["b"])
    assert shown == [1, 2, 3]


def takes_a_model(name):
    return "model" in inspect.signature(algorithms.METHODS[name].factory).parameters


@pytest.mark.parametrize("name", [name for name in algorithms.METHODS if takes_a_model(name)])
def test_every_factory_refuses_a_network_that_is_no_model_when_it_is_called(name):
    """The error comes from the factory, which has the function, and not later from a client."""
    examples = {"shape": (8, 8, 1), "head": lambda leaf: False}
    needed = {option: examples[option] for option in algorithms.required(name)}
    with pytest.raises(TypeError, match=r"model is a function; expected fisherjax\.Model"):
        algorithms.METHODS[name].factory(lambda params, inputs: inputs, **needed)
