"""Types that all modules share: `Model`, `Examples`, `Likelihood`, aliases, and the shape legend.

Letters used in every docstring:

    M     clients
    K     clients of a cohort; in an output factor, its columns
    N     examples of all clients; n_i are those of client i, and p_i = n_i / N is its weight
    B     examples of a minibatch
    C     classes, or outputs of the network
    T     output locations of a convolution (1 for a dense layer), positions of a sequence
    d     parameters
    a, o  rows (inputs, and one for a bias) and columns (outputs) of a layer's matrix V: F V = A V G

A pytree is *stacked* if every leaf has a leading client axis M.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np

from fisherjax._other_libraries import as_arrays

Array: TypeAlias = jax.Array
AnyArray: TypeAlias = jax.Array | np.ndarray  # of either library
Weights: TypeAlias = AnyArray | Sequence[float]  # one for each client, [M]
Scalar: TypeAlias = jax.Array | float  # may be traced
Key: TypeAlias = jax.Array  # typed, as `jax.random.key(seed)` makes it
Params: TypeAlias = Any  # any pytree of floating arrays
# What damping pulls to: the clients' mean, their start W_0, or W_0 + sum_i (W_i - W_0).
Centre: TypeAlias = Literal["mean", "start", "sum"]
# An array [B, ...], or any pytree of arrays with this first axis; or their shapes.
Inputs: TypeAlias = Any
# Functions of `Model`, described there. Leaves of inputs are arrays of NumPy or JAX; the type of
# outputs is Any, because flax and haiku declare no narrower type.
Apply: TypeAlias = Callable[[Params, Any], Any]
ApplyTrain: TypeAlias = Callable[[Params, Any, Key, Array], tuple[Any, Params | None]]
Positions: TypeAlias = Callable[[Any], Any]
# The comment is needed because JAX exports this class as a variable.
Device: TypeAlias = jax.Device  # pyright: ignore[reportInvalidTypeForm]


class ByPosition(NamedTuple):
    """The columns of an output factor of sequences, each of which is nonzero at one position only.

    Attributes:
        factors: [k, B, L..., C], the factor of each position. Column l * k + j, of K = L k
            columns, is factors[j] at position l and zero elsewhere.
    """

    factors: Array


class Likelihood(NamedTuple):
    """A likelihood of targets y given a network's outputs z, as pure functions.

    Attributes:
        negative_log_likelihood: `(z [B, ..., C], y) -> [B]`, the loss of each example in nats.
        sample: `(key, z) -> y`, one draw of the targets for each example.
        factor: `(z) -> S [K, B, ..., C]`, the columns of the output factor; `ByPosition` if
            positions are independent given z.
        check: `(shape of z, y) -> None`, raises an error if the targets do not fit.
        combine: `(z, r [B, ..., k]) -> [B, ..., C]`, the sum of the k columns of each example or
            position, weighted by r, without computing the columns; None computes them.
        signs: `(key, shape [K, B, ...], dtype)`, draws r for curvature propagation; None is
            `jax.random.rademacher`.
        correct: `(z, y) -> [B, ...] or the shape of z`, whether each prediction is correct; None
            if there is no such thing, as for real numbers.
    """

    negative_log_likelihood: Callable[[Array, Any], Array]
    sample: Callable[[Key, Array], Array]
    factor: Callable[[Array], Array | ByPosition]
    check: Callable[[tuple[int, ...], AnyArray], None]
    combine: Callable[[Array, Array], Array] | None = None
    signs: Callable[[Key, tuple[int, ...], Any], Array] | None = None
    correct: Callable[[Array, Any], Array] | None = None


# A class of its own, because a NamedTuple cannot define `__new__`, as `Model` does.
class _Model(NamedTuple):
    apply: Apply
    likelihood: Likelihood
    apply_train: ApplyTrain | None
    mask: tuple[tuple[str, bool], ...] | None
    positions: Positions | None


class Model(_Model):
    """A network and the likelihood of its outputs: hashable pure functions of any library.

    Attributes:
        apply: `(params, inputs [B, ...]) -> outputs [B, C]`, or [B, ..., C] for sequences. Inputs
            may be a pytree, such as a dict of arrays [B, ...].
        likelihood: Likelihood of the targets given the outputs, such as `likelihoods.categorical`.
        apply_train: `(params, inputs, key, weights [B]) -> (outputs, new)`, used in place of
            `apply` in training, for dropout, augmentation and running statistics. `new` is None or
            a pytree like params; its leaves replace those where the mask is False. Rows that fill
            a short minibatch have weight zero.
        mask: Pytree like params, True where a leaf is trained; None trains all leaves. It is stored
            as a pair (name, trained) for each leaf.
        positions: `(inputs [B, ...]) -> [B, T]`, booleans or 0 and 1: which positions of each
            sequence count, such as `lambda tokens: tokens != 0` if 0 is padding. The others do not
            influence losses, metrics, Fisher factors and Gram matrices; nor do examples of which
            no position counts. A position whose class label is -100 has no loss. None counts all
            positions.

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
        """Make a model, with its mask as a hashable tuple."""
        return super().__new__(cls, apply, likelihood, apply_train, _hashable(mask), positions)

    @classmethod
    def _make(cls, fields: Iterable[Any]) -> "Model":
        # `_replace` calls this method, perhaps with a new mask.
        return cls(*fields)


def _hashable(mask: Any) -> tuple[tuple[str, Any], ...] | None:
    # `_replace` passes a mask that is hashable already.
    if mask is None or (isinstance(mask, tuple) and all(map(_is_named, mask))):
        return mask
    # A dict cannot be hashed, but `jit` must recognise equal models.
    paths = jax.tree_util.tree_leaves_with_path(mask)
    return tuple((jax.tree_util.keystr(p, simple=True, separator="/"), leaf) for p, leaf in paths)


def _is_named(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)


class _Examples(NamedTuple):
    inputs: Inputs
    targets: AnyArray | None
    indices: AnyArray | None
    weights: AnyArray | None


class Examples(_Examples):
    """The examples of one client, or a whole data set; a client's inputs are not copied.

    Attributes:
        inputs: [N, ...], the inputs of all clients, or a pytree of such arrays, such as a dict.
            Arrays of other libraries, such as PyTorch tensors, are read by NumPy's protocol.
        targets: [N, ...], the targets of all clients; None if nothing reads them.
        indices: [n], this client's rows, then padding; None is all rows in order.
        weights: [n], 0 for padding, 1 or another weight for an example; None is 1 for all.
    """

    __slots__ = ()

    def __new__(
        cls, inputs: Inputs, targets: Any = None, indices: Any = None, weights: Any = None
    ) -> "Examples":
        """Make examples of arrays of any library."""
        given = inputs, targets, indices, weights
        return super().__new__(cls, *map(as_arrays, given, cls._fields))

    @classmethod
    def _make(cls, fields: Iterable[Any]) -> "Examples":
        return cls(*fields)
