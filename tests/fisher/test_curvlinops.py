"""Every Fisher against curvlinops', which computes the same sums in PyTorch (extra `bench`).

Params have PyTorch's shapes and order here too, so that whole matrices compare entry by entry. With
`reduction="sum"` curvlinops sums over examples where fisherjax averages: of its Kronecker factors
the input's is a mean and the output's a sum (`KFACLinearOperator._accumulate_gradient_covariance`).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fisherjax import Examples, Model, fisher, likelihoods

# torch 2.13 deprecates what linear_operator and its own forward mode still use.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


class Network(NamedTuple):
    """The same network on both sides."""

    modules: Callable  # of torch.nn
    apply: Callable  # of params in the order of those of the modules
    inputs: tuple[int, ...]


def dense(params, x):
    w, b, v = params
    return jnp.tanh(x @ w.T + b) @ v.T


def convolutional(params, x):
    first, bias, second, w, b = params
    y = jax.lax.conv_general_dilated(x, first, (2, 1), ((1, 1), (0, 0))) + bias[:, None, None]
    y = jax.lax.conv_general_dilated(jnp.tanh(y), second, (1, 1), "VALID")
    return jnp.tanh(y).reshape(len(x), -1) @ w.T + b


def pooled(params, x):
    return dense(params, x).mean(1)


def sequence(params, x):
    w, b, v = params
    return (jnp.tanh(x @ w.T + b).reshape(len(x), -1) @ v.T).reshape(len(x), 2, 3)


NETWORKS = {
    "dense": Network(
        lambda nn: [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)], dense, (4,)
    ),
    "convolutional": Network(
        lambda nn: [
            *(nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0)), nn.Tanh()),
            *(nn.Conv2d(3, 2, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)),
        ],
        convolutional,
        (2, 5, 4),
    ),
    "positions, pooled": Network(
        lambda nn: [
            *(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)),
            *(nn.AvgPool2d((2, 1)), nn.Flatten()),
        ],
        pooled,
        (2, 4),
    ),
    "sequence": Network(  # of 2 positions that interact
        lambda nn: [
            *(nn.Linear(4, 5), nn.Tanh(), nn.Flatten()),
            *(nn.Linear(10, 6, bias=False), nn.Unflatten(1, (2, 3))),
        ],
        sequence,
        (2, 4),
    ),
}
# MSELoss is |z - y|^2, twice our loss: 2 its Hessian, 4 its squared gradient.
LOSSES = {"categorical": ("CrossEntropyLoss", 1, 1), "gaussian": ("MSELoss", 2, 4)}
CASES = [
    *((name, likelihood) for name in NETWORKS if name != "sequence" for likelihood in LOSSES),
    ("sequence", "gaussian"),
]
TYPES = {fisher.true: "type-2", fisher.empirical: "empirical"}
NUM_EXAMPLES = 6


def both(name, likelihood):
    """Return the arguments of our Fishers, and `matrix(operator, kind, **options)` of theirs."""
    torch, curvlinops = pytest.importorskip("torch"), pytest.importorskip("curvlinops")
    network, (loss, hessian, square) = NETWORKS[name], LOSSES[likelihood]
    torch.manual_seed(0)
    net = torch.nn.Sequential(*network.modules(torch.nn)).double()
    weights, draw = list(net.parameters()), np.random.default_rng(0)
    params = [jnp.asarray(weight.detach().numpy()) for weight in weights]
    x = draw.normal(size=(NUM_EXAMPLES, *network.inputs))
    z = network.apply(params, jnp.asarray(x))
    np.testing.assert_allclose(net(torch.from_numpy(x)).detach().numpy(), z, rtol=1e-12)
    y = draw.normal(size=z.shape) if likelihood == "gaussian" else draw.integers(0, 3, NUM_EXAMPLES)
    batches = [(torch.from_numpy(x[b]), torch.from_numpy(y[b])) for b in ([0, 1, 2, 3], [4, 5])]

    def matrix(operator, kind, **options):
        sums = getattr(torch.nn, loss)(reduction="sum")
        of = getattr(curvlinops, operator)(net, sums, weights, batches, **options)
        scale = NUM_EXAMPLES * (hessian if kind is fisher.true else square)
        return (of @ torch.eye(of.shape[1]).double()).detach().numpy() / scale

    model = Model(network.apply, getattr(likelihoods, likelihood))
    return (model, params, Examples(jnp.asarray(x), jnp.asarray(y))), matrix


def assert_equal(ours, theirs):
    assert np.linalg.norm(ours - theirs) < 1e-12 * np.linalg.norm(theirs)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("name", "likelihood"), CASES)
def test_matrices_products_and_diagonals_equal_those_of_curvlinops(x64, name, likelihood, kind):
    if name == "sequence" and kind is fisher.empirical:
        pytest.skip("curvlinops squares the gradient of each position, not that of an example")
    arguments, matrix = both(name, likelihood)
    operator = "GGNLinearOperator" if kind is fisher.true else "EFLinearOperator"
    params, theirs = arguments[1], matrix(operator, kind)
    assert_equal(fisher.full(*arguments, kind=kind).dense(), theirs)
    assert_equal(fisher.diagonal(*arguments, kind=kind).dense(), np.diag(np.diag(theirs)))
    product = fisher.vector_product(*arguments, params, kind=kind)
    assert_equal(ravel_pytree(product)[0], theirs @ ravel_pytree(params)[0])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("name", "likelihood"), CASES)
def test_kronecker_factors_equal_those_of_curvlinops(x64, name, likelihood, kind, sharing):
    if name == "sequence" and kind is fisher.true:
        pytest.skip("curvlinops adds products of two positions, whose expectation is zero")
    arguments, matrix = both(name, likelihood)
    options = {"fisher_type": TYPES[kind], "kfac_approx": sharing}
    theirs = matrix("KFACLinearOperator", kind, **options, separate_weight_and_bias=False)
    ours = fisher.kfac(*arguments, kind=kind, sharing=getattr(fisher, sharing))
    assert not ours.entries
    assert_equal(ours.dense(), theirs)
