"""FedFisher: merge clients' models by their Fisher information, in one round.

Jhunjhunwala, Wang, Joshi, FedFisher: leveraging Fisher information for one-shot federated learning,
AISTATS 2024, equations 6 to 8 and algorithm 1, with the server's Adam of its experiments.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.algorithms._fisher_updates import fisher_summary, fisher_sums, link_of, solve_sums
from fisherjax.algorithms.base import FISHER_EXAMPLES, Algorithm
from fisherjax.fisher import Diagonal, Operator, automatic, kfac
from fisherjax.fisher.kinds import Kind
from fisherjax.fisher.operators import Blockwise
from fisherjax.quadratic import Quadratic, in_fisher_units, restored
from fisherjax.solvers.base import Info, Solution, Solver, as_data, as_partial, solution
from fisherjax.typing import Array, Centre, Model, Params, Scalar


@cached
def fedfisher(
    model: Model,
    *,
    fisher: Callable[..., Operator] = kfac,
    kind: Kind = automatic,
    damping: Scalar | None = None,
    centre: Centre = "mean",
    solver: Solver | None = None,
    batch_size: int = 64,
    max_examples: int | None = FISHER_EXAMPLES,
    equal_traces: bool = False,
) -> Algorithm[Info]:
    """Make FedFisher, which minimises the clients' Fisher-weighted quadratic on the server.

        W = argmin sum_i p_i 1/2 (W - W_i)^T F_i (W - W_i) + lambda / 2 |W - C|^2.

    Args:
        model: The network and the likelihood of its outputs.
        fisher: Structure of the Fisher information: `fisher.kfac`, `fisher.diagonal`,
            `fisher.full`, or a `functools.partial` of one, such as
            `partial(fisher.kfac, fallback=fisher.diagonal)`.
        kind: `fisher.true`; `fisher.curvature_propagation`, as accurate in one backward pass;
            `fisher.sampled`; or `fisher.empirical`. The default, `fisher.automatic`, is
            `fisher.true`, or curvature propagation if outputs are sequences.
        damping: Damping in units of each block's mean eigenvalue (default 1 for K-FAC, 0 for other
            structures). Leaves to which K-FAC's `fallback` gives a diagonal are not damped.
        centre: The point C that damping pulls to, and that is kept where no client has curvature:
            "mean", sum_i p_i W_i; "start", the model W_0 that clients started from; or "sum",
            W_0 + sum_i (W_i - W_0) over the clients with a weight. If each client's model is the
            mode of a posterior with the same Gaussian prior at W_0, of precision N lambda for N
            examples in all, then "sum" gives the mode for all data, with the prior counted once.
        solver: Solver of the server's system (default `solvers.conjugate_gradients()`).
        batch_size: Minibatch size of the Fisher pass.
        max_examples: Largest number of a client's examples in its Fisher pass, drawn anew by the
            key of `summarize`; None uses all.
        equal_traces: Whether each client divides its Fisher information by its mean eigenvalue, so
            that clients differ in directions and not in the size of their curvature. Otherwise a
            model that is unsure of its examples counts more than others, and one that is certain
            of all of them hardly counts. Use it where clients have equally many classes: the size
            also grows with their number, and rightly so.

    Returns:
        The algorithm. Updates are {"params": W_i, "fisher": F_i}. With diagonal and full Fishers
        the server needs only sums of them, with Kronecker factors each update.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
        >>> method = fedfisher(model, fisher=fj.fisher.full)
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.zeros((2, 1))), [[0], [1]])
        >>> models = [jnp.zeros((2, 1)), jnp.ones((2, 1))]
        >>> updates = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
        >>> print(fj.merging.merge(method, models[0], updates)[0].T)
        [[0. 1.]]

    Source: the paper above, which has no damping, takes 2000 steps of Adam and selects one of them
        by validation (`paper_adam`), weights clients equally in the text (by p_i in the code, as
        here), and compresses uploads to the size of FedAvg's. The centres other than the mean, and
        equal traces, are this library's.
    """
    how = kind, batch_size, max_examples, equal_traces
    summarize, sent = fisher_summary(model, fisher, *how)
    # The annotation shows it before any Fisher is computed; damping and `reduce` depend on it.
    found = inspect.signature(fisher).return_annotation
    operator: type[Blockwise] = found if hasattr(found, "adds_up") else Diagonal
    damping = operator.default_damping if damping is None else damping
    checks.number("damping", damping)
    link = link_of(centre)
    aggregate = solve_sums(solver, damping, centre)
    # If sums suffice, uploads can be streamed, and the server never stores them all.
    plain = partial(fisher_sums, plain=True) if centre == "sum" else fisher_sums
    reduce = plain if operator.adds_up else None
    return Algorithm(summarize, aggregate, reduce, kind=sent, model=model, link=link)


@cached
def paper_adam(
    *,
    epsilon_inside_root: bool,
    steps: int = 2000,
    learning_rate: float = 0.01,
    epsilon: float = 0.01,
    score: Callable[[Params], Array] | None = None,
    score_every: int = 100,
) -> Solver:
    """Make the solver of the FedFisher paper's experiments: Adam with sums instead of averages.

        v = A x - b,  m <- 0.9 m + v,  s <- 0.99 s + v^2,
        x <- x - eta m / (sqrt(s) + eps)   or   x <- x - eta m / sqrt(s + eps),

    without bias correction. Coordinates with |v| far below eps hardly move, which keeps the
    solution near the mean; so does early stopping by validation.

    Args:
        epsilon_inside_root: Whether eps is added inside the root, as in the authors' K-FAC variant,
            or outside, as in their diagonal variant.
        steps: Number of steps.
        learning_rate: Step size eta.
        epsilon: eps.
        score: Function params -> scalar, higher is better, such as accuracy on validation data. The
            solution is the best iterate among those after steps 1, 101, ..., the first of equal
            ones; without a score it is the last iterate.
        score_every: Number of steps between two scores.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> solve = paper_adam(epsilon_inside_root=True, steps=1000)
        >>> print(solve(Quadratic(lambda x: 2 * x, jnp.array([3.0]), jnp.zeros(1))).params.round(2))
        [1.5]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, appendix C and the authors' code. An
        iterate whose score is NaN is skipped; if all are, the solution is the initial point.
    """
    checks.count("steps", steps)
    checks.count("score_every", score_every)
    checks.positive("learning_rate", learning_rate)
    checks.positive("epsilon", epsilon)

    def solve(problem: Quadratic) -> Solution:
        static = (epsilon_inside_root, steps, score_every)
        # As a pytree, its arrays become arguments of the compiled loop rather than constants in it.
        evaluate = None if score is None else as_partial(score)
        # In these units, because epsilon is absolute.
        scaled = as_data(in_fisher_units(problem))
        x = _paper_adam(*static, scaled, evaluate, learning_rate, epsilon)
        return solution(problem, x, steps)

    return solve


@partial(jit, static_argnums=(0, 1, 2))
def _paper_adam(
    epsilon_inside_root: bool,
    steps: int,
    score_every: int,
    problem: Quadratic,
    score: Callable | None,
    learning_rate: Scalar,
    epsilon: Scalar,
) -> Any:
    def move(x: Array, m: Array, s: Array) -> Array:
        rate, eps = (jnp.asarray(value, s.dtype) for value in (learning_rate, epsilon))
        return x - rate * (m / (jnp.sqrt(s + eps) if epsilon_inside_root else jnp.sqrt(s) + eps))

    def step(_: Array, state: tuple) -> tuple:
        x, m, s = state
        # The gradient; m and s are decaying sums of it, not averages as in optax's Adam.
        v = jax.tree.map(jnp.subtract, problem.matvec(x), problem.rhs)
        m = jax.tree.map(lambda m, v: 0.9 * m + v, m, v)
        s = jax.tree.map(lambda s, v: 0.99 * s + v * v, s, v)
        return jax.tree.map(move, x, m, s), m, s

    zeros = jax.tree.map(jnp.zeros_like, problem.init)
    start = (problem.init, zeros, zeros)
    if score is None:
        return jax.lax.fori_loop(0, steps, step, start)[0]

    def scored(round_: Array, carry: tuple) -> tuple:
        state, best, best_score = carry
        first = round_ * score_every
        # The authors compare after steps 1, 101, ...: one step, a score, then the other steps.
        state = step(first, state)
        value = jnp.asarray(score(restored(problem, state[0])), jnp.float32)
        # Strictly greater, so that the first of equal scores is kept.
        better = value > best_score
        best = jax.tree.map(lambda new, old: jnp.where(better, new, old), state[0], best)
        # The last round may be shorter; the first step of each round is done already.
        left = jnp.minimum(score_every, steps - first) - 1
        state = jax.lax.fori_loop(0, left, step, state)
        return state, best, jnp.where(better, value, best_score)

    # The initial point is no candidate, as in the authors' code: any score is better.
    carry = (start, problem.init, jnp.float32(-jnp.inf))
    return jax.lax.fori_loop(0, -(-steps // score_every), scored, carry)[1]
