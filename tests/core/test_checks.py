"""Checks of arguments that the tests of those functions do not reach, and what they let pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import Examples, Model, algorithms, datasets, files, likelihoods
from fisherjax._core import checks, output_checks


def linear(params, x):
    return x @ params["w"]


PARAMS = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
MODEL = Model(linear, likelihoods.gaussian)
INPUTS = jnp.ones((5, 3))


# Numbers


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_of_any_library_are_counts(value):
    assert checks.count("steps", value) == 3
    assert type(checks.count("steps", value)) is int


@pytest.mark.parametrize("value", [0, -1, 1.0, True, np.True_, "3", None, jnp.ones(2, int)])
def test_what_is_no_count_is_named(value):
    with pytest.raises(ValueError, match=r"^steps is .*; expected an integer of at least 1\.$"):
        checks.count("steps", value)


@pytest.mark.parametrize("value", [0, 0.5, np.float32(0.5), np.array(0.5), jnp.array(0.5)])
def test_numbers_of_any_library_are_numbers(value):
    checks.number("damping", value)


SENTENCES = {
    checks.number: "a finite number, zero or more",
    checks.positive: "a positive number that is finite",
}


@pytest.mark.parametrize("value", ["0.5", None, 1j, np.ones(1), jnp.ones((1, 1)), [0.5]])
def test_what_is_no_number_is_named(value):
    for check, said in SENTENCES.items():
        with pytest.raises(TypeError, match=rf"damping is .*; expected {said}\.$"):
            check("damping", value)


@pytest.mark.parametrize("value", [-1e-9, np.nan, np.inf, -np.inf, jnp.array(jnp.nan)])
def test_numbers_below_zero_or_not_finite_are_refused(value):
    for check, said in SENTENCES.items():
        with pytest.raises(ValueError, match=rf"damping is .*; expected {said}\.$"):
            check("damping", value)


def test_bounds_are_said():
    checks.number("momentum", 0.0, below=1.0)
    with pytest.raises(ValueError, match=r"momentum is 1\.0; expected 0 <= momentum < 1\."):
        checks.number("momentum", 1.0, below=1.0)
    with pytest.raises(ValueError, match="alpha is 1; expected a finite number, at least 2"):
        checks.number("alpha", 1, low=2)
    with pytest.raises(ValueError, match="epsilon is 0; expected a positive number"):
        checks.positive("epsilon", 0)


def test_numbers_that_are_traced_pass():
    def check(value):
        checks.number("damping", value)
        checks.positive("damping", value)
        return value

    assert jax.jit(check)(-1.0) == -1
    assert jax.grad(check)(-1.0) == 1


# Names and functions


def test_the_nearest_name_is_suggested():
    near = r"Did you mean 'fedfisher_kfac', '\w+' or '\w+'\? All are in algorithms.METHODS"
    for name in ("fedfiser_kfac", "FedFisher_KFAC", "FEDFISHER-KFAC"):
        with pytest.raises(ValueError, match=f"algorithm is '{name}'; .*{near}"):
            algorithms.make(name, MODEL)
    with pytest.raises(ValueError, match=r"expected 'a' or 'b'\.$"):
        checks.one_of("letter", ["x"], "ab")


def test_the_nearest_three_are_those_of_fewest_changes_whatever_the_case():
    names = ["mnist", "FashionMNIST", "cifar10", "cifar100", "svhn"]
    assert checks.nearest("MNIST", names).startswith("'mnist', 'FashionMNIST' or ")
    assert checks.nearest("CIFAR-10", names).startswith("'cifar10', 'cifar100' or ")
    assert checks.nearest("fashionmnist", names).startswith("'FashionMNIST', 'mnist' or ")
    # There is an answer to anything, and to few names all of them.
    assert checks.nearest("", names).count("'") == 6
    assert checks.nearest(3, ["a"]) == "'a'"
    assert sorted(checks.nearest("b", "ab").split(" or ")) == ["'a'", "'b'"]


LOOK_UPS = {
    "options": (lambda: algorithms.options("Fedavg"), r"'fedavg', '\w+' or '\w+'\? All are in"),
    "a method that there is not": (
        lambda: algorithms.make("TIES", MODEL),
        r"expected one of \d+ names\. Did you mean '\w+', '\w+' or '\w+'\?",
    ),
    "an option": (
        lambda: algorithms.make("fedfisher_kfac", MODEL, Dampng=1.0),
        r"fedfisher_kfac has no option 'Dampng'\. Did you mean 'damping', '\w+' or '\w+'\? algor",
    ),
    "an option of none": (
        lambda: algorithms.make("fedavg", MODEL, mu=1.0),
        r"fedavg has no option 'mu'\. algorithms\.options\('fedavg'\) returns all",
    ),
    "a data set": (
        lambda: datasets.load("MINST"),
        r"'mnist', '\w+' or '\w+'\? All are in datasets\.NAMES",
    ),
    "a layer": (
        lambda: algorithms.fedper("Dens2").link.init_client({"dense1": {"k": 1.0}, "dense2": 1.0}),
        "No layer is called 'Dens2': did you mean 'dense2' or 'dense1'",
    ),
    "a leaf": (
        lambda: files.save_arrays("x.safetensors", {"dense": 1.0, "b": 2.0}, mapping={"Dens": "a"}),
        "For 'Dens', did you mean 'dense' or 'b'",
    ),
}


@pytest.mark.parametrize("what", LOOK_UPS)
def test_every_look_up_by_name_says_the_nearest_three_and_where_all_are(what):
    look_up, words = LOOK_UPS[what]
    with pytest.raises((ValueError, TypeError), match=words):
        look_up()


def test_a_function_is_asked_for_by_example():
    with pytest.raises(TypeError, match=r"solver is 3; expected a function such as closed_form\."):
        checks.function("solver", 3, "closed_form")


# Params


def test_leaves_that_are_not_floating_are_named():
    checks.floating(PARAMS)
    checks.floating({"w": 1.0, "b": np.ones(2, np.float16), "c": jnp.ones(2, jnp.bfloat16)})
    with pytest.raises(TypeError, match="'count' of params has dtype int32"):
        checks.floating(PARAMS | {"count": jnp.ones((), int)})
    with pytest.raises(TypeError, match="'flag' of start is a bool"):
        checks.floating(PARAMS | {"flag": True}, "start")
    with pytest.raises(ValueError, match="params has no leaves"):
        checks.floating({})


def test_a_leaf_without_the_axis_of_clients_is_named():
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), PARAMS)
    checks.stacked(stacked, 4)
    for bad in (jnp.ones((3, 2)), jnp.ones(())):
        with pytest.raises(ValueError, match=r"'w' of the stacked params has shape \(.* 4 clients"):
            checks.stacked(stacked | {"w": bad}, 4)


# Models


def test_models_of_equal_parts_are_equal_whatever_made_the_mask():
    mask = {"w": True, "b": False}
    model = Model(linear, likelihoods.gaussian, mask=mask)
    others = [Model(*model), MODEL._replace(mask=mask), MODEL._replace(mask=model.mask)]
    for other in others:
        assert other == model
        assert hash(other) == hash(model)
        assert checks.mask(other, PARAMS) == (False, True)
    assert checks.mask(MODEL, PARAMS) == (True, True)
    assert MODEL not in others


@pytest.mark.parametrize("params", [{"w": 1.0}, [1.0, 2.0], {"w": {"x": 1.0}, "b": 2.0}])
def test_a_mask_is_of_one_structure(params):
    with pytest.raises(ValueError, match=r"mask has leaves \['b', 'w'\]; expected .* each leaf"):
        checks.mask(Model(*MODEL[:2], mask={"w": True, "b": False}), params)


def test_what_trains_a_network_must_be_a_function():
    with pytest.raises(TypeError, match=r"apply_train is 3; .* apply_train\(params, inputs, key"):
        checks.model(MODEL._replace(apply_train=3))


TRAINS = {
    "no pair": (lambda p, x, key, w: linear(p, x), r"returned a \w+; expected a pair \(outputs"),
    "no new": (lambda p, x, key, w: (linear(p, x),), "expected a pair"),
    "mean outputs": (
        lambda p, x, key, w: (linear(p, x).mean(0), None),
        r"outputs of shape \(2,\); expected \(4, 2\), as apply does",
    ),
    "no array": (lambda p, x, key, w: (None, None), "outputs of shape None"),
    "a part of params": (
        lambda p, x, key, w: (linear(p, x), {"w": p["w"]}),
        r"new leaves \{'w': \(3, 2\)\}; expected None, or those of params, \{'b': ",
    ),
    "old arguments": (lambda p, x, key: (linear(p, x), None), "apply_train failed .*TypeError"),
}


@pytest.mark.parametrize("fault", TRAINS)
def test_what_apply_train_returns_is_checked_before_anything_is_compiled(fault):
    apply_train, words = TRAINS[fault]
    with pytest.raises(ValueError, match=words):
        output_checks.train_outputs(MODEL._replace(apply_train=apply_train), PARAMS, INPUTS, 4)


def test_a_network_that_fails_is_told_with_the_inputs_it_got():
    with pytest.raises(ValueError, match=r"apply failed on inputs of shape \(5, 3\) and dtype"):
        output_checks.outputs(MODEL, {"w": jnp.ones((4, 2))}, INPUTS)
    with pytest.raises(ValueError, match=r"apply returned .*; expected outputs \[B, C\]"):
        output_checks.outputs(Model(lambda p, x: x.sum(), likelihoods.gaussian), PARAMS, INPUTS)


def test_an_operation_that_is_not_implemented_is_said_whoever_left_it_out():
    def unfinished(params, x):
        raise NotImplementedError("later")

    words = r"\(NotImplementedError: later\).* JAX, or the network itself, does not implement"
    with pytest.raises(ValueError, match=words):
        output_checks.outputs(Model(unfinished, likelihoods.gaussian), PARAMS, INPUTS)


# Examples


@pytest.mark.parametrize(
    ("examples", "error", "words"),
    [
        ((INPUTS, None), TypeError, r"a tuple; expected fisherjax\.Examples\(inputs, targets\)"),
        (
            Examples(jnp.ones(())),
            TypeError,
            r"inputs is .*; expected an array with an axis",
        ),
        (Examples(INPUTS, indices=[0, 1]), TypeError, "indices is a list; expected an array"),
        (Examples(INPUTS, weights=0.5), TypeError, "weights is a float; expected an array"),
        (
            Examples(INPUTS, indices=jnp.arange(2), weights=jnp.ones(5)),
            ValueError,
            r"shape \(5,\); expected \(2,\)",
        ),
    ],
)
def test_what_are_no_examples_is_refused(examples, error, words):
    with pytest.raises(error, match=words):
        checks.examples(examples)


def test_values_that_are_traced_pass():
    def check(indices, weights):
        checks.examples(Examples(INPUTS, indices=indices, weights=weights))
        return weights

    bad = jnp.array([0, 99]), jnp.array([-1.0, jnp.nan])
    assert jax.jit(check)(*bad).shape == (2,)
    with pytest.raises(ValueError, match="weights run from nan"):
        check(*bad)
    assert not checks.is_traced(*bad)
