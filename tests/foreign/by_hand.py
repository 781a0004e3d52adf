"""What programs are compared with: the same eagerly, or formulas in NumPy of eager derivatives.

Formulas take the place of the library's own passes where those, one operation at a time, would
compile hundreds of operations. They are an independent check besides, in float64.
"""

from typing import Any

import jax
import numpy as np

from tests.foreign import networks, programs
from tests.foreign.programs import Case, Quantities


def expected(case: Case) -> Quantities:
    """Compute what a case's program has to give; call it inside `jax.disable_jit()`."""
    return {"factors": factors, "summaries": summaries}.get(case.cell.program, programs.run)(case)


def factors(case: Case) -> Quantities:
    """Compute K-FAC factors eagerly, and the diagonal from the derivatives J of each example.

    f_j = E_n[J_n^T H_n J_n]_jj,   H_n = diag(p_n) - p_n p_n^T, or the identity for a Gaussian.
    """
    network, x = case.network, case.inputs[: programs.FEW]

    def derivatives(example: networks.Array) -> Any:
        return jax.jacrev(lambda params: network.apply(params, example[None])[0])(network.params)

    every = jax.vmap(derivatives)(x)
    p = softmax(np.asarray(network.apply(network.params, x), np.float64))
    # Not diag(p) - p p^T: 1 - p cancels where an example is sure.
    same = np.eye(p.shape[1])
    h = same * (p * (p @ (1 - same)))[:, None] - (1 - same) * p[:, None] * p[:, :, None]
    if programs.is_gaussian(case):
        h = np.eye(p.shape[1])

    def diagonal(leaf: networks.Array) -> np.ndarray:
        flat = np.asarray(leaf, np.float64).reshape(*p.shape, -1)
        return ((h @ flat) * flat).sum((0, 1)).reshape(leaf.shape[2:]) / len(x)

    return {"factors": programs.kfac(case), "diagonal": jax.tree.map(diagonal, every)}


def summaries(case: Case) -> Quantities:
    """Compute second moments of the head's inputs, [M, a, a], and the ridge solution."""
    *_, pooled, _ = case.network.layers(case.network.params, case.inputs)
    features = np.asarray(pooled, np.float64).reshape(len(pooled), -1)
    _, bias = networks.canonical(case.cell, case.network.params)["head"]
    ones = np.ones((len(features), int(bias is not None)))
    a = np.concatenate([features, ones], axis=1)
    y = np.eye(networks.CLASSES)[np.asarray(case.targets)]
    parts = np.split(np.arange(len(a)), [programs.first_rows(len(a))])
    inputs, products = (
        np.stack([a[rows].T @ other[rows] / len(rows) for rows in parts]) for other in (a, y)
    )
    whole = a.T @ a / len(a)
    shift = programs.RIDGE * np.trace(whole) / len(whole)
    head = np.linalg.solve(whole + shift * np.eye(len(whole)), a.T @ y / len(a))
    return {
        "gram matrices": inputs[:, : features.shape[1], : features.shape[1]],
        "head sums": (inputs, products),
        "analytic head": (head, None) if bias is None else (head[:-1], head[-1]),
    }


def softmax(z: np.ndarray) -> np.ndarray:
    """Normalise exponentials along the last axis."""
    exponentials = np.exp(z - z.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)
