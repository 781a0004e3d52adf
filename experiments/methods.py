"""Methods by their names: those of the library's table, with the options of the command."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.tree_util import Partial

import fisherjax as fj
from experiments.config import Config
from fisherjax.algorithms import TABLE, Algorithm
from fisherjax.typing import Array, Examples, Model, Params

_KINDS = {
    "true": fj.fisher.true,
    "sampled": fj.fisher.sampled,
    "empirical": fj.fisher.empirical,
}
_FULL_LIMIT = 4e9  # bytes of all clients' full Fisher matrices together
_ANY_OPTIMIZER = optax.identity()


class Method(NamedTuple):
    """One algorithm, ready for many runs.

    Attributes:
        clients: how clients train, and what they send. It is the same object in all runs, so that
            nothing compiles twice. Methods with equal `sent` need the same updates of the same
            clients, which are computed once.
        server: `validation images -> algorithm`, which merges the updates.
    """

    clients: Algorithm
    server: Callable[[Examples], Algorithm]

    @property
    def sent(self) -> Any:
        """What tells updates apart."""
        return self.clients if self.clients.kind == "unnamed" else self.clients.kind


def methods(config: Config, model: Model) -> dict[str, Method]:
    """Make the algorithms of an experiment.

    Args:
        config: names them, and has their options.
        model: the network.

    Returns:
        A method for each name.
    """
    return {name: _method(config, model, name) for name in config.algorithms}


def _method(config: Config, model: Model, name: str) -> Method:
    known = fj.algorithms.options(name)
    asked = {k: v for k, v in _asked(config, name).items() if k in known}
    make = functools.partial(fj.algorithms.make, name, model, **asked)
    if "solver" not in known or _is(name, fj.algorithms.fedlpa) or config.solver == "cg":
        return _alone(make())
    if config.solver == "gd":
        return _alone(make(solver=fj.solvers.gradient_descent()))
    inside = known.get("fisher") is not fj.fisher.diagonal
    return Method(make(), lambda images: make(solver=validated_adam(model, images, inside)))


def _asked(config: Config, name: str) -> dict[str, Any]:
    """Give the options of the command that a method may know, by their names in the library."""
    if _is(name, fj.algorithms.fedlpa):  # its labels are the data's, and its damping is absolute
        return {"damping": config.fedlpa_damping, "balanced": config.fedlpa_balanced}
    asked = {"kind": _KINDS[config.fisher_kind], "mu": config.mu}
    if config.damping != "default":
        asked["damping"] = config.damping
    # Where a pass only takes means, of Fisher or Gram matrices, minibatches change its time alone.
    if "kind" not in fj.algorithms.options(name) and not _is(name, fj.algorithms.regmean):
        asked["batch_size"] = config.batch_size
    return asked


def _is(name: str, factory: Callable[..., Algorithm]) -> bool:
    made_by = TABLE[name].factory
    return getattr(made_by, "func", made_by) is factory


def trainings(algorithms: Sequence[str]) -> int:
    """Count how often the clients of an experiment train.

    Args:
        algorithms: their names.

    Returns:
        Once as they are, and once more for every way in which algorithms change it.

    Example:
        >>> trainings(["fedavg", "regmean", "fedprox", "fednova"])
        3
    """
    return len({_ANY_OPTIMIZER, *map(_optimizer, algorithms)})


def trains_its_own(algorithm: str) -> bool:
    """Say whether an algorithm changes how clients train; False for what is no algorithm.

    Example:
        >>> trains_its_own("scaffold"), trains_its_own("fedavg"), trains_its_own("ensemble")
        (True, False, False)
    """
    return algorithm in TABLE and _optimizer(algorithm) != _ANY_OPTIMIZER


def _optimizer(algorithm: str) -> optax.GradientTransformation:
    model = Model(_outputs, fj.likelihoods.categorical)  # any
    return fj.algorithms.make(algorithm, model).optimizer(_ANY_OPTIMIZER)


def _outputs(params: Params, inputs: Array) -> Array:
    return inputs @ params


def validated_adam(model: Model, images: Examples, epsilon_inside_root: bool) -> fj.solvers.Solver:
    """Make the paper's Adam, which keeps the iterate that is best on validation data.

    Args:
        model: the network.
        images: validation images [n, ...] and their labels.
        epsilon_inside_root: the authors put it inside for K-FAC and outside for the diagonal.

    Returns:
        The solver; others made with the same model and shapes share its compiled program.
    """
    return fj.algorithms.paper_adam(
        epsilon_inside_root=epsilon_inside_root,
        # The images are data of the score, not constants of the program.
        score=Partial(_score(model), images),
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


def _alone(algorithm: Algorithm) -> Method:
    return Method(algorithm, lambda _: algorithm)


@functools.cache
def _score(model: Model) -> Callable[..., Array]:
    """Return `(images, params) -> accuracy`, the same object for the same model."""

    def accuracy(images: Examples, params: Params) -> Array:
        return fj.metrics.accuracy(model, params, images)

    return accuracy
