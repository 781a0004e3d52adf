"""Predict the memory of a program, by compiling it without running it.

`training.train_memory`, `merging.summarize_memory` and `merging.exchange_memory` predict that of a
run's steps; `experiments.harness.memory` that of a whole command.
"""

from typing import Any, NamedTuple


class Memory(NamedTuple):
    """Memory of a program on one device.

    Attributes:
        resident: Bytes of its arguments and results.
        scratch: Bytes of its temporary arrays.
    """

    resident: int
    scratch: int


def memory(compiled_function: Any, *arguments: Any) -> Memory:
    """Return the memory that a program will need, by compiling it without running it.

    Args:
        compiled_function: The result of `jax.jit`.
        *arguments: Its arguments, as arrays or as shapes (`jax.ShapeDtypeStruct`).

    Returns:
        The bytes. A later call with such arguments does not compile again.

    Example:
        >>> import jax
        >>> memory(jax.jit(lambda x: x + 1), jax.ShapeDtypeStruct((1000,), "float32")).resident
        8000
    """
    analysis = compiled_function.lower(*arguments).compile().memory_analysis()
    # A result in the place of a donated argument is counted once.
    resident = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    return Memory(resident - analysis.alias_size_in_bytes, analysis.temp_size_in_bytes)
