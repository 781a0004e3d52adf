"""Make the methods of the registry by name, with the options of the command."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import Partial

import fisherjax as fj
from experiments.harness.config import Merging
from experiments.harness.names import (
    distils,
    is_vote,
    merged_first,
    options_in,
    sends_full_matrices,
)
from fisherjax.algorithms import FEDLPA_DISTILLATION, Distillation
from fisherjax.compression import Codec, compose, quantized, truncated, water_filling
from fisherjax.typing import Array, Examples, Model, Params

_FULL_LIMIT = 4e9  # largest size in bytes of all clients' full Fisher matrices together


class Method(NamedTuple):
    """One algorithm; all runs share its objects, so that nothing compiles twice.

    `clients` defines how clients train and what they send. `server` returns the algorithm that
    merges, given validation images or None. Methods with equal `sent` need the same updates of the
    same clients, which are computed once.
    """

    clients: fj.algorithms.Algorithm
    server: Callable[[Examples | None], fj.algorithms.Algorithm]

    @property
    def sent(self) -> Any:
        """How updates are computed, with all options that this depends on, and their kind."""
        return self.clients.summarize, self.clients.kind


class Images(NamedTuple):
    """The data that methods need which generate images.

    Attributes:
        shape: Shape of an image, (H, W, C).
        crop: Whether clients train on cropped images.
        test: Test images, which choose the student with `--choose test`.
        normalize: Normalisation of pixels from 0 to 1 for the network, or None.
    """

    shape: tuple[int, ...]
    crop: bool
    test: Examples
    normalize: Callable[[Array], Array] | None = None


def methods(
    merging: Merging, model: Model, batch_size: int, images: Images | None = None
) -> dict[str, Method]:
    """Make the chosen algorithms by name, for clients that train with minibatches of a size."""
    made = {}
    for name in merging.algorithms:
        first, last = merged_first(name), name.rpartition("+")[2]
        if is_vote(first):
            continue
        if distils(first):
            average = fj.algorithms.fedavg()
            start = Method(average, lambda _, average=average: average)
            made[name] = _distilled(merging, model, images, last, start)
        else:
            made[name] = _method(merging, model, batch_size, first)
            if "score" in fj.algorithms.options(first) and merging.choose != "last":
                made[name] = _scored(merging, model, images, first, made[name])
            if first != name:
                made[name] = _distilled(merging, model, images, last, made[name], keep_start=True)
    return made


def options_of(merging: Merging, name: str) -> dict[str, Any]:
    """Select the options that were given for a method, and those in its name."""
    base = name.partition("@")[0]
    given = {o.removeprefix(f"{base}."): x for o, x in merging.options if o.startswith(f"{base}.")}
    return given | options_in(name)


def _distilled(
    merging: Merging,
    model: Model,
    images: Images | None,
    name: str,
    start: Method,
    keep_start: bool = False,
) -> Method:
    """Make DENSE, by its name, which continues from another method's merge of the same updates."""
    if images is None:
        raise ValueError(
            f"--algorithms names {name}, which learns from generated images of one "
            "data set; expected a data set of images that --partition divides"
        )
    how = {"fedfisher": Distillation(), "fedlpa": FEDLPA_DISTILLATION}[merging.distillation]
    options = options_of(merging, name)
    how = how._replace(**{o: options.pop(o) for o in how._fields if o in options})
    drawn = {"shape": images.shape, "normalize": images.normalize, "crop": images.crop}

    def server(validation: Examples | None) -> fj.algorithms.Algorithm:
        first = start.server(validation) if keep_start else None
        score = _score(model, _chosen(merging, images, validation))
        own = {"how": how, **drawn, **options}
        return fj.algorithms.make(name, model, start=first, score=score, **own)

    server(None)  # errors in the options are raised before anything is trained
    return Method(start.clients, server)


def _chosen(merging: Merging, images: Images, validation: Examples | None) -> Examples | None:
    """Return the examples that choose among models, if any do."""
    return {"last": None, "validation": validation, "test": images.test}[merging.choose]


def _score(model: Model, examples: Examples | None) -> Callable[[Params], Array] | None:
    """Return the accuracy on examples as a function of params; None without examples."""
    accuracy = fj._core.caching.by_value(partial(fj.metrics.accuracy, model))
    # The examples are data of the score and no constants of the program.
    return None if examples is None else Partial(accuracy, examples=examples)


