"""Merges that take long, as a loop that can be followed, saved and resumed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fisherjax._core import checks
from fisherjax.algorithms.base import Algorithm, check_algorithm
from fisherjax.typing import Array, Key, Params


class Stages(NamedTuple):
    """A long `aggregate` as a loop, whose carry is a pytree of arrays that files can hold.

    It is called as any other `aggregate`, and then plays all of the loop.

    Attributes:
        number: How often it advances.
        begin: The arguments of `aggregate` -> work.
        advance: (received, work) -> work, compiled.
        finish: (work, state) -> (params, state, info).
    """

    number: int
    begin: Callable[..., Any]
    advance: Callable[[Any, Any], Any]
    finish: Callable[[Any, Any], tuple[Params, Any, Any]]

    def __call__(self, key: Key, received: Any, params: Params, state: Any, cohort: Array) -> Any:
        """Merge in all stages, under `jit` as one loop."""
        work = self.begin(key, received, params, state, cohort)
        if checks.is_traced(work, received):
            step = lambda _, now: self.advance(received, now)  # noqa: E731
            work = jax.lax.fori_loop(0, self.number, step, work)
        else:  # a loop outside of `jit` would compile anew in every merge
            for _ in range(self.number):
                work = self.advance(received, work)
        return self.finish(work, state)


def in_stages(
    algorithm: Algorithm,
    after: Callable[[int, Any], None],
    resume: Callable[[Any], tuple[int, Any] | None] = lambda _: None,
) -> Algorithm:
    """Let a merge that takes long say after each stage how far it is, and go on from there.

    Args:
        algorithm: One whose `aggregate` is `Stages`, such as `dense`.
        after: Called with the number of stages that are done and the work, to show and to save it.
        resume: Called with the work at the beginning, gives what `after` was called with last, or
            None to start afresh. What follows is what would have followed, bit for bit.

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
            "algorithms.Stages, such as dense. Wrappers that change the merge, such as "
            "with_server_optimizer, go around what in_stages returns."
        )

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        work = stages.begin(key, received, params, state, cohort)
        done, work = resume(work) or (0, work)
        for number in range(done, stages.number):
            work = stages.advance(received, work)
            after(number + 1, work)
        return stages.finish(work, state)

    return algorithm._replace(aggregate=aggregate)
