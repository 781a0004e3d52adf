"""Methods by their names: those of the registry, with the options of the command."""

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
from experiments.harness.names import distils, is_vote, merged_first, sends_full_matrices
from fisherjax.algorithms import FEDLPA_DISTILLATION, Distillation
from fisherjax.typing import Array, Examples, Model, Params

_FULL_LIMIT = 4e9  # bytes of all clients' full Fisher matrices together


class Method(NamedTuple):
    """One algorithm, the same objects in all runs, so that nothing compiles twice.

    It says how clients train, and what they send; the server's half is made of validation images.
    Methods with equal `sent` need the same updates of the same clients, which are computed once.
    """

    clients: fj.algorithms.Algorithm
    server: Callable[[Examples | None], fj.algorithms.Algorithm]

    @property
    def sent(self) -> Any:
        """What tells updates apart."""
        return self.clients if self.clients.kind == "unnamed" else self.clients.kind


class Images(NamedTuple):
    """What methods that draw images have to know of the data.

    Attributes:
        shape: Of an image, (H, W, C).
        crop: Whether clients train on cropped images.
        test: What judges students where the test data choose.
        normalize: What the network is trained on in place of pixels from 0 to 1, or None for those.
    """

    shape: tuple[int, ...]
    crop: bool
    test: Examples
    normalize: Callable[[Array], Array] | None = None


def methods(
    merging: Merging, model: Model, batch_size: int, images: Images | None = None
) -> dict[str, Method]:
    """Make the algorithms that were asked for, by name; clients train with such minibatches."""
    made = {}
    for name in merging.algorithms:
        first, last = merged_first(name), name.rpartition("+")[2]
        if is_vote(first):
            if images is None:
                raise ValueError("--algorithms names a vote, which is no model: see one_shot")
            continue
        if distils(first):
            plain = fj.algorithms.fedavg()
            start = Method(plain, lambda _, own=plain: own)
            made[name] = _distilled(merging, model, images, last, start)
        else:
            made[name] = _method(merging, model, batch_size, first)
            if "score" in fj.algorithms.options(first) and merging.choose != "last":
                made[name] = _scored(merging, model, images, first, made[name])
            if first != name:
                made[name] = _distilled(merging, model, images, last, made[name], keep_start=True)
    return made


def _distilled(
    merging: Merging,
    model: Model,
    images: Images | None,
    name: str,
    start: Method,
    keep_start: bool = False,
) -> Method:
    """Let DENSE, by its name, go on from what a method makes of the same updates."""
    if images is None:
        raise ValueError(f"--algorithms names {name}, which merges once: use experiments.one_shot")
    how = {"fedfisher": Distillation(), "fedlpa": FEDLPA_DISTILLATION}[merging.distillation]
    own = {o.removeprefix(f"{name}."): x for o, x in merging.options if o.startswith(f"{name}.")}
    how = how._replace(**{o: own.pop(o) for o in how._fields if o in own})
    drawn = {"shape": images.shape, "normalize": images.normalize, "crop": images.crop}
    own = {"how": how, **drawn, **own}

    def server(judges: Examples | None) -> fj.algorithms.Algorithm:
        first = start.server(judges) if keep_start else None
        score = _score(merging, model, images, judges)
        return fj.algorithms.make(name, model, start=first, score=score, **own)

    server(None)  # what is wrong with the options is said before anything is trained
    return Method(start.clients, server)


def _score(
    merging: Merging, model: Model, images: Images, judges: Examples | None
) -> Callable[[Params], Array] | None:
    """Make what chooses as was asked, if anything does."""
    examples = {"last": None, "validation": judges, "test": images.test}[merging.choose]
    accuracy = fj._core.caching.by_value(partial(fj.metrics.accuracy, model))
    # The images are data of the score, not constants of the program.
    return None if examples is None else Partial(accuracy, examples=examples)


def _scored(
    merging: Merging, model: Model, images: Images | None, name: str, plain: Method
) -> Method:
    """Let a method choose among its own options by what was asked."""
    if images is None:
        raise ValueError(
            f"--choose is {merging.choose}, expected last in rounds: {name} chooses only in "
            "experiments.one_shot"
        )
    own = {o.removeprefix(f"{name}."): x for o, x in merging.options if o.startswith(f"{name}.")}
    make = partial(fj.algorithms.make, name, model, **own)
    make(score=jnp.sum)  # what is wrong with the options is said before anything is trained

    def server(judges: Examples | None) -> fj.algorithms.Algorithm:
        return make(score=_score(merging, model, images, judges))

    return plain._replace(server=server)


def _method(merging: Merging, model: Model, batch_size: int, name: str) -> Method:
    known = fj.algorithms.options(name)
    own = ((option.split("."), value) for option, value in merging.options)
    asked = {option: value for (method, option), value in own if method == name}
    # FedLPA's labels are the data's; "true" is the automatic kind, which draws those of plays.
    if known.get("kind") is fj.fisher.automatic and merging.fisher_kind != "true":
        asked["kind"] = getattr(fj.fisher, merging.fisher_kind)
    if "max_examples" in known:
        asked.setdefault("max_examples", merging.max_examples or None)
    # FedFish's squares are of the minibatches that clients train on.
    if "last_epoch" in known:
        asked.setdefault("batch_size", batch_size)
    if "fisher" in known and merging.solver != "cg":
        # The paper has none: its solvers stay near the mean because they stop early.
        asked.setdefault("damping", 0.0)
    if "fisher" in known and merging.solver == "gd":
        asked["solver"] = fj.solvers.gradient_descent()
    make = partial(fj.algorithms.make, name, model, **asked)
    algorithm = make()
    if "fisher" not in known or merging.solver != "adam":
        return Method(algorithm, lambda _: algorithm)
    # The authors put epsilon inside the root for K-FAC and outside for the diagonal.
    inside = known["fisher"] is not fj.fisher.diagonal
    accuracy = fj._core.caching.by_value(partial(fj.metrics.accuracy, model))

    def server(images: Examples | None) -> fj.algorithms.Algorithm:
        # The images are data of the score, not constants of the program.
        score = None if images is None else Partial(accuracy, examples=images)
        return make(solver=fj.algorithms.paper_adam(epsilon_inside_root=inside, score=score))

    return Method(algorithm, server)


def trains_its_own(algorithm: str) -> bool:
    """Say whether an algorithm changes how clients train; False for what is no algorithm."""
    if algorithm not in fj.algorithms.merges():
        return False
    if fj.algorithms.required(algorithm):
        return False  # it has to know the data, for the server's half
    if is_vote(algorithm):
        return True  # networks of its own
    base, model = optax.identity(), Model(jnp.matmul, fj.likelihoods.categorical)  # any
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
