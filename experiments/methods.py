"""Which functions of the library an algorithm's name stands for."""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.tree_util import Partial

import fisherjax as fj
from experiments.config import Config
from fisherjax.aggregation import Aggregator
from fisherjax.typing import Apply, Array, Params

_KINDS = {
    "true": fj.fisher.true,
    "sampled": fj.fisher.sampled,
    "empirical": fj.fisher.empirical,
}
_STRUCTURES = {
    "fedfisher_diag": fj.fisher.diagonal,
    "fedfisher_kfac": fj.fisher.kfac,
    "fedfisher_full": fj.fisher.full,
}
_FULL_LIMIT = 4e9  # bytes of all clients' full Fisher matrices together


class Method(NamedTuple):
    """One algorithm, ready for many runs.

    Attributes:
        clients: its `summarize` is the clients' half. Methods with equal `clients` need the same
            updates, which are computed once; it is the same object in all runs, so that nothing
            compiles twice.
        server: `(validation images, labels) -> aggregator`, whose other half merges the updates.
        restraint: `initial params -> options of fj.training.train`, of an algorithm that trains its
            own clients; None for those that merge the same ones.
    """

    clients: Aggregator
    server: Callable[[Array, Array], Aggregator]
    restraint: Callable[[Params], dict[str, Any]] | None = None


def methods(config: Config, apply: Apply) -> dict[str, Method]:
    """Make the algorithms of an experiment.

    Args:
        config: names them, and the kind of Fisher, the dampings and the solver.
        apply: `(params, inputs [B, ...]) -> outputs [B, C]`.

    Returns:
        A method for each name.
    """
    likelihood, kind = fj.likelihoods.categorical, _KINDS[config.fisher_kind]
    damping = None if config.damping == "default" else config.damping

    def fedfisher(name: str) -> Method:
        make = partial(
            fj.aggregation.fedfisher,
            apply,
            likelihood,
            fisher=_STRUCTURES[name],
            kind=kind,
            damping=damping,
        )
        if config.solver == "adam":
            inside = name != "fedfisher_diag"
            return Method(make(), lambda x, y: make(solver=validated_adam(apply, x, y, inside)))
        return _alone(make(solver=fj.solvers.gradient_descent() if config.solver == "gd" else None))

    ready = {name: fedfisher(name) for name in config.algorithms if name in _STRUCTURES}
    if "fedavg" in config.algorithms:
        ready["fedavg"] = _alone(fj.aggregation.fedavg())
    if "regmean" in config.algorithms:
        ready["regmean"] = _alone(fj.aggregation.regmean(apply))
    if "fisher_merge" in config.algorithms:
        method = _alone(fj.aggregation.fisher_merge(apply, likelihood, kind=kind))
        if "fedfisher_diag" in ready:  # its clients send the same
            method = method._replace(clients=ready["fedfisher_diag"].clients)
        ready["fisher_merge"] = method
    if "fedfish" in config.algorithms:
        squares = {"batch_size": config.batch_size}
        ready["fedfish"] = _alone(fj.aggregation.fedfish(apply, likelihood, **squares))
    ready |= _fedlpa(config, apply) | _niid_bench(config)
    return {name: ready[name] for name in config.algorithms}


def _fedlpa(config: Config, apply: Apply) -> dict[str, Method]:
    """Make FedLPA with each solver; their clients send the same."""
    make = partial(
        fj.aggregation.fedlpa,
        apply,
        fj.likelihoods.categorical,
        damping=config.fedlpa_damping,
        balanced=config.fedlpa_balanced,
    )
    solvers = {
        "fedlpa": None,
        "fedlpa_ea": fj.solvers.expectation_approximation(),
        "fedlpa_gd": fj.solvers.residual_descent(),
    }
    clients = make()
    return {
        name: _alone(make(solver=solver))._replace(clients=clients)
        for name, solver in solvers.items()
    }


def _niid_bench(config: Config) -> dict[str, Method]:
    """Make the algorithms that FedLPA is compared with."""
    steps = {"epochs": config.epochs, "batch_size": config.batch_size}
    scaffold = fj.aggregation.scaffold(config.num_clients, **steps)
    return {
        "fednova": _alone(fj.aggregation.fednova(**steps, momentum=config.momentum)),
        "fedprox": _alone(fj.aggregation.fedavg())._replace(
            restraint=lambda _: {"proximal": config.mu}
        ),
        "scaffold": _alone(scaffold)._replace(
            restraint=lambda params: {"correction": scaffold.init(params).correction}
        ),
    }


def validated_adam(
    apply: Apply, inputs: Array, targets: Array, epsilon_inside_root: bool
) -> fj.solvers.Solver:
    """Make the paper's Adam, which keeps the iterate that is best on validation data.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, C]`.
        inputs: validation images [n, ...].
        targets: their labels [n].
        epsilon_inside_root: the authors put it inside for K-FAC and outside for the diagonal.

    Returns:
        The solver; others made with the same `apply` and shapes share its compiled program.
    """
    return fj.solvers.paper_adam(
        epsilon_inside_root=epsilon_inside_root,
        # The images are data of the score, not constants of the program.
        score=Partial(_score(apply), inputs, targets),
    )


def check_full(config: Config, params: Params) -> None:
    """Refuse full Fisher matrices that would not fit into memory.

    Args:
        config: names the algorithms.
        params: one model, d numbers.

    Raises:
        ValueError: if M d^2 numbers are too many.
    """
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    matrix = 4.0 * size**2
    if "fedfisher_full" in config.algorithms and config.num_clients * matrix > _FULL_LIMIT:
        raise ValueError(
            f"--algorithms fedfisher_full needs a matrix of {size} x {size} numbers for each of "
            f"{config.num_clients} clients, {config.num_clients * matrix / 1e9:.3g} GB; expected "
            f"at most {_FULL_LIMIT / 1e9:g} GB. Use fedfisher_kfac, or a smaller network"
        )


def _alone(aggregator: Aggregator) -> Method:
    return Method(aggregator, lambda *_: aggregator)


@functools.cache
def _score(apply: Apply) -> Callable[..., Array]:
    """Return `(inputs, targets, params) -> accuracy`, the same object for the same `apply`."""

    def accuracy(inputs: Array, targets: Array, params: Params) -> Array:
        return fj.metrics.accuracy(apply, params, inputs, targets)

    return accuracy
