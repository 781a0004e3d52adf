"""Methods by their names: every number and switch of a factory is an option that reaches it."""

import contextlib
import inspect
import io
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from experiments.harness import commands, config
from experiments.harness.config import Merging
from experiments.harness.methods import Images, check_full, methods, trains_its_own
from experiments.harness.names import distils
from experiments.harness.tables import gathered
from experiments.one_shot import __main__ as one_shot
from fisherjax.algorithms import FEDLPA_DISTILLATION, METHODS
from tests.methods import MERGED

MODEL = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
WIRES = fj._layers.graph.wiring(MODEL.apply, jnp.ones((2, 2)), jnp.ones((1, 2)))


def numbers_and_switches(name: str) -> dict[str, object]:
    """Give another value than the default to each, by what the factory's signature says."""
    chosen = {}
    for option, parameter in inspect.signature(METHODS[name].factory).parameters.items():
        kinds = {parameter.annotation, *typing.get_args(parameter.annotation)}
        if bool in kinds:
            chosen[option] = not parameter.default
        elif kinds & {int, float}:
            chosen[option] = 7 if int in kinds else 0.25
    return chosen


CHOSEN = {name: numbers_and_switches(name) for name in MERGED}
PAIRS = [(name, option) for name, own in CHOSEN.items() for option in own]


def dashed(name: str, option: str, value: object = None) -> str:
    no = "no-" if value is False else ""
    return f"--{name}.{no}{option}".replace("_", "-")


