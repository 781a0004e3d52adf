"""What is squared in the Fisher information: the model's own labels, sampled ones, or the data's.

A kind is a function `kind(likelihood, outputs z [B, ..., C], targets, key) -> S [K, B, ..., C]`
whose K columns are cotangents of the outputs, so that every structure of the Fisher (diagonal,
K-FAC, full) is the same sum for any of them,

    F = sum_n w_n sum_k (J_n^T s_nk)(J_n^T s_nk)^T / sum_n w_n,     J_n = dz_n / dparams.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fisherjax.typing import Array, Key, Likelihood

Kind = Callable[..., Array]


def true(likelihood: Likelihood, z: Array, targets: Array | None = None, key: Key | None = None):
    """Take the exact expectation over the model's own labels, E_{y ~ p(y|z)}[g g^T].

    This is the Fisher information proper: no labels, no randomness, and equal to the generalised
    Gauss-Newton matrix for the likelihoods of this library. It costs K backward passes: C,
    and one less for classes.

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

    K = num_samples draws for each example are averaged; set it with `functools.partial`.

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


def _score(likelihood: Likelihood, z: Array, targets: Array) -> Array:
    """Gradient of each example's negative log-likelihood, [B, ..., C]."""
    # One gradient for all: an example's loss depends on its own outputs only.
    return jax.grad(lambda outputs: likelihood.negative_log_likelihood(outputs, targets).sum())(z)
