"""What is made of equal arguments is one object, so that nothing compiles for it again."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from fisherjax import (
    Examples,
    Model,
    algorithms,
    clients,
    fisher,
    likelihoods,
    merging,
    solvers,
)
from fisherjax._core.caching import by_value, cached, name_of
from fisherjax.training import Trained


def linear(params, x):
    return x @ params["w"]


MODEL = Model(linear, likelihoods.gaussian)
SAMPLED = {"kind": partial(fisher.sampled, num_samples=2)}

# Makers that give their arguments anew each time, as in a loop; each pair means the same.
EQUAL = {
    "no arguments": (algorithms.fedavg, algorithms.fedavg),
    "a default": (algorithms.fedprox, lambda: algorithms.fedprox(mu=1e-3)),
    "a keyword": (lambda: algorithms.fedprox(0.5), lambda: algorithms.fedprox(mu=0.5)),
    "an equal model": (
        lambda: algorithms.fedfisher(Model(linear, likelihoods.gaussian)),
        lambda: algorithms.fedfisher(MODEL),
    ),
    "an equal mask": (
        lambda: algorithms.regmean(MODEL._replace(mask=(("w", True),))),
        lambda: algorithms.regmean(Model(*MODEL[:2], mask={"w": True})),
    ),
    "a partial as kind": (
        lambda: algorithms.fedfisher(MODEL, kind=partial(fisher.sampled, num_samples=2)),
        lambda: algorithms.fedfisher(MODEL, **SAMPLED),
    ),
    "a partial as structure": (
        lambda: algorithms.fedfisher(MODEL, fisher=partial(fisher.kfac, fallback=fisher.zero)),
        lambda: algorithms.fedfisher(MODEL, fisher=partial(fisher.kfac, fallback=fisher.zero)),
    ),
    "a solver": (
        lambda: algorithms.fedlpa(MODEL, solver=solvers.conjugate_gradients(1e-6)),
        lambda: algorithms.fedlpa(MODEL, solver=solvers.conjugate_gradients(tolerance=1e-6)),
    ),
    "the table": (
        lambda: algorithms.make("fedfisher_diag", MODEL, **SAMPLED),
        lambda: algorithms.fedfisher(MODEL, fisher=fisher.diagonal, **SAMPLED),
    ),
    "a solver's default": (solvers.gradient_descent, lambda: solvers.gradient_descent(2000)),
}


@pytest.mark.parametrize("pair", EQUAL)
def test_equal_arguments_give_the_same_object(pair):
    left, right = EQUAL[pair]
    assert left() is left()
    assert left() is right()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (lambda: algorithms.fedprox(0.1), lambda: algorithms.fedprox(0.2)),
        (
            lambda: algorithms.fedfisher(MODEL, **SAMPLED),
            lambda: algorithms.fedfisher(MODEL, kind=partial(fisher.sampled, num_samples=3)),
        ),
        (
            lambda: algorithms.fedfisher(MODEL),
            lambda: algorithms.fedfisher(MODEL._replace(likelihood=likelihoods.bernoulli)),
        ),
        (
            lambda: algorithms.regmean(Model(*MODEL[:2], mask={"w": True})),
            lambda: algorithms.regmean(Model(*MODEL[:2], mask={"w": False})),
        ),
    ],
)
def test_other_arguments_give_another_object(left, right):
    assert left() is not right()


def test_what_is_refused_is_refused_whatever_was_made_before():
    """1, 1.0 and True are equal; only the first is a number of steps."""
    solvers.gradient_descent(steps=1)
    for wrong in (True, 1.0):
        with pytest.raises(ValueError, match="steps is"):
            solvers.gradient_descent(steps=wrong)
    algorithms.fedprox(mu=1.0)
    for _ in range(2):
        with pytest.raises(ValueError, match="mu is nan"):
            algorithms.fedprox(mu=float("nan"))


def test_arguments_that_cannot_be_hashed_make_an_object_each_time():
    made = []

    @cached
    def factory(values, scale=1):
        made.append(values)
        return [values, scale]

    assert factory([1, 2]) == factory(values=[1, 2]) == [[1, 2], 1]
    assert factory({"a": 1}, scale=jnp.ones(2))[0] == {"a": 1}
    assert len(made) == 3
    assert factory((1, 2)) is factory((1, 2))
    assert len(made) == 4


@pytest.mark.long
def test_traced_and_array_arguments_work(x64):
    """The damping may be what a function is differentiated by."""
    sent = {
        "params": {"w": jnp.array([[[1.0], [2.0]], [[3.0], [5.0]]])},
        "fisher": fisher.Diagonal({"w": jnp.array([[[1.0], [2.0]], [[3.0], [1.0]]])}),
    }

    def merged(damping):
        method = algorithms.fedfisher(MODEL, fisher=fisher.diagonal, damping=damping)
        sums = method.reduce(sent, jnp.array([0.5, 0.5]))
        return method.aggregate(None, sums, None, (), jnp.arange(2))[0]["w"]

    for damping in (jnp.array(0.3), np.float64(0.3), np.array(0.3)):
        np.testing.assert_allclose(merged(damping), merged(0.3), rtol=1e-12)
    np.testing.assert_allclose(jax.jit(merged)(0.3), merged(0.3), rtol=1e-9)


def test_a_wrong_call_is_told_as_python_tells_it():
    with pytest.raises(TypeError, match=r"fedprox\(\) got an unexpected keyword argument 'nu'"):
        algorithms.fedprox(nu=0.1)
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'model'"):
        algorithms.fedfisher()


def test_a_factory_keeps_its_name_and_documentation():
    assert algorithms.fedfisher.__name__ == "fedfisher"
    assert algorithms.fedfisher.__doc__.startswith("Make FedFisher")


# Partials by value


def f(*args, **kwargs):
    return args, kwargs


def test_partials_compare_by_what_they_hold_at_any_depth():
    def make(number, order=1):
        keywords = {"a": number, "b": partial(f, number)}
        return by_value(partial(f, partial(f, x=1), **dict(list(keywords.items())[::order])))

    assert make(2) == make(2) == make(2, order=-1)
    assert hash(make(2)) == hash(make(2, order=-1))
    assert make(2) != make(3)
    assert make(2) != by_value(partial(f))
    assert by_value(partial(f, 1)) != by_value(partial(linear, 1))
    assert len({make(2), make(2), make(3)}) == 2


def test_a_partial_by_value_calls_what_it_did():
    original = partial(f, 1, a=partial(f, 2))
    args, kwargs = by_value(original)(3, b=4)
    assert (args, kwargs.keys(), kwargs["b"]) == ((1, 3), {"a", "b"}, 4)
    assert kwargs["a"]() == ((2,), {})


@pytest.mark.parametrize("value", [1, "a", f, None, Partial(f, 1), [1]])
def test_what_is_no_partial_stays_as_it_is(value):
    assert by_value(value) is value


def test_a_partial_that_holds_what_cannot_be_hashed_stays_as_it_is():
    """It is told from others by its identity, as Python does; arrays in it still work as kind=."""
    plain = partial(f, jnp.ones(2))
    assert by_value(plain) is plain
    assert by_value(by_value(partial(f, 1))) == by_value(partial(f, 1))


def scaled_gaussian(likelihood, z, targets, key, scale):
    return scale * fisher.true(likelihood, z)


@pytest.mark.parametrize("scale", [2.0, np.float32(2), np.array(2.0), jnp.array(2.0)])
def test_kinds_may_hold_any_constants(scale):
    params, examples = {"w": jnp.ones((2, 1))}, Examples(jnp.array([[1.0, 2.0], [3.0, 0.0]]))
    plain = fisher.diagonal(MODEL, params, examples)
    kind = partial(scaled_gaussian, scale=scale)
    scaled = fisher.diagonal(MODEL, params, examples, kind=kind)
    chex.assert_trees_all_close(scaled, jax.tree.map(lambda x: 4 * x, plain), rtol=1e-6)
    algorithms.fedfisher(MODEL, kind=kind)


@pytest.mark.long
def test_an_algorithm_made_in_a_loop_compiles_once(key, compilations):
    trained = Trained({"w": jnp.ones((2, 2, 1))})
    federation = clients.federation((jnp.ones((5, 2)), jnp.ones((5, 1))), [[0, 1, 2], [3, 4]])

    def merged():
        model = Model(linear, likelihoods.gaussian)
        method = algorithms.fedfisher(model, kind=partial(fisher.sampled, num_samples=2))
        updates = merging.summarize(method, trained, federation, key=key)
        return merging.merge(method, {"w": jnp.zeros((2, 1))}, updates)

    first = merged()
    with compilations() as count:
        second = merged()
    assert count() == 0
    chex.assert_trees_all_equal(first, second)


# Names


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (fisher.kfac, "kfac"),
        (partial(fisher.sampled, num_samples=2), "sampled(num_samples=2)"),
        (by_value(partial(fisher.sampled, num_samples=2)), "sampled(num_samples=2)"),
        (partial(fisher.kfac, fallback=fisher.zero), "kfac(fallback=zero)"),
        (partial(partial(f, 1), b=2, a=partial(f, x=3)), "f(1, a=f(x=3), b=2)"),
    ],
)
def test_names_say_what_is_configured(function, name):
    assert name_of(function) == name


def test_the_cache_is_bounded():
    """A cached object keeps its model alive."""
    made = []
    factory = cached(lambda number: made.append(number))
    for number in (*range(1000), 0):
        factory(number)
    assert len(made) == 1001
