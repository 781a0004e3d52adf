"""Shared type aliases and the shape legend.

Letters used in every docstring:

=====  ==============================================================
M      clients
N      examples of the whole federation; n_i those of client i, and
       p_i = n_i / N its weight
B      examples of a minibatch
C      classes, or outputs of the network
K      columns of an output factor S, with S S^T = E_y[g g^T]
T      output locations of a convolution (1 for a dense layer)
d      parameters
a, o   rows of a layer's matrix V (inputs, one more for a bias) and its
       columns (outputs): V is [a, o] and F V = A V G
=====  ==============================================================

*stacked* means that every leaf of a pytree has a leading client axis M.
"""

from collections.abc import Callable
from typing import Any

import jax

Array = jax.Array
Key = jax.Array
"""A typed key, `jax.random.key(seed)`."""
Params = Any
"""Any pytree of floating arrays."""
Apply = Callable[[Params, Array], Array]
"""`apply(params, inputs [B, ...]) -> outputs [B, C]`, or [B, ..., C] for sequences."""
