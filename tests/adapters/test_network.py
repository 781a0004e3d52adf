"""Networks with adapters: their outputs, their training, and the memory of their base."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax.adapters import Adapter

SIZES = {"in": (5, 6), "out.weight": (3, 6)}  # the second kernel as PyTorch stores it


def apply(params, inputs):
    """A network with a jitted and a rematerialised part, a transpose and a looked up row."""
    hidden = jnp.tanh(jax.jit(jnp.matmul)(inputs, params["in"]))
    head = jax.checkpoint(lambda w, x: x @ w.T + params["bias"])
    return head(params["out.weight"], hidden) + params["in"][0, :3]


MODEL = fj.Model(apply, fj.likelihoods.gaussian)
BASE = {
    name: np.random.default_rng(0).normal(size=shape).astype("float32")
    for name, shape in (SIZES | {"bias": (3,)}).items()
}
X = np.random.default_rng(1).normal(size=(4, 2, 5)).astype("float32")


def with_adapters():
    """Return the network and params of which every factor is drawn."""
    key = jax.random.key(0)
    first, start = fj.adapters.attach(MODEL, BASE, ["in"], rank=2, alpha=4, key=key)
    _, second = fj.adapters.attach(
        MODEL, BASE, ["out.weight"], rank=3, alpha=1, transposed=True, key=key
    )
    source = np.random.default_rng(2)
    drawn = {
        name: Adapter(x.a, source.normal(size=x.b.shape).astype("float32"), x.scale)
        for name, x in (start["adapters"] | second["adapters"]).items()
    }
    return first, {"base": BASE, "adapters": drawn}


def written_out(params):
    """The changed kernels in NumPy, in the layout of each."""
    one, two = params["adapters"]["in"], params["adapters"]["out.weight^T"]
    return params["base"] | {
        "in": BASE["in"] + 4 / 2 * np.asarray((one.b @ one.a).T),
        "out.weight": BASE["out.weight"] + 1 / 3 * np.asarray(two.b @ two.a),
    }


def test_outputs_are_those_of_the_changed_kernels():
    model, params = with_adapters()
    expected = written_out(params)
    found = fj.adapters.merged(params)
    for name in BASE:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(model.apply(params, X), apply(expected, X), rtol=2e-5, atol=1e-5)


def test_adapters_begin_at_the_base_and_read_its_inputs():
    key = jax.random.key(3)
    model, start = fj.adapters.attach(
        MODEL, BASE, lambda name: name in SIZES, rank={"in": 2, "out.weight": 1}, key=key
    )
    np.testing.assert_array_equal(model.apply(start, X), apply(BASE, X))
    made = start["adapters"]
    assert made["in"].a.shape == (2, 5)
    # Taken as [inputs, outputs], which the names say.
    assert made["out.weight"].a.shape == (1, 3)
    assert jnp.abs(made["in"].a).max() <= 5**-0.5
    assert not made["in"].b.any()
    trained = fj.leaves.trained(model, start)
    assert fj.tree.names(trained) == (
        *("adapters/in/a", "adapters/in/b", "adapters/out.weight/a", "adapters/out.weight/b"),
    )
    assert fj.adapters.dense(MODEL, start).mask == (
        ("bias", False),
        ("in", True),
        ("out.weight", True),
    )


def test_a_product_forms_no_changed_kernel():
    """Under vmap over clients, no array has the clients' axis and the size of a kernel."""
    big = fj.Model(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], fj.likelihoods.gaussian)
    base = {"w": np.ones((40, 50), "f4"), "v": np.ones((50, 40), "f4")}
    model, start = fj.adapters.attach(big, base, base, rank=2, key=jax.random.key(0))
    clients = jax.tree.map(lambda x: jnp.stack([x] * 7), start["adapters"])

    def loss(adapters, x):
        return jnp.square(model.apply({"base": base, "adapters": adapters}, x)).sum()

    program = jax.make_jaxpr(jax.vmap(jax.grad(loss, allow_int=True), (0, None)))(
        clients, np.ones((3, 40), "f4")
    )
    sizes = [v.aval.size for equation in program.eqns for v in equation.outvars]
    # The largest is of all clients' factors or activations.
    assert max(sizes) < 40 * 50
    assert max(sizes) >= 7 * 2 * 50