def _scored(
    merging: Merging, model: Model, images: Images | None, name: str, plain: Method
) -> Method:
    """Make a method choose among its own options by the accuracy on examples."""
    if images is None:
        raise ValueError(
            f"--choose is {merging.choose}, expected last: {name} chooses by images of one data "
            "set that --partition divides"
        )
    make = partial(fj.algorithms.make, name, model, **options_of(merging, name))
    make(score=jnp.sum)  # errors in the options are raised before anything is trained

    def server(validation: Examples | None) -> fj.algorithms.Algorithm:
        return make(score=_score(model, _chosen(merging, images, validation)))

    return plain._replace(server=server)


def _method(merging: Merging, model: Model, batch_size: int, name: str) -> Method:
    known, asked = fj.algorithms.options(name), options_of(merging, name)
    # FedLPA's labels are the data's; "true" is the automatic kind, which samples for plays.
    if known.get("kind") is fj.fisher.automatic and merging.fisher_kind != "true":
        asked["kind"] = getattr(fj.fisher, merging.fisher_kind)
    if "max_examples" in known:
        asked.setdefault("max_examples", merging.max_examples or None)
    # FedFish squares gradients of the minibatches that clients train on.
    if "last_epoch" in known:
        asked.setdefault("batch_size", batch_size)
    if "fisher" in known and merging.solver != "cg":
        # The paper has no damping; its solvers stay near the mean because they stop early.
        asked.setdefault("damping", 0.0)
    if "fisher" in known and merging.solver == "gd":
        asked["solver"] = fj.solvers.gradient_descent()

    def make(**options: Any) -> fj.algorithms.Algorithm:
        made = fj.algorithms.make(name, model, **(asked | options))
        # Only methods that look at the clients' examples send more than weights.
        if merging.compress == "none" or "max_examples" not in known:
            return made
        return fj.compression.compressed(made, _codec(merging.compress))

    algorithm = make()
    if "fisher" not in known or merging.solver != "adam":
        return Method(algorithm, lambda _: algorithm)
    # The authors put epsilon inside the root for K-FAC and outside for the diagonal.
    adam = partial(
        fj.algorithms.paper_adam, epsilon_inside_root=known["fisher"] is not fj.fisher.diagonal
    )
    return Method(algorithm, lambda images: make(solver=adam(score=_score(model, images))))


@fj._core.caching.cached
def _codec(compress: str) -> Codec:
    """Make the codec of `--compress`, by which weights and curvature take FedAvg's bytes."""

    def encode(values: dict[str, Any], start: Params | None) -> dict[str, Any]:
        part = next((name for name in ("fisher", "grams") if name in values), None)
        if part is None:
            return values
        if compress == "water_filling":
            return water_filling(1.0).encode(values, start)
        is_diagonal = isinstance(values[part], fj.fisher.Diagonal)
        bits = {"params": 16, part: 16 if is_diagonal else 8}
        codecs = [quantized(bits, ceiling=compress == "paper_ceiling")]
        return compose(*[] if is_diagonal else [truncated()], *codecs).encode(values, start)

    return Codec(encode, compress, compress == "water_filling")


def trains_its_own(algorithm: str) -> bool:
    """Return whether an algorithm changes how clients train; False for other names."""
    if algorithm not in fj.algorithms.merges():
        return False
    if fj.algorithms.required(algorithm):
        return False  # only its server's half needs the data
    if is_vote(algorithm):
        return True  # its clients train networks of their own
    base, model = optax.identity(), Model(jnp.matmul, fj.likelihoods.categorical)  # any will do
    return fj.algorithms.make(algorithm, model).optimizer(base) is not base


def check_full(algorithms: Sequence[str], params: Params, num_clients: int) -> None:
    """Refuse full Fisher matrices of so many clients' models that would not fit into memory."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    needed = 4.0 * size**2 * num_clients
    full = list(filter(sends_full_matrices, algorithms))
    if full and needed > _FULL_LIMIT:
        raise ValueError(
            f"--algorithms {' '.join(full)} needs a matrix of {size} x {size} numbers for each of "
            f"{num_clients} clients, {needed / 1e9:.3g} GB; expected at most "
            f"{_FULL_LIMIT / 1e9:g} GB. Use fedfisher_kfac, or a smaller network"
        )
