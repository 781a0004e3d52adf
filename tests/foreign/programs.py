"""What is computed of a network: by a user's own program, and by the library.

Each program is a function of a `Case` that returns a pytree for each quantity. It is run twice:
as it is, and inside `jax.disable_jit()`, where `jax.jit` and the library's own compilation do
nothing and every operation runs by itself.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import fisherjax as fj
from tests.foreign import networks
from tests.foreign.cells import Cell
from tests.foreign.networks import Array, Network, Params

Quantities = dict[str, Any]

STEPS = 2  # of a scan
FEW = 8  # examples of the diagonal, whose own derivatives XLA computes slowly
RIDGE = 10.0  # so large that the solve has a small condition
FEWEST = 8  # examples of a client in programs of the library


class Case(NamedTuple):
    """A network and the data of a cell, and the devices over which they are spread, if any."""

    cell: Cell
    network: Network
    inputs: Array
    targets: Array
    mesh: jax.sharding.Mesh | None = None


def case(cell: Cell) -> Case:
    """Make the network and the data of a cell."""
    batch = int(cell.batch)
    number = STEPS * batch if cell.program == "scan" else batch
    if cell.program not in USERS_PROGRAMS:
        number = 2 * max(batch, FEWEST)
    inputs = networks.images(cell, number)
    return Case(cell, networks.build(cell), inputs, networks.labels(number))


def widened(case: Case) -> Case:
    """Return the same rounded numbers in float32, to which bfloat16 is compared."""

    def wide(x: Array) -> Array:
        return x.astype(jnp.float32)

    network = case.network._replace(params=jax.tree.map(wide, case.network.params))
    return case._replace(network=network, inputs=wide(case.inputs))


def run(case: Case) -> Quantities:
    """Run the program of a case."""
    return (USERS_PROGRAMS | LIBRARY_PROGRAMS)[case.cell.program](case)


def _spread(case: Case, tree: Any, axis: int = 0) -> Any:
    """Split arrays along an axis over the devices."""
    if case.mesh is None:
        return tree
    spec = PartitionSpec(*(None,) * axis, case.mesh.axis_names[0])
    return jax.device_put(tree, NamedSharding(case.mesh, spec))


def _on_devices(
    case: Case, function: Callable[..., Any], by_device: tuple[bool, ...]
) -> Callable[..., Any]:
    """Give every device its share of some arguments, by their first axis, and all of the others.

    Not left to the compiler: XLA divides the convolutions that derivatives of single examples
    become over devices wrongly (on each version of JAX from 0.7 to 0.12).
    """
    if case.mesh is None:
        return function
    axis = PartitionSpec(case.mesh.axis_names[0])
    specs = tuple(axis if own else PartitionSpec() for own in by_device)
    how = {"mesh": case.mesh, "in_specs": specs, "out_specs": axis, "check_vma": False}
    return jax.shard_map(function, **how)


def _loss(network: Network, params: Params, x: Array, y: Array) -> Array:
    """Compute half of the squared error, in float32: with integers its derivatives are exact."""
    z = network.apply(params, x).astype(jnp.float32)
    return jnp.square(z - jax.nn.one_hot(y, z.shape[-1])).sum() / 2


def outputs(case: Case) -> Quantities:
    """Compute the outputs alone, and all activations."""
    x, network = _spread(case, case.inputs), case.network
    return {
        "outputs": jax.jit(network.apply)(network.params, x),
        "activations": jax.jit(network.layers)(network.params, x),
    }


def grad(case: Case) -> Quantities:
    """Compute the loss and its gradient, and a derivative of the outputs along some change."""
    x, y = _spread(case, (case.inputs, case.targets))
    network = case.network

    def loss(params: Params, x: Array, y: Array) -> Array:
        return _loss(network, params, x, y)

    @jax.jit
    def along(params: Params, x: Array) -> tuple[Array, Array]:
        change = jax.tree.map(jnp.flip, params)
        return jax.jvp(network.apply, (params, x), (change, jnp.flip(x, -1)))

    value, gradient = jax.jit(jax.value_and_grad(loss))(network.params, x, y)
    return {"loss": value, "gradients": gradient, "jvp": along(network.params, x)}


def examples(case: Case) -> Quantities:
    """Compute the gradient of each example by itself."""

    def gradients(params: Params, x: Array, y: Array) -> Params:
        def one(x: Array, y: Array) -> Params:
            return jax.grad(lambda p: _loss(case.network, p, x[None], y[None]))(params)

        return jax.vmap(one)(x, y)

    own = jax.jit(_on_devices(case, gradients, by_device=(False, True, True)))
    return {"gradients of examples": own(case.network.params, case.inputs, case.targets)}


def scan(case: Case) -> Quantities:
    """Add up gradients of minibatches in a loop, and keep the outputs of each."""
    x = case.inputs.reshape(STEPS, int(case.cell.batch), *case.inputs.shape[1:])
    x, y = _spread(case, (x, case.targets.reshape(STEPS, int(case.cell.batch))), axis=1)
    network = case.network

    @jax.jit
    def over_minibatches(params: Params, x: Array, y: Array) -> tuple[Params, Array]:
        def step(total: Params, batch: tuple[Array, Array]) -> tuple[Params, Array]:
            gradient = jax.grad(lambda p: _loss(network, p, *batch))(params)
            return jax.tree.map(jnp.add, total, gradient), network.apply(params, batch[0])

        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), (x, y))

    gradient, values = over_minibatches(network.params, x, y)
    return {"outputs": values, "gradients": gradient}


def clients(case: Case) -> Quantities:
    """Map outputs and gradients over networks, one for each client, on the same inputs."""
    network = case.network
    scales = [1, -1, 2, 1, -2, 1]  # exact in bfloat16
    stacked = jax.tree.map(lambda w: jnp.stack([s * w for s in scales]), network.params)

    def of_each(stacked: Params, x: Array, y: Array) -> tuple[Array, Params]:
        def one(params: Params) -> tuple[Array, Params]:
            gradient = jax.grad(lambda p: _loss(network, p, x, y))(params)
            return network.apply(params, x), gradient

        return jax.vmap(one)(stacked)

    own = jax.jit(_on_devices(case, of_each, by_device=(True, False, False)))
    values, gradients = own(stacked, case.inputs, case.targets)
    return {"outputs": values, "gradients": gradients}


def factors(case: Case) -> Quantities:
    """Compute K-FAC factors and the diagonal of the Fisher information.

    K-FAC refuses grouped convolutions: those get a diagonal, as its documentation proposes.
    """
    few = fj.Examples(*_spread(case, (case.inputs[:FEW], case.targets[:FEW])))
    how = {"kind": fj.fisher.true, "batch_size": int(case.cell.batch)}
    diagonal = fj.fisher.diagonal(_fisher_model(case), case.network.params, few, **how)
    return {"factors": kfac(case), "diagonal": diagonal.entries}


def kfac(case: Case) -> Any:
    """Compute K-FAC factors."""
    data = fj.Examples(*_spread(case, (case.inputs, case.targets)))
    how = {"fallback": fj.fisher.diagonal, "batch_size": int(case.cell.batch)}
    how |= {"kind": fj.fisher.true}
    return fj.fisher.kfac(_fisher_model(case), case.network.params, data, **how)


def summaries(case: Case) -> Quantities:
    """Compute what clients send of the head, and the head that is solved from it."""
    params, key, how = case.network.params, jax.random.key(0), {"batch_size": int(case.cell.batch)}
    regmean = fj.algorithms.regmean(_model(case), **how)
    sent = fj.merging.summarize(regmean, [params] * 2, federation(case), key=key)
    (gram,) = (gram for name, gram in sent.values["grams"].items() if "head" in name)
    head = _exchange(case, fj.algorithms.analytic_head(_model(case), ridge=RIDGE, **how))
    sums = head.sent.values["head"]
    return {
        "gram matrices": gram,
        "head sums": (sums.inputs, sums.products),
        "analytic head": networks.canonical(case.cell, head.params)["head"],
    }


def exchanges(case: Case) -> Quantities:
    """Improve the model without training: new heads, and one natural-gradient step."""
    how = {"batch_size": int(case.cell.batch)}
    # Two dampings: the less there is, and the more directions nearly agree, the more the solves
    # multiply rounding.
    few = {"damping": (1.0, 0.1), "scales": (1.0,)}
    methods = {
        "head of largest evidence": fj.algorithms.analytic_head(_model(case), **how),
        "ccvr": fj.algorithms.ccvr(_model(case), draws=64, epochs=1, **how),
        "natural gradient": fj.algorithms.natural_gradient(_model(case), **few, **how),
    }
    return {name: _exchange(case, method).params for name, method in methods.items()}


def train(case: Case) -> Quantities:
    """Train clients, and evaluate what they were trained to."""
    model = _model(case)
    trained = fj.training.train(
        model,
        case.network.params,
        federation(case),
        key=jax.random.key(2),
        optimizer=OPTIMIZER,
        epochs=1,
        batch_size=int(case.cell.batch),
    )
    data, how = fj.Examples(case.inputs, case.targets), {"batch_size": int(case.cell.batch)}
    stacked = {"stacked": True, **how}
    return {
        "trained": trained.params,
        "loss": trained.loss,
        "logits": fj.metrics.logits(model, case.network.params, case.inputs, **how),
        "accuracy": fj.metrics.accuracy(model, trained.params, data, **stacked),
    }


OPTIMIZER = optax.sgd(0.01, 0.9)
USERS_PROGRAMS: dict[str, Callable[[Case], Quantities]] = {
    function.__name__: function for function in (outputs, grad, examples, scan, clients)
}
LIBRARY_PROGRAMS: dict[str, Callable[[Case], Quantities]] = {
    function.__name__: function for function in (factors, summaries, exchanges, train)
}


def _model(case: Case) -> fj.Model:
    return fj.Model(case.network.apply, fj.likelihoods.categorical)


def is_gaussian(case: Case) -> bool:
    """Whether outputs are means of Gaussians: of large integers a softmax leaves next to nothing.

    By the cell, whose reference is computed in float32.
    """
    return case.cell.dtype == "bfloat16"


def _fisher_model(case: Case) -> fj.Model:
    likelihood = fj.likelihoods.gaussian if is_gaussian(case) else fj.likelihoods.categorical
    return _model(case)._replace(likelihood=likelihood)


def federation(case: Case) -> fj.clients.Federation:
    """Give two clients the examples, some more to the first."""
    number = len(case.targets)
    rows = np.split(np.arange(number), [first_rows(number)])
    clients = fj.clients.federation((case.inputs, case.targets), rows)
    return clients if case.mesh is None else fj.clients.shard(clients)


def _exchange(case: Case, algorithm: Any) -> Any:
    """Play an exchange, and return its last message."""
    params, key = case.network.params, jax.random.key(1)
    *_, last = fj.merging.messages(algorithm, params, federation(case), key=key)
    return last


def first_rows(number: int) -> int:
    """Return how many of so many examples the first client has."""
    return number // 2 + 3
