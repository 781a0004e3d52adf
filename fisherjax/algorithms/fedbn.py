"""FedBN: each client keeps its normalisation layers; all other layers are averaged.

Li, Jiang, Zhang, Kamp, Dou, FedBN: Federated learning on non-IID features via local batch
normalization, ICLR 2021.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from fisherjax import leaves
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Report, averaging
from fisherjax.algorithms.wrappers.local_leaves import keep_chosen, keep_local
from fisherjax.typing import Params

# Words in names of normalisation layers, of normalisation of weights, and of layers with a kernel.
_NORM = re.compile(r"[bgl]n|(batch|layer|group|instance|rms|sync|pre|post)*norm(ali[sz]ation)?s?")
_OF_WEIGHTS = {"weight", "weights", "spectral", "kernel"}
_KERNELS = {
    *("kernel", "embedding", "embed", "dense", "linear", "conv", "proj", "projection", "head"),
}
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_var"}


def is_normalization(name: str) -> bool:
    """Return whether a leaf belongs to a normalisation layer, judging by its name.

    It does if a part of the name is such as "norm1", "BatchNorm_0", "post_ln" or "bn2", if it is
    one of the running statistics that `networks.init` stores as "moments", or if it has a name that
    flax or PyTorch use for normalisations only, such as "scale" and "running_mean". A name such as
    "layers/1/weight" does not show it: `normalizations` finds these layers by what the network
    computes.

    Example:
        >>> names = "params/norm1/scale", "moments/bn/mean", "normal_head/kernel"
        >>> [is_normalization(name) for name in names]
        [True, True, False]
    """
    return _by_name(name) is True


def _by_name(name: str) -> bool | None:
    """Return whether a name is one of a normalisation layer; None if it does not show it."""
    *layers, last = name.removesuffix("/value").split("/")
    if name.startswith(("moments/", "batch_stats/")) or last in _STATISTICS:
        return True
    if "kernel" in layers:  # scales of weight normalisation lie below the kernel
        return False
    # The last known word decides: "norm1/linear/bias" belongs to a dense layer.
    for part in (last, *reversed(layers)):
        words = _words(part)
        for before, word in reversed([*zip(["", *words], words, strict=False)]):
            if word in _KERNELS:
                return False
            if _NORM.fullmatch(word):
                return before not in _OF_WEIGHTS
    return True if last == "scale" else None


def _words(part: str) -> list[str]:
    """Split a name such as "BatchNorm_0" or "post_ln2" into lower-case words without numbers."""
    separated = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", part)
    words = (re.sub(r"\d+d?$", "", word) for word in re.split(r"[^A-Za-z0-9]+", separated.lower()))
    return [word for word in words if word]


@cached
def fedbn(
    algorithm: Algorithm[Report] | None = None,
    where: Callable[[str], bool] | frozenset[str] | None = None,
) -> Algorithm[Report]:
    """Make FedBN: clients keep scales, shifts and running statistics; other leaves are averaged.

    Args:
        algorithm: Algorithm that merges the other leaves (default federated averaging).
        where: Names of the leaves that clients keep, best found by `normalizations`, or a function
            that returns whether a leaf of a given name is one. The default uses
            `is_normalization`, provided that the name of every vector shows what layer it is of.

    Returns:
        The algorithm, `keep_local(algorithm, where)`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: When params are first seen, if the network has no normalisation, or no other
            leaf; without `where`, if the name of a vector does not show what layer it is of.

    Example:
        >>> import jax, jax.numpy as jnp, fisherjax as fj
        >>> network, images = fj.networks.NormedCNN(), jnp.zeros((1, 28, 28, 1))
        >>> params = fj.networks.init(network, jax.random.key(0), images)
        >>> model = fj.networks.model(network, params, fj.likelihoods.categorical)
        >>> kept = fj.algorithms.normalizations(model, params, images)
        >>> len(fedbn(where=kept).link.init_client(params).leaves)
        24

    Source: the paper above, algorithm 1, with clients weighted by examples; its code for digits
        weights clients equally. A network without normalisation is refused: FedBN would be
        federated averaging.
    """
    base: Algorithm[Any] = averaging() if algorithm is None else algorithm
    return keep_chosen(base, _by_names) if where is None else keep_local(base, where)


def _by_names(params: Params) -> set[str]:
    """Return the names of normalisation leaves; raise if the names of some vectors are unclear."""
    every = leaves.by_name(params)
    kinds = {name: _by_name(name) for name in every}
    # Untrained leaves have a name only: they count as kernels, unless they are statistics.
    ranks = {name: 2 if leaf is None else jnp.ndim(leaf) for name, leaf in every.items()}
    ranks = {name: 1 if kinds[name] and every[name] is None else n for name, n in ranks.items()}
    kept = {name for name in ranks if kinds[name]}
    # flax stores the statistics of BatchNorm in a collection of their own, by names of layers.
    layers = {_parent(name) for name in kept}
    layers |= {_parent(name).replace("moments", "params", 1) for name in kept}
    with_kernel = {_parent(name) for name, rank in ranks.items() if rank > 1}
    kept |= {n for n in ranks if kinds[n] is None and _parent(n) in layers - with_kernel}
    unclear = [
        name
        for name, rank in ranks.items()
        if rank == 1 and kinds[name] is None and name not in kept | _biases(ranks, with_kernel)
    ]
    if unclear:
        raise ValueError(
            f"The names of {unclear} do not show whether they belong to a normalisation; expected "
            "where=fisherjax.algorithms.normalizations(model, params, inputs), which goes by what "
            "the network computes, or a predicate on names, where=lambda name: ..."
        )
    return kept


def _biases(names: Iterable[str], with_kernel: set[str]) -> set[str]:
    """Return the names that are those of a bias beside a matrix."""
    lasts = {name: name.removesuffix("/value").rpartition("/")[2] for name in names}
    called = {name for name, last in lasts.items() if last.startswith(("b", "offset"))}
    return {name for name in called if _parent(name) in with_kernel}


def _parent(name: str) -> str:
    return name.removesuffix("/value").rpartition("/")[0]