def described(name: str) -> dict[str, str]:
    """Read what a factory's docstring says of its arguments."""
    factory = inspect.unwrap(getattr(METHODS[name].factory, "func", METHODS[name].factory))
    _, _, arguments = inspect.getdoc(factory).partition("Args:\n")
    arguments, _, _ = arguments.partition("\n\n")
    found = re.split(r"^    (\w+): ", arguments, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


@pytest.fixture(scope="module")
def asked() -> Merging:
    """What is read when every option of every method is told another value."""
    words = ["--algorithms", *MERGED]
    for name, option in PAIRS:
        value = CHOSEN[name][option]
        words += [dashed(name, option, value), *([] if type(value) is bool else [str(value)])]
    return commands.read(words, "", "", config.one_shot).merging


def test_methods_have_options():
    assert set(PAIRS) >= {
        *(("fedlpa", "damping"), ("fedlpa_gd", "balanced"), ("fedfisher_kfac", "damping")),
        *(("fedprox", "mu"), ("regmean", "shrink"), ("fedfish", "last_epoch")),
    }


@pytest.mark.parametrize("name", MERGED)
def test_every_number_and_switch_of_a_factory_reaches_the_algorithm(asked, name):
    assert {o: v for x, v in asked.options for n, o in [x.split(".")] if n == name} == CHOSEN[name]
    made = methods(asked, MODEL, batch_size=8)[name].clients
    assert made is fj.algorithms.make(name, MODEL, **CHOSEN[name])
    default = fj.algorithms.make(name, MODEL)
    for option, value in CHOSEN[name].items():
        assert fj.algorithms.make(name, MODEL, **{option: value}) is not default


@pytest.mark.parametrize("name", MERGED)
def test_an_option_of_one_method_reaches_no_other(name):
    told = tuple((f"{name}.{option}", value) for option, value in CHOSEN[name].items())
    plain, changed = (
        methods(Merging(tuple(MERGED), options=options), MODEL, batch_size=8)
        for options in ((), told)
    )
    differing = {other for other in MERGED if plain[other].clients is not changed[other].clients}
    assert differing == ({name} if told else set())


# Options of the clients' half of a method; all others are the server's, or training's.
SENT = {"batch_size", "max_examples", "received", "density", "drop", "last_epoch", "average"}
SENT |= {"authors_split", "alpha", "steps", "step_damping", "equal_traces"}


@pytest.mark.parametrize(("name", "option"), PAIRS)
def test_methods_share_updates_unless_they_differ_in_an_option_of_the_clients_half(name, option):
    told = ((f"{name}.{option}", CHOSEN[name][option]),)
    plain, changed = (
        methods(Merging((name,), options=options), MODEL, batch_size=8)[name]
        for options in ((), told)
    )
    assert (plain.sent == changed.sent) == (option not in SENT)


def test_different_methods_share_updates_too():
    made = methods(Merging(tuple(MERGED)), MODEL, batch_size=8)
    groups = gathered((own.sent, name) for name, own in made.items()).values()
    assert ["fisher_merge", "fedfisher_diag"] in groups
    assert ["fedfisher_kfac", "fedfisher_sequential", "fedfisher_sketched"] in groups
    assert ["fedlpa", "fedlpa_ea", "fedlpa_gd"] in groups
    assert ["fedavg", "fedprox", "task_arithmetic", "iso_c"] in groups


@pytest.fixture(scope="module")
def shown() -> str:
    """What --help shows of the options of all methods, without lines and frames."""
    said = io.StringIO()
    named = [*MERGED, "fedavg+dense", "fedov+student"]
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        one_shot.main(["--algorithms", *named, "--help"])
    return "".join(re.sub("[│─╭╮╰╯]", " ", said.getvalue()).split())


@pytest.mark.parametrize(("name", "option"), PAIRS)
def test_help_says_of_an_option_what_the_docstring_of_its_factory_does(shown, name, option):
    text = "".join(described(name)[option].split())
    kind = r"(,--[\w.-]+|(\{None\}\|)?(INT|FLOAT))"
    assert re.search(f"{re.escape(dashed(name, option))}{kind}{re.escape(text)}", shown)


def told(*words: str) -> Merging:
    return commands.read(words, "", "", config.one_shot).merging


@pytest.mark.long
def test_every_number_of_what_dense_is_made_of_reaches_it():
    numbers = {
        o: x for o, x in fj.algorithms.Distillation()._asdict().items() if type(x) is not bool
    }
    other = {o: x / 2 if type(x) is float else 2 * x for o, x in numbers.items()}
    words = [word for o, x in other.items() for word in (dashed("dense", o), str(x))]
    images = Images((8, 8, 1), False, None)
    for paper in ("fedfisher", "fedlpa"):
        plain = {"fedfisher": fj.algorithms.Distillation(), "fedlpa": FEDLPA_DISTILLATION}[paper]
        for chosen, how in ((words, plain._replace(**other)), ([], plain)):
            asked = told("--algorithms", "dense", "--distillation", paper, *chosen)
            made = methods(asked, MODEL, 8, images)["dense"].server(None)
            assert made is fj.algorithms.dense(MODEL, shape=(8, 8, 1), how=how)


def test_a_number_that_dense_cannot_be_made_of_is_refused_before_anything_is_trained():
    asked = told("--algorithms", "fedavg+dense", "--dense.images", "100")
    with pytest.raises(ValueError, match=r"batch_size is 256; expected a divisor of the 100"):
        methods(asked, MODEL, 8, Images((8, 8, 1), False, None))


@pytest.mark.long
def test_otfusion_chooses_by_validation_or_test_images_only_where_that_was_asked():
    test, judges = (fj.Examples(jnp.eye(2) * n, jnp.arange(2)) for n in (1, 2))
    images = Images((8, 8, 1), False, test)
    params = jnp.array([[2.0, -1.0], [1.0, 1.0]])

    def scores(*words):
        own = told("--algorithms", "otfusion", *words)
        server = methods(own, MODEL, 8, images)["otfusion"].server(judges)
        updates = {"params": jnp.stack([params, params]), "wiring": WIRES}
        sent = fj.algorithms.Update(updates, server.kind)
        return fj.merging.merge(server, params, sent)[2].scores

    def accuracy(examples):
        return fj.metrics.accuracy(MODEL, params, examples)

    assert scores() is None
    assert accuracy(test) == 0.5
    np.testing.assert_allclose(scores("--choose", "test"), accuracy(test))
    judges = judges._replace(targets=jnp.array([0, 0]))
    np.testing.assert_allclose(scores("--choose", "validation"), accuracy(judges))
    assert accuracy(judges) == 1.0
    assert scores("--choose", "validation", "--otfusion.no-fix-last-layer").shape == (4,)


def test_choices_that_cannot_be_made_are_refused_before_anything_is_trained():
    images = Images((8, 8, 1), False, None)
    asked = told("--algorithms", "otfusion", "--choose", "validation", "--otfusion.no-correction")
    with pytest.raises(ValueError, match=r"correction is False.*but a score selects"):
        methods(asked, MODEL, 8, images)
    asked = told("--algorithms", "otfusion", "--choose", "validation")
    with pytest.raises(ValueError, match="--choose is validation, expected last: otfusion"):
        methods(asked, MODEL, 8)
    with pytest.raises(ValueError, match="names dense, which learns from generated images of one"):
        methods(told("--algorithms", "dense"), MODEL, 8)


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        ("dense", fj.algorithms.Distillation),
        ("fedov", fj.algorithms.open_set),
        ("fedov", fj.algorithms.voting),
        ("student", fj.algorithms.distilled),
    ],
)
def test_help_says_of_a_number_what_the_docstring_does(shown, group, kind):
    head, numbers = ("Attributes:\n", []) if distils(group) else ("Args:\n", [])
    _, _, arguments = inspect.getdoc(inspect.unwrap(kind)).partition(head)
    found = re.split(r"^    (\w+): ", arguments.partition("\n\n")[0], flags=re.MULTILINE)[1:]
    said = dict(zip(found[::2], found[1::2], strict=True))
    for option, parameter in inspect.signature(inspect.unwrap(kind)).parameters.items():
        if parameter.annotation in (int, float, int | None, float | None):
            text = re.escape("".join(said[option].split()))
            line = rf"{re.escape(dashed(group, option))}(\{{None\}}\|)?(INT|FLOAT){text}"
            assert re.search(line, shown)
            numbers.append(option)
    assert numbers