@pytest.mark.long
def test_clients_side_by_side_hold_the_base_once():
    """Bytes of the compiled training: arguments, results and temporary arrays."""
    size = 256
    big = fj.Model(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], fj.likelihoods.gaussian)
    base = {name: np.zeros((size, size), "f4") for name in "wv"}
    model, start = fj.adapters.attach(big, base, base, rank=2, key=jax.random.key(0))
    x, all_of_it = np.zeros((8, size), "f4"), 2 * 4 * size**2
    clients = fj.clients.federation((x, x), [[i] for i in range(8)])
    how = {"key": jax.random.key(0), "optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 1}
    need = fj.training.train_memory(model, start, clients, **how, clients_per_chunk=8)
    assert all_of_it < need.resident < 1.3 * all_of_it
    assert need.scratch < all_of_it
    dense = fj.adapters.dense(big, start)
    need = fj.training.train_memory(dense, base, clients, **how, clients_per_chunk=8)
    assert need.resident > 8 * all_of_it


def test_training_is_gradient_descent_on_the_factors():
    """Two steps on a linear model, written out: the gradient of V = W + s (B A)^T, projected."""
    source = np.random.default_rng(4)
    x, y = source.normal(size=(6, 4)), source.normal(size=(6, 3))
    base = source.normal(size=(4, 3))
    linear = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
    model, start = fj.adapters.attach(
        linear, {"w": base.astype("f4")}, ["w"], rank=2, alpha=6, key=jax.random.key(5)
    )
    clients = fj.clients.federation((x.astype("f4"), y.astype("f4")), [np.arange(6)])
    trained = fj.training.train(
        *(model, start, clients),
        key=jax.random.key(6),
        optimizer=optax.sgd(0.05),
        epochs=2,
        batch_size=6,
    )
    a, b, scale = np.asarray(start["adapters"]["w"].a, np.float64), np.zeros((3, 2)), 3.0
    for _ in range(2):
        # The gradient of half the mean squared error with respect to V [inputs, outputs].
        gradient = x.T @ (x @ (base + scale * (b @ a).T) - y) / len(x)
        a, b = a - 0.05 * scale * b.T @ gradient.T, b - 0.05 * scale * gradient.T @ a.T
    found = trained.params["adapters"]["w"]
    np.testing.assert_allclose(found.a[0], a, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.b[0], b, rtol=1e-5, atol=1e-6)
    assert trained.frozen["adapters"]["w"].scale == 3.0
    np.testing.assert_array_equal(trained.frozen["base"]["w"], base.astype("f4"))


def test_a_network_with_statistics_returns_those_of_the_base():
    def apply_train(params, inputs, key, weights):
        return inputs @ params["w"], params | {"mean": params["mean"] + 1}

    network = fj.Model(lambda p, x: x @ p["w"] - p["mean"], fj.likelihoods.gaussian, apply_train)
    base = {"w": np.eye(3, dtype="f4"), "mean": np.zeros(3, "f4")}
    model, start = fj.adapters.attach(network, base, ["w"], rank=1, key=jax.random.key(0))
    changed = start | {
        "adapters": {"w": Adapter(np.ones((1, 3), "f4"), np.ones((3, 1), "f4"), 1.0)}
    }
    outputs, new = model.apply_train(changed, np.ones((2, 3), "f4"), None, None)
    np.testing.assert_array_equal(outputs, np.full((2, 3), 4.0))
    np.testing.assert_array_equal(new["base"]["w"], base["w"])
    np.testing.assert_array_equal(new["base"]["mean"], np.ones(3))
    kinds = dict(
        zip(fj.tree.names(start), fj.leaves.kinds(model, start, np.ones((2, 3), "f4")), strict=True)
    )
    assert kinds["base/mean"] == "statistics"
    assert kinds["base/w"] == "frozen"


def test_targets_that_cannot_be_adapted_are_named():
    for targets, words in (
        (["im"], "selects .'im'. of the leaves"),
        (lambda name: False, "selects .. of the leaves"),
        (["bias"], "'bias' has shape .3,.; expected a matrix"),
    ):
        with pytest.raises(ValueError, match=words):
            fj.adapters.attach(MODEL, BASE, targets, rank=1, key=jax.random.key(0))
    for wrong, words in (({"rank": 0}, "rank is 0"), ({"alpha": 0}, "alpha is 0")):
        with pytest.raises(ValueError, match=words):
            fj.adapters.attach(MODEL, BASE, ["in"], **{"rank": 1, "key": jax.random.key(0)} | wrong)
