"""Check that this machine computes a set of identities correctly, because compilers have bugs.

Each identity is a small program, one that a released compiler has miscompiled or one that every
merge needs. Its result is compared with NumPy in float64. See `devices.self_check`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fisherjax import nn
from fisherjax._core import compiler, linalg
from fisherjax.typing import Array

_LAYOUT = ("NHWC", "HWIO", "NHWC")
_UPDATE = "install another jaxlib, and please report this with the versions"
# Sums that are divided among threads are wrong in some calls only.
_REPEATS = 100


class Fault(NamedTuple):
    """An identity that does not hold on this machine.

    Attributes:
        identity: Name of the identity.
        error: The largest error, relative to the largest entry of the correct result.
        affected: The programs that may compute wrong results.
        cure: The remedy.
    """

    identity: str
    error: float
    affected: str
    cure: str

    def __str__(self) -> str:
        """Describe the fault in one line."""
        return (
            f"{self.identity}: wrong by {self.error:.2g} of the largest entry. "
            f"Affected: {self.affected}. To mend it: {self.cure}."
        )


class Identity(NamedTuple):
    """A program whose result is known.

    Attributes:
        name: What is computed.
        sides: `() -> (computed, correct)`, the results of JAX and of NumPy.
        affected: The programs that may compute wrong results if the identity does not hold.
        cure: The remedy.
        tolerance: The largest relative error that rounding can explain.
    """

    name: str
    sides: Callable[[], tuple[Any, Any]]
    affected: str
    cure: str = _UPDATE
    tolerance: float = 1e-5


def faults(identities: Sequence[Identity]) -> tuple[Fault, ...]:
    """Compute both sides of each identity; return the identities whose sides differ."""
    errors = [_error(*identity.sides()) for identity in identities]
    # The condition is negated, because a NaN is a fault too.
    return tuple(
        Fault(identity.name, error, identity.affected, identity.cure)
        for identity, error in zip(identities, errors, strict=True)
        if not error <= identity.tolerance
    )


def _error(computed: Any, right: Any) -> float:
    right = np.asarray(right, np.float64)
    return float(abs(np.asarray(computed, np.float64) - right).max() / abs(right).max())


def _draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _shared_operand(rows: Array, weights: Array) -> Array:
    shared = jnp.broadcast_to(weights, (len(rows), *weights.shape))
    return jnp.einsum("gnk,gok->gno", rows, shared).max(1)


def _wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64)


def _product_then_maximum(compile_: Callable) -> tuple[Any, Any]:
    rows, weights = _draw(8, 256, 72), _draw(8, 72)
    right = (_wide(rows) @ _wide(weights).T).max(1)
    return compile_(lambda r, w: _shared_operand(r, w))(rows, weights), right


def _sum_of_a_broadcast() -> tuple[Any, Any]:
    ones = np.ones((1024, 1), np.float32)
    total = jax.jit(lambda a: jnp.broadcast_to(a, (2, 1024, 1024)).sum())
    return np.array([total(ones) for _ in range(_REPEATS)]), np.full(_REPEATS, 2.0**21)


def _many_vectors() -> tuple[Any, Any]:
    vectors, matrix = _draw(40_000, 3), _draw(3, 3)
    run = jax.jit(lambda m, x: jax.vmap(lambda row: jnp.sum((m @ row) ** 2))(x))
    return run(matrix, vectors), ((_wide(vectors) @ _wide(matrix).T) ** 2).sum(1)


def _convolution_then_maximum() -> tuple[Any, Any]:
    images, kernel = _draw(32, 8, 8, 8), _draw(3, 3, 8, 8)

    def pooled(x: Array, k: Array) -> Array:
        y = nn.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=_LAYOUT)
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    padded = np.pad(_wide(images), ((0, 0), (1, 1), (1, 1), (0, 0)))
    places = [(i, j) for i in range(3) for j in range(3)]
    right = sum(padded[:, i : i + 8, j : j + 8] @ kernel[i, j] for i, j in places)
    return jax.jit(pooled)(images, kernel), np.reshape(right, (32, 4, 2, 4, 2, 8)).max((2, 4))


def _precise_product() -> tuple[Any, Any]:
    a, b = _draw(256, 512), _draw(512, 64)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    return product(a, b), _wide(a) @ _wide(b)


def _scaled_affine() -> tuple[Any, Any]:
    a, b, bias = _draw(32, 15), _draw(100, 15), 100 * _draw(32)
    run = jax.jit(jax.vmap(lambda s, x: s * (a @ x + bias), in_axes=(None, 0)))
    with jax.default_matmul_precision("highest"):
        return run(0.1, b), 0.1 * (_wide(b) @ _wide(a).T + bias)


def _gradient_of_a_gather() -> tuple[Any, Any]:
    x, cotangent = _draw(256, 8, 128), _draw(256, 8, 128) + 1
    _, pullback = jax.vjp(lambda x: x[:, jnp.arange(8), :], jnp.asarray(x))
    return pullback(jnp.asarray(cotangent))[0], cotangent


def _definite_solve() -> tuple[Any, Any]:
    root, rhs = _draw(5, 60, 60), _draw(5, 60)
    matrices = root @ root.swapaxes(1, 2) + 60 * np.eye(60, dtype=np.float32)
    found = jax.jit(jax.vmap(linalg.solve_definite))(matrices, rhs)
    return found, np.linalg.solve(_wide(matrices), _wide(rhs)[..., None])[..., 0]


def _long_loop_on_all_devices() -> tuple[Any, Any]:
    """Multiply multiples of the identity matrix, whose norms are known, but not to the compiler."""

    def norms(key: Array) -> Array:
        matrices = jax.random.uniform(key, (24, 1, 1), minval=1) * jnp.eye(400)
        identities = jnp.tile(jnp.eye(8), (24, 1, 1))

        def turn(x: Array, _: None) -> tuple[Array, Array]:
            y = jax.vmap(lambda a, b: jnp.linalg.multi_dot([a, x, b]))(matrices, identities).sum(0)
            return y / jnp.linalg.norm(y), jnp.linalg.norm(y)

        x = jax.random.normal(key, (400, 8))
        found = jax.lax.scan(turn, x / jnp.linalg.norm(x), length=600)[1]
        return found / jnp.trace(matrices.sum(0)) * 400

    mesh = Mesh(np.array(jax.local_devices()), ("device",))
    spec = PartitionSpec("device")
    keys = jax.vmap(jax.random.key)(jnp.arange(mesh.size))
    run = jax.shard_map(lambda k: norms(k[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    found = jax.jit(run)(jax.device_put(keys, NamedSharding(mesh, spec)))
    return found, np.ones(found.shape)


_OWN_JIT = "programs that you compile with jax.jit, with functions of fisherjax or without"
_ISSUES = "https://github.com/jax-ml/jax/issues"
IDENTITIES = (
    Identity(
        "a program of fisherjax with a product whose operand is broadcast, and a maximum",
        *(lambda: _product_then_maximum(compiler.jit), "everything that fisherjax computes here"),
    ),
    Identity(
        "a convolution of fisherjax.nn and max pooling",
        *(_convolution_then_maximum, "convolutional networks"),
    ),
    Identity("a batch of Cholesky solves", _definite_solve, "the server's solves", tolerance=1e-4),
    Identity(
        "a float32 product at the highest precision",
        *(_precise_product, "Kronecker factors, Gram matrices and the server's solves"),
    ),
    Identity(
        "the gradient of a gather outside jit",
        *(_gradient_of_a_gather, f"gradients of embeddings ({_ISSUES}/39025)", _UPDATE, 1e-6),
    ),
    Identity(
        "a scaled sum of a product and a bias",
        *(_scaled_affine, f"dense layers ({_ISSUES}/39336)"),
        "set XLA_FLAGS=--xla_gpu_autotune_level=3, or install another jaxlib",
    ),
    Identity(
        "a product whose operand is broadcast, and a maximum",
        lambda: _product_then_maximum(jax.jit),
        *(f"{_OWN_JIT}, such as attention with learned queries", compiler.CURE),
    ),
    Identity(
        "a sum of a broadcast",
        *(
            _sum_of_a_broadcast,
            f"{_OWN_JIT}, such as a mean loss of broadcast terms",
            compiler.CURE,
        ),
    ),
    Identity(
        "a matrix times 40,000 vectors, and a sum",
        *(_many_vectors, f"{_OWN_JIT}, with large batches", compiler.CURE),
    ),
    Identity(
        "a long loop of large products on all devices at once",
        *(_long_loop_on_all_devices, "clients spread over the cores of a CPU, in long solves"),
        *("call fisherjax.devices.one_per_core() before JAX computes anything", 1e-4),
    ),
)
