"""Methods by their names: those of the library's table, with the options of the command."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.tree_util import Partial

import fisherjax as fj
from experiments.harness.config import Merging
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
        clients: How clients train, and what they send. It is the same object in all runs, so that
            nothing compiles twice. Methods with equal `sent` need the same updates of the same
            clients, which are computed once.
        server: `validation images or None -> algorithm`, which merges the updates.
    """

    clients: Algorithm
    server: Callable[[Examples | None], Algorithm]

    @property
    def sent(self) -> Any:
        """What tells updates apart."""
        return self.clients if self.clients.kind == "unnamed" else self.clients.kind


def methods(merging: Merging, model: Model, batch_size: int) -> dict[str, Method]:
    """Make the algorithms that were asked for, by name; clients train with such minibatches."""
    return {name: _method(merging, model, batch_size, name) for name in merging.algorithms}


def _method(merging: Merging, model: Model, batch_size: int, name: str) -> Method:
    known = fj.algorithms.options(name)
    make = functools.partial(
        fj.algorithms.make, name, model, **_asked(merging, batch_size, name, known)
    )
    if "fisher" not in known or merging.solver == "cg":
        return _alone(make())
    if merging.solver == "gd":
        return _alone(make(solver=fj.solvers.gradient_descent()))
    inside = known.get("fisher") is not fj.fisher.diagonal
    return Method(make(), lambda images: make(solver=validated_adam(model, images, inside)))


def _asked(merging: Merging, batch_size: int, name: str, known: dict[str, Any]) -> dict[str, Any]:
    """Give the options of the command that a method knows, by their names in the library."""
    asked: dict[str, Any] = {}
    if known.get("kind") is fj.fisher.true:  # FedLPA's labels are the data's
        asked["kind"] = _KINDS[merging.fisher_kind]
    # FedFish's squares are of the minibatches that clients train on.
    if "last_epoch" in known:
        asked["batch_size"] = batch_size
    own = ((option.split("."), value) for option, value in merging.options)
    return asked | {option: value for (method, option), value in own if method == name}


def optimizers(algorithms: Sequence[str]) -> list[optax.GradientTransformation]:
    """List the ways in which clients train: as they are, and as algorithms change it.

    Example:
        >>> len(optimizers(["fedavg", "regmean", "fedprox", "fednova"]))
        3
    """
    return list(dict.fromkeys([_ANY_OPTIMIZER, *map(_optimizer, algorithms)]))


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


def validated_adam(
    model: Model, images: Examples | None, epsilon_inside_root: bool
) -> fj.solvers.Solver:
    """Make the paper's Adam, which keeps the iterate that is best on validation data, if any.

    Those made with the same model and shapes share a compiled program. The authors put epsilon
    inside the root for K-FAC and outside for the diagonal.
    """
    return fj.algorithms.paper_adam(
        epsilon_inside_root=epsilon_inside_root,
        # The images are data of the score, not constants of the program.
        score=None if images is None else Partial(_score(model), images),
    )


def check_full(algorithms: Sequence[str], params: Params, num_clients: int) -> None:
    """Refuse full Fisher matrices of so many clients' models that would not fit into memory.

    Raises:
        ValueError: If M d^2 numbers are too many.
    """
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    needed = 4.0 * size**2 * num_clients
    if "fedfisher_full" in algorithms and needed > _FULL_LIMIT:
        raise ValueError(
            f"--algorithms fedfisher_full needs a matrix of {size} x {size} numbers for each of "
            f"{num_clients} clients, {needed / 1e9:.3g} GB; expected at most "
            f"{_FULL_LIMIT / 1e9:g} GB. Use fedfisher_kfac, or a smaller network"
        )


def _alone(algorithm: Algorithm) -> Method:
    return Method(algorithm, lambda _: algorithm)


@functools.cache
def _score(model: Model) -> Callable[..., Array]:
    """Return `(images, params) -> accuracy`, the same object for the same model."""

    def accuracy(images: Examples, params: Params) -> Array:
        return fj.metrics.accuracy(model, params, images)

    return accuracy
