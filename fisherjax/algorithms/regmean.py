"""RegMean and RegMean++: merge dense layers by least squares on the outputs of clients' layers.

Jin, Ren, Preotiuc-Pietro, Cheng, Dataless knowledge fusion by merging weights of language models,
ICLR 2023, equation 2; Nguyen et al., RegMean++: Enhancing effectiveness and generalization of
regression mean for model merging, arXiv 2508.03121, 2025.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import _padding, leaves, tree
from fisherjax._core import checks, linalg
from fisherjax._core.caching import by_value, cached
from fisherjax._core.compiler import jit
from fisherjax._layers import locations
from fisherjax._layers.pairs import trace
from fisherjax.algorithms._changes import start_of
from fisherjax.algorithms._fisher_updates import centre_point, link_of, plain_sum
from fisherjax.algorithms.base import FISHER_EXAMPLES, Algorithm, check_pass, weighted_sum
from fisherjax.clients import draw
from fisherjax.fisher import _passes
from fisherjax.fisher._factors import expand, input_moments
from fisherjax.fisher.operators import Template
from fisherjax.training import Trained
from fisherjax.typing import Array, Centre, Examples, Key, Model, Params, Scalar


@cached
def regmean(
    model: Model,
    *,
    shrink: float = 0.9,
    centre: Centre = "mean",
    received: bool = False,
    batch_size: int = 256,
    max_examples: int | None = FISHER_EXAMPLES,
) -> Algorithm[tuple[()]]:
    """Make RegMean, which merges each dense kernel by least squares over its inputs u.

        W = Wbar + (sum_i p_i H_i)^-1 sum_i p_i H_i (W_i - Wbar),   H_i = shrink(E_i[u u^T]),

    where shrink multiplies off-diagonal entries by a factor. Inputs that are zero at all clients
    keep Wbar = sum_i p_i W_i. All leaves except dense kernels become the unweighted mean over
    clients with a weight.

    The shrinkage adds the diagonal D_i = (1 - shrink) diag(E_i[u u^T]) to shrink E_i[u u^T], and
    pulls each input's row to its mean over clients in proportion to D_i. With another centre C the
    common diagonal D = sum_i p_i D_i pulls to C instead,

        W = C + (sum_i p_i H_i)^-1 sum_i p_i shrink E_i[u u^T] (W_i - C),

    and C is the value of inputs that are zero at all clients, and of all leaves except dense
    kernels.

    Args:
        model: The network; its likelihood is not used. Inputs at positions of sequences that the
            model does not count are left out.
        shrink: Factor of the off-diagonal entries, 0 <= shrink < 1 (default 0.9). With 1, the Gram
            matrices would be singular if inputs are linearly dependent.
        centre: "mean" for the equation above it; "start" for C = W_0, the model that clients
            started from; or "sum" for C = W_0 + sum_i (W_i - W_0) over the clients with a weight,
            which counts a common prior D at W_0 once (see `fedfisher`).
        received: Whether inputs u are those in the network that a client started from (RegMean++)
            or in its own (default). With `merging.exchange(method, merged, federation, key=key,
            trained=trained)`, repeated as often as dense layers follow one another, the inputs of
            each layer are those in the merged network. W_0 is the received model then.
        batch_size: Minibatch size of the Gram pass.
        max_examples: Largest number of a client's examples in its Gram matrices, drawn anew by the
            key of `summarize`; None uses all.

    Returns:
        The algorithm. Updates are {"params": W_i, "grams": {kernel name: E_i[u u^T] [in, in]}}; the
        server needs only sums over clients. The name of a kernel that is stored as
        [outputs, inputs] ends in "^T".

    Raises:
        ValueError: If shrink is out of range, or a centre unknown; on summarize, if the network has
            no dense layer, or the received network is needed and unknown.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> method, params = regmean(model, shrink=0.0), {"w": jnp.array([[[0.0]], [[4.0]]])}
        >>> values = {"params": params, "grams": {"w": jnp.array([[[1.0]], [[3.0]]])}}
        >>> updates = fj.algorithms.Update(values, method.kind)
        >>> print(fj.merging.merge(method, {"w": jnp.zeros((1, 1))}, updates)[0]["w"].round())
        [[3.]]

    Source: the paper above. Deviations from its use in Jhunjhunwala, Wang, Joshi, FedFisher,
        AISTATS 2024: the Gram matrix is a mean over all examples (there up to 16,000); shrink is
        fixed (there selected from {0.1, 0.9} by validation); uploads are not compressed. RegMean++
        takes the inputs of a transformer block from the merged network, and those within the block
        from the client's; here every layer's are from the merged network. The centres are this
        library's.
    """
    checks.model(model)
    link = link_of(centre)
    checks.number("shrink", shrink, below=1.0)
    check_pass(batch_size, max_examples)

    # Without `apply_train`, so that networks that differ only in it share a program.
    plain = model._replace(apply_train=None)

    summarize = by_value(partial(_summarize, plain, received, batch_size, max_examples))

    def shrunk(gram: Array) -> Array:
        return gram * (shrink + (1 - shrink) * jnp.eye(gram.shape[-1], dtype=gram.dtype))

    def reduce(updates: dict[str, Any], weights: Array) -> Any:
        params = updates["params"]
        grams = jax.tree.map(shrunk, updates["grams"])
        leaves = Template.of(params).by_name(params)
        kernels = {name: _transposed(name, leaves[name.removesuffix("^T")]) for name in grams}
        # Least squares need H_i, H_i W_i and W_i of each client, all of which add up.
        factors = grams
        if centre != "mean":  # the diagonal belongs to the centre, not to the clients' kernels
            factors = jax.tree.map(lambda gram: shrink * gram, updates["grams"])
        products = {n: jnp.matmul(factors[n], kernels[n], precision="highest") for n in grams}
        # A product may overflow, and zero times infinity is NaN: it must not have weight zero.
        products = tree.where(weights > 0, products)
        weighted = weighted_sum((grams, products, kernels), weights)
        # Each client counts once, however many examples it has, unless its weight is zero.
        return {"weighted": weighted, "plain": plain_sum(params, weights)}

    def aggregate(key: Key, sums: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        point = centre_point(centre, params, lambda: sums["plain"])
        return _solved(sums, point, shrink), state, ()

    sent = "params and Gram matrices" + " of the received model" * received
    return Algorithm(summarize, aggregate, reduce, kind=sent, model=model, link=link)


def _summarize(
    model: Model,
    received: bool,
    batch_size: int,
    max_examples: int | None,
    key: Key,
    trained: Trained,
    examples: Examples,
    local: Any,
) -> tuple[dict[str, Any], Any]:
    examples = draw(key, examples, max_examples)
    network = trained
    if received:
        start = start_of(trained, "RegMean++ takes the inputs of clients")
        network = trained._replace(params=start)
    grams = _grams(model, batch_size, network.whole, examples)
    return {"params": trained.params, "grams": grams}, local


@partial(jit, static_argnums=(0, 1))
def _grams(model: Model, batch_size: int, params: Params, examples: Examples) -> dict[str, Array]:
    apply, params = leaves.bind_untrained(model, params)

    def batch_sums(x: Array, y: Array | None, w: Array, key: Key | None) -> dict[str, Array]:
        del y, key
        seen = trace(apply, params, x)
        counts = locations.counted(seen, _padding.counted_positions(model, x))
        moments = input_moments(seen, w, expand, counts)
        # The last row and column of a moment belong to the bias, if there is one.
        dense = {
            layer.kernel + "^T" * layer.is_transposed: moments[layer.kernel][
                : layer.rows, : layer.rows
            ]
            for layer in seen.layers
            if layer.is_dense
        }
        if not dense:
            raise ValueError(
                "RegMean merges dense layers, and this network has none; use fedavg or fedfisher."
            )
        return dense

    unlabelled = _padding.drop_uncounted(model, examples)._replace(targets=None)
    return _passes.weighted_mean(batch_sums, unlabelled, key=None, batch_size=batch_size)


@jit
def _solved(sums: Any, centre: Params, shrink: Scalar) -> Params:
    grams, products, points = sums["weighted"].mean()
    rest = sums["plain"].mean() if centre is None else centre
    template = Template.of(rest)
    others = template.by_name(rest)
    if centre is not None:
        points = {n: _transposed(n, others[n.removesuffix("^T")]) for n in points}
        # The mean over clients has its diagonal in the products already.
        products = jax.tree.map(partial(_add_pull, 1 - shrink), products, grams, points)
    dense = jax.tree.map(_least_squares, grams, products, points)
    dense = {name.removesuffix("^T"): _transposed(name, x) for name, x in dense.items()}
    return template.restore(others | dense)


def _add_pull(share: Scalar, product: Array, gram: Array, centre: Array) -> Array:
    """Add the product of the centre with the diagonal that shrinkage adds to the Gram matrix."""
    return product + (share * jnp.diagonal(gram)[:, None] * centre).astype(product.dtype)


def _transposed(name: str, kernel: Array) -> Array:
    """Transpose a kernel, or its solution, if its name ends in "^T"."""
    return kernel.swapaxes(-1, -2) if name.endswith("^T") else kernel


def _least_squares(gram: Array, product: Array, centre: Array) -> Array:
    """Solve gram X = product as a correction to the centre, on the unit-diagonal scale."""
    # A unit diagonal keeps the matrix well conditioned if inputs have different sizes.
    scale = jnp.sqrt(jnp.diagonal(gram))
    is_used = scale > 0
    inverse = jnp.where(is_used, 1 / jnp.where(is_used, scale, 1), 0)[:, None]
    # An input that is always zero has a zero row; a one on the diagonal keeps its correction zero.
    scaled = gram * inverse * inverse.T + jnp.diag(jnp.where(is_used, 0, 1).astype(gram.dtype))
    # The right side of the correction: the centre stays where the solution is undetermined.
    error = product - jnp.matmul(gram, centre.astype(gram.dtype), precision="highest")
    # Positive definite: shrink < 1 adds (1 - shrink) times the identity.
    correction = inverse * linalg.solve_definite(scaled, inverse * error)
    return centre + correction.astype(centre.dtype)
