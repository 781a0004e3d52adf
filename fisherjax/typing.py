"""What everybody passes around: `Model`, `Examples`, a few aliases, and the shape legend.

Letters used in every docstring:

    M     clients
    K     clients of a cohort; in an output factor its columns
    N     examples of the whole federation; n_i those of client i, and p_i = n_i / N its weight
    B     examples of a minibatch
    C     classes, or outputs of the network
    T     output locations of a convolution (1 for a dense layer), positions of a sequence
    d     parameters
    a, o  rows (inputs, and one for a bias) and columns (outputs) of a layer's matrix V: F V = A V G

*stacked* means that every leaf of a pytree has a leading client axis M.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
AnyArray: TypeAlias = jax.Array | np.ndarray  # data, whoever made it
ArrayOrShape: TypeAlias = AnyArray | jax.ShapeDtypeStruct  # where a shape suffices
Weights: TypeAlias = AnyArray | Sequence[float]  # of clients, one each
Scalar: TypeAlias = jax.Array | float  # one number, which may be traced
Key: TypeAlias = jax.Array  # typed, as `jax.random.key(seed)` makes it
Params: TypeAlias = Any  # any pytree of floating arrays
# What `Model` describes.
# Inputs are arrays of NumPy or JAX, and what flax and haiku return has no narrower type than Any.
Apply: TypeAlias = Callable[[Params, Any], Any]
ApplyTrain: TypeAlias = Callable[[Params, Any, Key, Array], tuple[Any, Params | None]]
# JAX exports the class as a variable.
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]
Positions: TypeAlias = Callable[[Any], Any]


class ByPosition(NamedTuple):
    """The columns of an output factor of sequences, each supported on one position.

    Attributes:
        factors: [k, B, L..., C], the factor of each position. Column l * k + j, of K = L k, is
            factors[j] at position l and zero elsewhere.
    """

    factors: Array


class Likelihood(NamedTuple):
    """What the outputs of a network mean, as pure functions of the outputs z.

    Attributes:
        negative_log_likelihood: `(z [B, ..., C], y) -> [B]`, in nats.
        sample: `(key, z) -> y`, one draw of the targets for each example.
        factor: `(z) -> S [K, B, ..., C]`, the columns of the output factor; `ByPosition` where
            positions are independent given z.
        check: `(shape of z, y) -> None`, refuses targets that do not fit.
        combine: `(z, r [B, ..., k]) -> [B, ..., C]`, the sum of the k columns of every example or
            position by r, without writing them out; None writes them out.
        signs: `(key, shape [K, B, ...], dtype)`, what curvature propagation draws for r; None is
            `jax.random.rademacher`.
    """

    negative_log_likelihood: Callable[[Array, Any], Array]
    sample: Callable[[Key, Array], Array]
    factor: Callable[[Array], Array | ByPosition]
    check: Callable[[tuple[int, ...], AnyArray], None]
    combine: Callable[[Array, Array], Array] | None = None
    signs: Callable[[Key, tuple[int, ...], Any], Array] | None = None


# A class of its own, because a NamedTuple cannot define `__new__`, as `Model` does.
class _Model(NamedTuple):
    apply: Apply
    likelihood: Likelihood
    apply_train: ApplyTrain | None
    mask: tuple[tuple[str, bool], ...] | None
    positions: Positions | None


class Model(_Model):
    """A network and what its outputs mean: pure functions, hashable, whatever made them.

    Attributes:
        apply: `(params, inputs [B, ...]) -> outputs [B, C]`, or [B, ..., C] for sequences.
        likelihood: Of the targets given the outputs, such as `likelihoods.categorical`.
        apply_train: `(params, inputs, key, weights [B]) -> (outputs, new)` in place of apply while
            training, for dropout, augmentation and running statistics. `new` is None, or like
            params; its leaves are taken where the mask is False. Rows that fill up a short
            minibatch have weight zero.
        mask: Like params, True where a leaf is trained; None trains everything. Kept as a pair
            (name, trained) for each leaf.
        positions: `(inputs [B, ...]) -> [B, T]`, booleans or 0 and 1: which positions of each
            sequence count, such as `lambda tokens: tokens != 0` where 0 is padding. The others
            leave no trace in losses, metrics, Fisher factors and Gram matrices, and nor do
            examples of which no position counts. A position whose class label is -100 has no
            loss. None counts all positions.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w["dense"], fj.likelihoods.gaussian)
        >>> hash(model) == hash(fj.Model(*model))
        True
    """

    __slots__ = ()

    def __new__(
        cls,
        apply: Apply,
        likelihood: Likelihood,
        apply_train: ApplyTrain | None = None,
        mask: Any = None,
        positions: Positions | None = None,
    ) -> "Model":
        """Turn the mask into what can be hashed."""
        return super().__new__(cls, apply, likelihood, apply_train, _hashable(mask), positions)

    @classmethod
    def _make(cls, fields: Iterable[Any]) -> "Model":
        # What `_replace` calls, perhaps with a new mask.
        return cls(*fields)


def _hashable(mask: Any) -> tuple[tuple[str, Any], ...] | None:
    # `_replace` hands on a mask that is hashable already.
    if mask is None or (isinstance(mask, tuple) and all(map(_is_named, mask))):
        return mask
    # A dict cannot be hashed, but `jit` must recognise equal models.
    paths = jax.tree_util.tree_leaves_with_path(mask)
    return tuple((jax.tree_util.keystr(p, simple=True, separator="/"), leaf) for p, leaf in paths)


def _is_named(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


class Examples(NamedTuple):
    """One client's view of the data, or a whole data set; no image is copied.

    Attributes:
        inputs: [N, ...], everybody's.
        targets: [N, ...], everybody's; None where nothing reads them.
        indices: [n] rows that are this client's, then padding; None takes all rows in order.
        weights: [n], 0 for padding, 1 or another weight for an example; None is 1 for all.
    """

    inputs: AnyArray
    targets: AnyArray | None = None
    indices: AnyArray | None = None
    weights: AnyArray | None = None