def test_options_of_the_command_reach_the_methods_that_know_them():
    names = ("fedavg", "regmean", "fisher_merge", "fedfisher_diag", "fedlpa_ea", "fedfish")
    told = {"fedfisher_diag.damping": 0.25, "fedlpa_ea.damping": 0.125, "fedlpa_ea.balanced": True}
    told["fedprox.mu"] = 0.5
    merging = Merging((*names, "fedprox"), fisher_kind="sampled", options=tuple(told.items()))
    sampled, ea = fj.fisher.sampled, fj.algorithms.expectation_approximation()
    diagonal = {"fisher": fj.fisher.diagonal, "damping": 0.25}
    expected = {
        "fedavg": fj.algorithms.fedavg(),
        "regmean": fj.algorithms.regmean(MODEL),
        "fisher_merge": fj.algorithms.fisher_merge(MODEL, kind=sampled),
        "fedfisher_diag": fj.algorithms.fedfisher(MODEL, kind=sampled, **diagonal),
        "fedlpa_ea": fj.algorithms.fedlpa(MODEL, solver=ea, damping=0.125, balanced=True),
        "fedfish": fj.algorithms.fedfish(MODEL, batch_size=8),
        "fedprox": fj.algorithms.fedprox(mu=0.5),
    }
    made = methods(merging, MODEL, batch_size=8)
    assert list(made) == list(expected)
    assert all(made[name].clients is method for name, method in expected.items())


def test_those_that_train_their_own_clients_are_those_that_change_the_optimiser():
    base = optax.sgd(0.1)
    for name, method in methods(Merging(tuple(MERGED)), MODEL, batch_size=8).items():
        assert trains_its_own(name) == (method.clients.optimizer(base) is not base)
    assert not trains_its_own("ensemble")


def test_a_full_fisher_on_a_small_network_is_allowed():
    check_full(("fedfisher_full",), {"w": jax.ShapeDtypeStruct((100,), float)}, num_clients=5)


@pytest.mark.long
@pytest.mark.parametrize("compress", ["paper", "paper_ceiling", "water_filling"])
def test_compressed_uploads_have_the_bytes_of_the_weights(compress, key):
    names = ("fedavg", "regmean", "fedfisher_diag", "fedfisher_kfac")
    network = fj.networks.MLP((16, 16), 4)
    x, y = jax.random.normal(key, (12, 8)), jnp.arange(12) % 4
    params = fj.networks.init(network, key, x)
    model = fj.networks.model(network, params, fj.likelihoods.categorical)
    federation = fj.clients.federation((x, y), [range(6), range(6, 12)])
    clients = fj.training.Trained(jax.tree.map(lambda w: jnp.stack([w, w + 0.1]), params), params)
    weights = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    for name, method in methods(Merging(names, compress=compress), model, 6).items():
        sent = fj.merging.summarize(method.clients, clients, federation, key=key)
        found = fj.compression.size(sent) / 2
        tensors = 4 * 3 * len(jax.tree.leaves(params))  # a scale of each takes 4 bytes
        assert found <= weights + 2 * tensors, name
        merged, *_ = fj.merging.merge(method.server(None), params, sent, federation.weights)
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(merged)), name
        if name == "fedavg":
            assert found == weights
