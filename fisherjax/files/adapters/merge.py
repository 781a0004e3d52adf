"""Merge LoRA adapters in the folders of peft, by the products of their factors."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fisherjax import adapters as products
from fisherjax._core import checks
from fisherjax._semidefinite_uploads import indefinite
from fisherjax.clients import shares
from fisherjax.files._limits import LIMITS, Limits
from fisherjax.files._shown import shown_errors
from fisherjax.files.adapters import _config as _adapter_config
from fisherjax.files.adapters.folders import PeftAdapter, load_adapter, new_folder, save_adapter
from fisherjax.files.checkpoints._fishers import Fisher, open_fisher
from fisherjax.fisher import Kronecker


class AdapterMerge(NamedTuple):
    """Summary of a merge of adapters.

    Attributes:
        shares: Clients' weights [M] with sum one.
        ranks: Rank of the merged adapter, by module.
        lost: By module, the part of the weighted mean of the products that the merged adapter does
            not have, |D - X|_F / |D|_F; without factors it is the error of the truncation.
        only_some: Modules that only some clients adapt, to which the others contribute zero.
    """

    shares: np.ndarray
    ranks: dict[str, int]
    lost: dict[str, float]
    only_some: tuple[str, ...]


@shown_errors()
def merge_adapters(
    out: str | os.PathLike,
    folders: Sequence[str | os.PathLike],
    *,
    weights: Any = None,
    factors: Sequence[Mapping[str, products.Factors] | str | os.PathLike] | None = None,
    rank: int | None = None,
    damping: float = Kronecker.default_damping,
    in_span: bool = False,
    limits: Limits = LIMITS,
) -> AdapterMerge:
    """Merge LoRA adapters of one base to one adapter, by the products of their factors.

    The products are those of `adapters.merge`: the weighted mean, or with `factors` the solution in
    their metric, and then the best adapter of a rank.

    Args:
        out: New folder of the merged adapter.
        folders: Folders of peft, one for each client.
        weights: Non-negative weights [M] (default: equal).
        factors: For each client the Kronecker factors of the modules, by their names or those of
            their weights, as in `adapters.merge`; or the path of a Fisher file with Kronecker
            factors or Gram matrices, which `save_fisher` wrote for params with these names. Biases
            have no part in it, as adapters do not change them (default: the weighted mean of the
            products).
        rank: Largest rank of the merged adapter (default: the exact result, of rank sum_i r_i, or
            full with output factors, unless `in_span`).
        damping: Damping in units of a layer's mean eigenvalue, if there are factors.
        in_span: Whether to solve in the span of the clients' factors only, as in `adapters.merge`.
        limits: Limits for the files.

    Raises:
        ValueError: If adapters are of different bases, revisions or tasks, are not plain LoRA or
            not finite, change the same module in different shapes, or factors do not fit, are not
            finite or are indefinite.
        OSError: If a file cannot be read or written.

    Example:
        >>> import tempfile
        >>> place = tempfile.mkdtemp()
        >>> for name, x in (("ann", 1.0), ("bob", 3.0)):
        ...     adapter = products.Adapter(np.full((1, 2), x, "f4"), np.ones((2, 1), "f4"))
        ...     save_adapter(f"{place}/{name}", {"query": adapter})
        >>> summary = merge_adapters(f"{place}/out", [f"{place}/ann", f"{place}/bob"], rank=1)
        >>> print(products.product(load_adapter(f"{place}/out").adapters["query"]).round(3))
        [[2. 2.]
         [2. 2.]]
        >>> summary.ranks
        {'query': 1}
    """
    out = new_folder(out)
    if isinstance(folders, (str, bytes, os.PathLike)) or not folders:
        raise TypeError(
            f"folders is {folders!r:.80}; expected a list of paths, one for each client."
        )
    found: dict[str, PeftAdapter] = {}
    for folder in folders:
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"folders has {folder!r:.80}; expected paths, one for each client.")
        if os.path.realpath(folder) in map(os.path.realpath, found):
            raise ValueError(f"{str(folder)!r} is there twice; expected one folder a client.")
        found[os.fspath(folder)] = load_adapter(folder, limits)
    if rank is not None:
        checks.count("rank", rank)
    _adapter_config.check_agree({folder: x.config for folder, x in found.items()})
    clients = [x.adapters for x in found.values()]
    _check_finite(found)
    embeddings = _embeddings(found)
    labels = [repr(folder) for folder in found]
    names = products.check(clients, labels=labels)
    held = None if factors is None else _factors(factors, names, labels, limits)
    products.check(clients, held, labels)
    how = {"rank": rank, "damping": damping, "in_span": in_span}
    merged = products.merge(clients, weights, held, **how)
    mean = products.merge(clients, weights)
    lost = {name: float(products.distance(mean[name], x)) for name, x in merged.items()}
    config = next(iter(found.values())).config
    save_adapter(out, merged, config=config, embeddings=embeddings, limits=limits)
    return AdapterMerge(
        shares(np.ones(len(found)) if weights is None else np.asarray(weights, float)),
        {name: x.a.shape[0] for name, x in merged.items()},
        lost,
        tuple(name for name in names if not all(name in client for client in clients)),
    )


def _check_factors(source: str, held: Any) -> None:
    """Check that Kronecker factors can be means of outer products; see also `products.merge`."""
    if not isinstance(held, Mapping):
        raise TypeError(
            f"The factors of {source} are {held!r:.60}; expected a dict by module, or the path of "
            "a Fisher file."
        )
    for name, sides in held.items():
        for side, factor in sides.items():
            if not _is_semidefinite(np.asarray(factor)):
                raise ValueError(
                    f"The {side} factor of {name!r} of {source} is not finite, symmetric and "
                    "positive semi-definite; expected a mean of outer products."
                )


def _is_semidefinite(factor: np.ndarray) -> bool:
    """Return whether a matrix, or a vector that stands for a diagonal, has no negative part."""
    if not np.isfinite(factor).all():
        return False
    # A matrix that is not square is refused with the shapes of its module.
    is_square = factor.ndim == 2 and factor.shape[0] == factor.shape[1]
    return (
        not indefinite({"": factor}) if is_square else factor.ndim != 1 or bool((factor >= 0).all())
    )


def _check_finite(found: Mapping[str, PeftAdapter]) -> None:
    for folder, each in found.items():
        for name, adapter in each.adapters.items():
            for side, factor in zip("AB", adapter[:2], strict=True):
                if not np.isfinite(factor).all():
                    raise ValueError(
                        f"{folder!r} is not finite: factor {side} of {name!r}. The client "
                        "diverged: train it with a smaller learning rate, or leave it out."
                    )


def _embeddings(found: Mapping[str, PeftAdapter]) -> frozenset[str]:
    """Return the modules that are embeddings; raise if one is not for all clients."""
    every = frozenset[str]().union(*(x.embeddings for x in found.values()))
    for folder, each in found.items():
        if wrong := sorted(every.intersection(each.adapters) - each.embeddings):
            raise ValueError(f"{wrong} are embeddings for other clients, but not in {folder!r}.")
    return every


def _factors(
    given: Sequence[Any], modules: Collection[str], labels: Sequence[str], limits: Limits
) -> list[dict[str, products.Factors]]:
    """Return the factors of each client by module, read from its Fisher file if it has one."""
    if isinstance(given, (str, bytes, os.PathLike)):
        raise TypeError(f"factors is {given!r:.80}; expected a list with one item for each client.")
    read = []
    for source, each in zip(labels, given, strict=False):
        is_path = isinstance(each, (str, os.PathLike))
        held = _read_factors(open_fisher(each, limits), modules) if is_path else each
        _check_factors(repr(str(each)) if is_path else source, held)
        read.append({_module(name, modules): x for name, x in held.items()})
    return read


def _read_factors(fisher: Fisher, modules: Collection[str]) -> dict[str, products.Factors]:
    [value] = fisher.values.values()
    found: dict[str, tuple[Any, int | None]]
    if isinstance(value, Kronecker):
        # A kernel that makes several layers has no factors of its own.
        whole = [x for x in value.layers if x.part_of is None and x.kernel in value.factors]
        found = {x.kernel: (value.factors[x.kernel], x.rows) for x in whole}
    elif isinstance(value, dict):
        found = {name.removesuffix("^T"): ({"input": x}, None) for name, x in value.items()}
    else:
        raise ValueError(
            f"{str(fisher.path)!r} holds a {type(value).__name__}; expected Kronecker factors "
            "(--algorithm fedfisher_kfac of the command fisher) or Gram matrices (regmean)."
        )
    read = {}
    for kernel, (sides, rows) in found.items():
        if (name := _module(kernel, modules)) not in modules:
            continue
        read[name] = {side: fisher.arrays[x].whole() for side, x in sides.items()}
        # The last row and column of an input factor belong to the bias, which does not change.
        read[name]["input"] = read[name]["input"][(slice(rows),) * read[name]["input"].ndim]
    return read


def _module(name: str, modules: Collection[str]) -> str:
    return name if name in modules else name.removesuffix(".weight")
