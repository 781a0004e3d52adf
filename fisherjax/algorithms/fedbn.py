"""FedBN: every client's own normalisation, everybody's other layers.

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

# Words of names: of a normalisation, of what normalises weights, and of layers with a kernel.
_NORM = re.compile(r"[bgl]n|(batch|layer|group|instance|rms|sync|pre|post)*norm(ali[sz]ation)?s?")
_OF_WEIGHTS = {"weight", "weights", "spectral", "kernel"}
_KERNELS = {
    *("kernel", "embedding", "embed", "dense", "linear", "conv", "proj", "projection", "head"),
}
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked", "moving_mean", "moving_var"}


def is_normalization(name: str) -> bool:
    """Say whether the name of a leaf is one of a normalisation.

    That is one with a part such as "norm1", "BatchNorm_0", "post_ln" or "bn2", of the running
    statistics that `networks.init` keeps as "moments", or called as flax or PyTorch call what only
    normalisations have, "scale" and "running_mean". Names such as "layers/1/weight" say nothing:
    `normalizations` goes by what the network computes.

    Example:
        >>> names = "params/norm1/scale", "moments/bn/mean", "normal_head/kernel"
        >>> [is_normalization(name) for name in names]
        [True, True, False]
    """
    return _said(name) is True


def _said(name: str) -> bool | None:
    """Say what a name says: a normalisation's, another layer's, or nothing."""
    *layers, last = name.removesuffix("/value").split("/")
    if name.startswith(("moments/", "batch_stats/")) or last in _STATISTICS:
        return True
    if "kernel" in layers:  # what normalises weights has its scales there
        return False
    # The last word that says anything decides: "norm1/linear/bias" is a dense layer's.
    for part in (last, *reversed(layers)):
        words = _words(part)
        for before, word in reversed([*zip(["", *words], words, strict=False)]):
            if word in _KERNELS:
                return False
            if _NORM.fullmatch(word):
                return before not in _OF_WEIGHTS
    return True if last == "scale" else None


def _words(part: str) -> list[str]:
    """Split "BatchNorm_0" or "post_ln2" into words in small letters, without numbers."""
    apart = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", part)
    words = (re.sub(r"\d+d?$", "", word) for word in re.split(r"[^A-Za-z0-9]+", apart.lower()))
    return [word for word in words if word]


@cached
def fedbn(
    algorithm: Algorithm[Report] | None = None,
    where: Callable[[str], bool] | frozenset[str] | None = None,
) -> Algorithm[Report]:
    """Make FedBN: clients keep scales, shifts and running statistics, and the rest is averaged.

    Args:
        algorithm: How the rest is merged; None is federated averaging.
        where: The names of the leaves that clients keep, best as `normalizations` finds them, or
            name of a leaf -> whether it is one. None goes by `is_normalization`, if the names of
            all vectors among the params say what they are.

    Returns:
        The algorithm, `keep_local` of the other.

    Raises:
        TypeError: If an argument has the wrong kind.
        ValueError: Once params are known, if the network has no normalisation, or nothing else, or
            without `where` if the name of a vector may be of a normalisation or of another layer.

    Example:
        >>> import jax, jax.numpy as jnp, fisherjax as fj
        >>> network, images = fj.networks.NormedCNN(), jnp.zeros((1, 28, 28, 1))
        >>> params = fj.networks.init(network, jax.random.key(0), images)
        >>> model = fj.networks.model(network, params, fj.likelihoods.categorical)
        >>> kept = fj.algorithms.normalizations(model, params, images)
        >>> len(fedbn(where=kept).link.init_client(params).leaves)
        24

    Source: the paper above, algorithm 1, with weights by examples; its code for digits counts every
        client the same. Without normalisation it would be federated averaging, and is refused.
    """
    base: Algorithm[Any] = averaging() if algorithm is None else algorithm
    return keep_chosen(base, _by_names) if where is None else keep_local(base, where)


def _by_names(params: Params) -> set[str]:
    """Choose leaves by their names; refuse params whose names do not say enough."""
    every = leaves.by_name(params)
    said = {name: _said(name) for name in every}
    # Of leaves that are not trained there is only the name: all but statistics count as kernels.
    ranks = {name: 2 if leaf is None else jnp.ndim(leaf) for name, leaf in every.items()}
    ranks = {name: 1 if said[name] and every[name] is None else n for name, n in ranks.items()}
    kept = {name for name in ranks if said[name]}
    # The statistics of flax's BatchNorms lie apart, under the names of their layers.
    layers = {_parent(name) for name in kept}
    layers |= {_parent(name).replace("moments", "params", 1) for name in kept}
    with_kernel = {_parent(name) for name, rank in ranks.items() if rank > 1}
    kept |= {n for n in ranks if said[n] is None and _parent(n) in layers - with_kernel}
    unclear = [
        name
        for name, rank in ranks.items()
        if rank == 1 and said[name] is None and name not in kept | _biases(ranks, with_kernel)
    ]
    if unclear:
        raise ValueError(
            f"The names of {unclear} do not say whether they belong to a normalisation; expected "
            "where=fisherjax.algorithms.normalizations(model, params, inputs), which goes by what "
            "the network computes, or where=lambda name: ... of your own."
        )
    return kept


def _biases(names: Iterable[str], with_kernel: set[str]) -> set[str]:
    """Choose what is called a bias and lies beside a matrix."""
    lasts = {name: name.removesuffix("/value").rpartition("/")[2] for name in names}
    called = {name for name, last in lasts.items() if last.startswith(("b", "offset"))}
    return {name for name in called if _parent(name) in with_kernel}


def _parent(name: str) -> str:
    return name.removesuffix("/value").rpartition("/")[0]
