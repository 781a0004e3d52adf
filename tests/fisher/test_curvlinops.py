"""Every Fisher against curvlinops', which computes the same sums in PyTorch (extra `bench`).

Params have PyTorch's shapes and order here too, so that whole matrices compare entry by entry. With
`reduction="sum"` curvlinops sums over examples where fisherjax averages: of its Kronecker factors
the input's is a mean and the output's a sum (`KFACLinearOperator._accumulate_gradient_covariance`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fisherjax import Examples, Model, fisher, likelihoods

# torch 2.13 deprecates what its own forward mode and curvlinops' linear_operator use.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


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
    """Map 2 positions that interact to 2 positions of 3 outputs."""
    w, b, v = params
    return (jnp.tanh(x @ w.T + b).reshape(len(x), -1) @ v.T).reshape(len(x), 2, 3)


def modules(nn):
    """Return the same networks as modules of torch.nn."""
    two = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)]
    first, second = nn.Conv2d(2, 3, (3, 2), (2, 1), (1, 0)), nn.Conv2d(3, 2, 2, bias=False)
    return {
        dense: two,
        convolutional: [first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)],
        pooled: [*two, nn.AvgPool2d((2, 1)), nn.Flatten()],
        sequence: [*two[:2], nn.Flatten(), nn.Linear(10, 6, bias=False), nn.Unflatten(1, (2, 3))],
    }


INPUTS = {dense: (6, 4), convolutional: (6, 2, 5, 4), pooled: (6, 2, 4), sequence: (6, 2, 4)}
# MSELoss is |z - y|^2, twice our loss: 2 is the scale of its Hessian, 4 of its squared gradient.
LOSSES = {
    "categorical": (
        *("CrossEntropyLoss", {fisher.true: 1, fisher.empirical: 1}),
        lambda draw, z: draw.integers(0, 3, len(z)),
    ),
    "gaussian": (
        *("MSELoss", {fisher.true: 2, fisher.empirical: 4}),
        lambda draw, z: draw.normal(size=z.shape),
    ),
}
NETWORKS = [
    *((dense, "categorical"), (dense, "gaussian")),
    *((convolutional, "categorical"), (pooled, "gaussian")),
]
CASES = [(*network, kind) for network in NETWORKS for kind in (fisher.true, fisher.empirical)]


def both(apply, name, kind):
    """Return the arguments of our Fishers, and `matrix(operator, **options)` of theirs."""
    torch, curvlinops = pytest.importorskip("torch"), pytest.importorskip("curvlinops")
    torch.manual_seed(0)
    net = torch.nn.Sequential(*modules(torch.nn)[apply]).double()
    weights, draw = list(net.parameters()), np.random.default_rng(0)
    params = [jnp.asarray(weight.detach().numpy()) for weight in weights]
    x = draw.normal(size=INPUTS[apply])
    z = apply(params, jnp.asarray(x))
    np.testing.assert_allclose(net(torch.from_numpy(x)).detach().numpy(), z, rtol=1e-12)
    loss, scales, targets = LOSSES[name]
    y = targets(draw, z)
    batches = [(torch.from_numpy(x[b]), torch.from_numpy(y[b])) for b in ([0, 1, 2, 3], [4, 5])]

    def matrix(operator, **options):
        sums = getattr(torch.nn, loss)(reduction="sum")
        of = getattr(curvlinops, operator)(net, sums, weights, batches, **options)
        return (of @ torch.eye(of.shape[1]).double()).detach().numpy() / (len(x) * scales[kind])

    model = Model(apply, getattr(likelihoods, name))
    return (model, params, Examples(jnp.asarray(x), jnp.asarray(y))), matrix


def assert_equal(ours, theirs):
    assert np.linalg.norm(ours - theirs) < 1e-12 * np.linalg.norm(theirs)


# The empirical one of sequences there has the gradients of positions, not those of examples.
@pytest.mark.parametrize(("apply", "name", "kind"), [*CASES, (sequence, "gaussian", fisher.true)])
def test_matrices_products_and_diagonals_equal_those_of_curvlinops(x64, apply, name, kind):
    arguments, matrix = both(apply, name, kind)
    theirs = matrix("GGNLinearOperator" if kind is fisher.true else "EFLinearOperator")
    assert_equal(fisher.full(*arguments, kind=kind).dense(), theirs)
    assert_equal(fisher.diagonal(*arguments, kind=kind).dense(), np.diag(np.diag(theirs)))
    params = arguments[1]
    product = fisher.vector_product(*arguments, params, kind=kind)
    assert_equal(ravel_pytree(product)[0], theirs @ ravel_pytree(params)[0])


# The exact one of sequences there has products of two positions, whose expectation is zero.
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("apply", "name", "kind"), [*CASES, (sequence, "gaussian", fisher.empirical)]
)
def test_kronecker_factors_equal_those_of_curvlinops(x64, apply, name, kind, sharing):
    arguments, matrix = both(apply, name, kind)
    fisher_type = "type-2" if kind is fisher.true else "empirical"
    options = {"fisher_type": fisher_type, "kfac_approx": sharing}
    theirs = matrix("KFACLinearOperator", **options, separate_weight_and_bias=False)
    ours = fisher.kfac(*arguments, kind=kind, sharing=getattr(fisher, sharing))
    assert not ours.entries
    assert_equal(ours.dense(), theirs)
