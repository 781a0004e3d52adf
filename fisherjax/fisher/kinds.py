"""Output-gradient estimators of the Fisher information: exact, sampled, propagated, empirical.

A kind is a function `kind(likelihood, outputs z [B, ..., C], targets, key) -> S [K, B, ..., C]`,
which returns K cotangents of the outputs, the columns; `ByPosition` if they are not written out.
For every kind, a structure (diagonal, K-FAC, full) computes the same sum over them:

    F = sum_n w_n sum_k (J_n^T s_nk)(J_n^T s_nk)^T / sum_n w_n,     J_n = dz_n / dparams.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from fisherjax import likelihoods
from fisherjax.fisher._columns import Columns, values
from fisherjax.typing import Array, Key, Likelihood

Kind: TypeAlias = Callable[..., Columns]
"""An output-gradient estimator, such as `fisher.true`: (likelihood, z, targets, key) -> columns."""


def automatic(
    likelihood: Likelihood, z: Array, targets: Array | None = None, key: Key | None = None
):
    """Return the columns of `true` for outputs [B, C], of `curvature_propagation` for sequences.

    For sequences the exact expectation needs backward passes for each position: 5,120 for 80
    positions and 65 classes, so that K-FAC of a small transformer costs as much as 2,100 gradients
    of its loss. A random sum needs one backward pass for all positions. It is unbiased, because
    positions are independent given z, so that products of gradients of two positions have mean
    zero. Updates of this kind and of `true` estimate the same Fisher and may be merged.

    Raises:
        ValueError: If outputs are sequences and no key is given.
    """
    del targets
    if z.ndim == 2:
        return true(likelihood, z)
    if key is None:
        raise ValueError(
            f"The outputs of an example have shape {z.shape[1:]}, a sequence, and the default kind "
            "draws random signs for sequences: pass key=jax.random.key(seed). The exact kind, "
            f"kind=fisher.true, needs no key, but about {math.prod(z.shape[1:]):,} backward passes."
        )
    return curvature_propagation(likelihood, z, key=key)


def true(likelihood: Likelihood, z: Array, targets: Array | None = None, key: Key | None = None):
    """Return columns of the exact expectation over the model's labels, E_{y ~ p(y|z)}[g g^T].

    This is the Fisher information itself, without labels and without randomness. For the
    likelihoods of this library it equals the generalised Gauss-Newton matrix. It costs K backward
    passes: K is C, or C - 1 for classes, and for sequences that number times the positions.

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, which sums over classes; Martens,
        New insights and perspectives on the natural gradient method, JMLR 2020, section 8.
    """
    del targets, key
    return likelihood.factor(z)


def sampled(
    likelihood: Likelihood,
    z: Array,
    targets: Array | None = None,
    key: Key | None = None,
    num_samples: int = 1,
):
    """Return gradients for labels that are drawn from the model.

    They estimate the true Fisher without bias, in few backward passes. The estimate is the mean
    over K = num_samples draws (default 1) for each example; for sequences a draw has a label at
    each position. Set num_samples by `functools.partial`.

    Raises:
        ValueError: If no key is given.
    """
    del targets
    if key is None:
        raise ValueError("The sampled kind draws labels: pass key=jax.random.key(seed).")

    def column(number: Array | int) -> Array:
        # With JAX's default generator these are the keys of `split`, and `fold_in` is in the
        # program already, for minibatches.
        return _score(likelihood, z, likelihood.sample(jax.random.fold_in(key, number), z))

    if num_samples == 1:
        return column(0)[None]
    columns = jax.vmap(column)(jnp.arange(num_samples))
    # Columns are squared before they are summed, so a mean over draws divides them by the root.
    return columns / jnp.sqrt(num_samples).astype(z.dtype)


def curvature_propagation(
    likelihood: Likelihood,
    z: Array,
    targets: Array | None = None,
    key: Key | None = None,
    num_samples: int = 1,
):
    """Return random sums of the columns of `true`: an unbiased estimate in few backward passes.

        s_n = sum_k r_nk S_nk,   r_nk = +1 or -1,   E[s_n s_n^T] = S_n S_n^T,

    for each example, and for sequences at each position. One sum costs as much as one label of
    `sampled`, but has less variance: for a confident model nearly all drawn labels are the same,
    and the curvature comes from the few others, whereas every random sum has the size of the
    curvature. The estimate is the mean over num_samples sums (default 1), which is set by
    `functools.partial`.

    Raises:
        ValueError: If no key is given.

    Source: Martens, Sutskever, Swersky, Estimating the Hessian by back-propagating curvature, ICML
        2012, with the factor of the expected curvature in place of the Hessian's.
    """
    del targets
    if key is None:
        raise ValueError("Curvature propagation draws signs: pass key=jax.random.key(seed).")
    # Positions are independent given z, so with signs drawn for each one pass serves all of them.
    shape, dtype = values(jax.eval_shape(likelihood.factor, z)).shape[:-1], z.dtype
    draw = jax.random.rademacher if likelihood.signs is None else likelihood.signs
    signs = draw(key, (num_samples, *shape), dtype)
    sums = jax.vmap(partial(_combine, likelihood, z))(signs)
    # Sums are squared before they are added, so a mean over draws divides them by the root.
    return sums / jnp.sqrt(num_samples).astype(z.dtype)


def empirical(
    likelihood: Likelihood, z: Array, targets: Array | None = None, key: Key | None = None
):
    """Return gradients of the training loss, at the labels of the data, for one backward pass.

    Their second moment is not an estimate of the true Fisher: it is zero where the data are fitted
    perfectly. K is 1.

    Raises:
        ValueError: If no targets are given.

    Source: Kunstner, Balles, Hennig, Limitations of the empirical Fisher approximation, NeurIPS
        2019.
    """
    del key
    if targets is None:
        raise ValueError("The empirical kind uses the labels of the data: pass targets.")
    return _score(likelihood, z, targets)[None]


def jacobian(
    likelihood: Likelihood, z: Array, targets: Array | None = None, key: Key | None = None
):
    """Return columns of the identity, F = E[J^T J]: the Fisher of unit-variance Gaussian outputs.

    The Fisher of a classifier vanishes at examples of which it is certain; this curvature does not,
    and weighs all examples and outputs equally. Columns are those of `automatic`: exact for outputs
    [B, C], random sums for sequences.
    """
    del likelihood, targets
    return automatic(likelihoods.gaussian, z, key=key)


def check(kind: Kind, likelihood: Likelihood) -> None:
    """Check that a likelihood knows what a kind reads of it; kinds of your own pass.

    Raises:
        ValueError: If it was made by `likelihoods.custom` without it.
    """
    reads = {automatic: "factor", true: "factor", curvature_propagation: "factor"}
    field = (reads | {sampled: "sample"}).get(getattr(kind, "func", kind))
    if field and (refuse := getattr(likelihood, field)) is getattr(likelihoods.unknown, field):
        refuse()


def _combine(likelihood: Likelihood, z: Array, signs: Array) -> Array:
    """Sum the columns of each example or position with signs [K, B, ...], into [B, ..., C]."""
    if likelihood.combine is not None:
        return likelihood.combine(z, jnp.moveaxis(signs, 0, -1))
    return jnp.einsum("k...,k...c->...c", signs, values(likelihood.factor(z)))


def _score(likelihood: Likelihood, z: Array, targets: Array) -> Array:
    """Return the gradient of each example's negative log-likelihood, [B, ..., C]."""
    # The gradient of the sum has all of them, since a loss depends on its example's outputs only.
    return jax.grad(lambda outputs: likelihood.negative_log_likelihood(outputs, targets).sum())(z)
