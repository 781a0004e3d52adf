"""Draw the cohort of a round, all clients alike or in proportion to their availability."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import clients
from fisherjax.typing import Array, Key


def check_availability(
    availability: Callable[[Array], Array] | None, number: Array, num_clients: int, cohort: int
) -> None:
    """Check the chances of a round, and that a cohort of clients is available; else ValueError."""
    if availability is None:
        return
    # A function without a result returns None, of which NumPy makes an array without a shape.
    chances = np.asarray(availability(number))
    if chances.shape != (num_clients,) or not (np.isfinite(chances) & (chances >= 0)).all():
        raise ValueError(
            f"availability returned {chances.dtype}{list(chances.shape)} for round {number}; "
            "expected a finite number, zero or more, for each of the "
            f"{num_clients} clients."
        )
    if cohort > (available := int((chances > 0).sum())):
        raise ValueError(
            f"cohort is {cohort}, but {available} of {num_clients} clients are available in round "
            f"{number}; expected at most as many. Choose a smaller cohort."
        )


def check_chances(availability: Callable[[Array], Array] | None, first: Array, rounds: int) -> None:
    """Check the chances of all rounds that are to run, one round in memory.

    Raises:
        TypeError: If the chances cannot be computed of a traced number, as in a round's program.
        ValueError: If a chance is not finite or below zero.
    """
    if availability is None:
        return

    def is_sound(number: Array) -> Array:
        chances = jnp.asarray(availability(number))
        return (jnp.isfinite(chances) & (chances >= 0)).all()

    numbers = first + jnp.arange(rounds, dtype=first.dtype)
    try:
        sound = jax.lax.map(is_sound, numbers)
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            "availability needs the value of the round's number, which is traced; expected a "
            "function of jax.numpy. Index jnp.asarray(table)[number] and choose by jnp.where."
        ) from error
    if not sound.all():
        raise ValueError(
            f"availability returned a chance that is not finite or below zero for round "
            f"{int(numbers[sound.argmin()])}; expected a finite number, zero or more, in every "
            "round. Return zero for a client that is not available."
        )


def draw_cohort(key: Key, num_clients: int, cohort: int, chances: Array | None = None) -> Array:
    """Draw clients without replacement, in ascending order.

    With chances [M], each is drawn with a probability in proportion to its chance among those who
    are left; a client with the chance zero is drawn if nobody else is left.
    """
    if cohort == num_clients:
        return jnp.arange(num_clients)
    key = jax.random.fold_in(key, clients.COHORT)
    if chances is None:
        drawn = jax.random.permutation(key, num_clients)[:cohort]
    else:
        drawn = jax.random.choice(key, num_clients, (cohort,), replace=False, p=chances)
    return jnp.sort(drawn)
