"""What is squared in the Fisher information: all labels, some, those of the data, or random sums.

A kind is a function `kind(likelihood, outputs z [B, ..., C], targets, key) -> S [K, B, ..., C]`
whose K columns are cotangents of the outputs, `ByPosition` where they are not written out, so that
every structure of the Fisher (diagonal, K-FAC, full) is the same sum for any of them,

    F = sum_n w_n sum_k (J_n^T s_nk)(J_n^T s_nk)^T / sum_n w_n,     J_n = dz_n / dparams.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from fisherjax.fisher._columns import Columns, values
from fisherjax.typing import Array, Key, Likelihood

Kind = Callable[..., Columns]


def automatic(
    likelihood: Likelihood, z: Array, targets: Array | None = None, key: Key | None = None
):
    """Take `true` where outputs are vectors, [B, C], `curvature_propagation` of sequences.

    Of sequences the expectation takes backward passes for each position: 5,120 of 80 positions and
    65 classes, so that K-FAC of a small transformer cost 2,100 gradients of its loss. A random sum
    takes one for all, and the estimate is unbiased: positions are independent given z, so products
    of two positions' gradients have mean zero. Updates of this kind and of `true` are merged
    together.

    Raises:
        ValueError: If outputs are sequences and no key is given.
    """
    del targets
    if z.ndim == 2:
        return true(likelihood, z)
    if key is None:
        raise ValueError(
            f"The outputs of an example have shape {z.shape[1:]}, a sequence, of which the default "
            "Fisher draws signs: pass key=jax.random.key(seed). The exact one, kind=fisher.true, "
            f"needs no key, but about {math.prod(z.shape[1:]):,} backward passes."
        )
    return curvature_propagation(likelihood, z, key=key)


def true(likelihood: Likelihood, z: Array, targets: Array | None = None, key: Key | None = None):
    """Take the exact expectation over the model's own labels, E_{y ~ p(y|z)}[g g^T].

    This is the Fisher information proper: no labels, no randomness, and equal to the generalised
    Gauss-Newton matrix for the likelihoods of this library. It costs K backward passes: C, and one
    less for classes; of sequences so many for each position.

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
    """Draw labels from the model: an unbiased estimate of the true Fisher in few backward passes.

    K = num_samples draws for each example, of a label at each position of sequences, are averaged;
    set it with `functools.partial`.

    Raises:
        ValueError: If no key is given.
    """
    del targets
    if key is None:
        raise ValueError("The sampled Fisher draws labels: pass key=jax.random.key(seed).")
    labels = jax.vmap(likelihood.sample, (0, None))(jax.random.split(key, num_samples), z)
    columns = jax.vmap(lambda y: _score(likelihood, z, y))(labels)
    # Columns are squared before they are summed: a mean over draws divides by the root.
    return columns / jnp.sqrt(num_samples).astype(z.dtype)


def curvature_propagation(
    likelihood: Likelihood,
    z: Array,
    targets: Array | None = None,
    key: Key | None = None,
    num_samples: int = 1,
):
    """Send back random sums of the true Fisher's columns: unbiased, in few backward passes.

        s_n = sum_k r_nk S_nk,   r_nk = +1 or -1,   E[s_n s_n^T] = S_n S_n^T,

    of each example, and each position of sequences. One backward pass does what `sampled` does by
    one drawn label, but says more: a drawn label is, for a model that is nearly sure, nearly always
    the same, and the curvature is in the few that are not, whereas every random sum has the size of
    the curvature. num_samples of them are averaged; set it with `functools.partial`.

    Raises:
        ValueError: If no key is given.

    Source: Martens, Sutskever, Swersky, Estimating the Hessian by back-propagating curvature, ICML
        2012, with the factor of the expected curvature in place of the Hessian's.
    """
    del targets
    if key is None:
        raise ValueError("Curvature propagation draws signs: pass key=jax.random.key(seed).")
    # Positions are independent given z: signs of their own let one pass serve all of them.
    shape, dtype = values(jax.eval_shape(likelihood.factor, z)).shape[:-1], z.dtype
    draw = jax.random.rademacher if likelihood.signs is None else likelihood.signs
    signs = draw(key, (num_samples, *shape), dtype)
    sums = jax.vmap(partial(_combined, likelihood, z))(signs)
    # Sums are squared before they are added: a mean over draws divides by the root.
    return sums / jnp.sqrt(num_samples).astype(z.dtype)


def empirical(
    likelihood: Likelihood, z: Array, targets: Array | None = None, key: Key | None = None
):
    """Use the labels of the data: mean of squared gradients of the training loss, one pass.

    Not an estimate of the true Fisher: it vanishes where the data are fitted perfectly. K is 1.

    Raises:
        ValueError: If no targets are given.

    Source: Kunstner, Balles, Hennig, Limitations of the empirical Fisher approximation, NeurIPS
        2019.
    """
    del key
    if targets is None:
        raise ValueError("The empirical Fisher uses the labels of the data: pass targets.")
    return _score(likelihood, z, targets)[None]


def _combined(likelihood: Likelihood, z: Array, signs: Array) -> Array:
    """Add up the columns of every example or position by signs, [K, B, ...] -> [B, ..., C]."""
    if likelihood.combine is not None:
        return likelihood.combine(z, jnp.moveaxis(signs, 0, -1))
    return jnp.einsum("k...,k...c->...c", signs, values(likelihood.factor(z)))


def _score(likelihood: Likelihood, z: Array, targets: Array) -> Array:
    """Gradient of each example's negative log-likelihood, [B, ..., C]."""
    # One gradient for all: an example's loss depends on its own outputs only.
    return jax.grad(lambda outputs: likelihood.negative_log_likelihood(outputs, targets).sum())(z)
