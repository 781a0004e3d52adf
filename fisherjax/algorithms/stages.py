"""Merges that take long, as loops whose progress can be reported, saved and resumed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fisherjax._core import checks
from fisherjax.algorithms.base import Algorithm, check_algorithm
from fisherjax.typing import Array, Key, Params


class Stages(NamedTuple):
    """A long `aggregate`, written as a loop whose carry is a pytree of arrays that files can hold.

    Called like any other `aggregate`, it runs the whole loop.

    Attributes:
        number: Number of iterations.
        begin: Arguments of `aggregate` -> work, the initial carry.
        advance: (received, work) -> work, one iteration, compiled.
        finish: (work, state) -> (params, state, info).
    """

    number: int
    begin: Callable[..., Any]
    advance: Callable[[Any, Any], Any]
    finish: Callable[[Any, Any], tuple[Params, Any, Any]]

    def __call__(self, key: Key, received: Any, params: Params, state: Any, cohort: Array) -> Any:
        """Run all stages and return the merge; under `jit` they are one compiled loop."""
        work = self.begin(key, received, params, state, cohort)
        if checks.is_traced(work, received):
            step = lambda _, now: self.advance(received, now)  # noqa: E731
            work = jax.lax.fori_loop(0, self.number, step, work)
        else:  # outside of `jit`, `fori_loop` would compile anew in every merge
            for _ in range(self.number):
                work = self.advance(received, work)
        return self.finish(work, state)


def in_stages(
    algorithm: Algorithm,
    after: Callable[[int, Any], None],
    resume: Callable[[Any], tuple[int, Any] | None] = lambda _: None,
) -> Algorithm:
    """Make a merge that takes long report its progress after each stage and resume from there.

    Args:
        algorithm: An algorithm whose `aggregate` is `Stages`, such as `dense`.
        after: Function of (number of completed stages, work), called after each stage, for example
            to report or save the work.
        resume: Function of the initial work, called once at the beginning. It returns the last
            arguments of `after`, or None to start from the first stage. A resumed merge returns the
            same bits as one that was not interrupted.

    Returns:
        The algorithm, for `merging.merge` outside of `jit`.

    Raises:
        ValueError: If the algorithm merges in one stage.

    Example:
        >>> from fisherjax.algorithms.base import averaging
        >>> stages = Stages(
        ...     3, lambda *_: 1, lambda _, work: 2 * work, lambda work, _: (work, (), ())
        ... )
        >>> slow = averaging(aggregate=stages)
        >>> shown = in_stages(slow, lambda done, work: print(done, work))
        >>> shown.aggregate(None, None, None, (), None)[0]
        1 2
        2 4
        3 8
        8
    """
    check_algorithm(algorithm)
    stages = algorithm.aggregate
    if not isinstance(stages, Stages):
        raise ValueError(
            "This method merges in one stage, as most do; expected one whose aggregate is "
            "algorithms.Stages, such as dense. Apply wrappers that change the merge, such as "
            "with_server_optimizer, to the algorithm that in_stages returns."
        )

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        work = stages.begin(key, received, params, state, cohort)
        done, work = resume(work) or (0, work)
        for number in range(done, stages.number):
            work = stages.advance(received, work)
            after(number + 1, work)
        return stages.finish(work, state)

    return algorithm._replace(aggregate=aggregate)
