"""What keeps kfac-jax 0.0.8 running on current JAX: the one place that touches its inside.

Since jax 0.9.2 `Primitive.get_bind_params` returns the keyword arguments of `bind` alone, where it
used to return a pair (functions, keyword arguments). kfac-jax 0.0.8 still unpacks the pair, in one
function; its repository is mended, the mended version is not released. jax 0.11 goes further and
takes away names that kfac-jax needs to be imported at all, so the package requires jax < 0.11.
When `tests/test_compat.py` says so, this module and that bound can go.
"""

import re
from typing import Any

import jax
import jax.extend.source_info_util
import kfac_jax
from kfac_jax._src import tag_graph_matcher


def is_patch_needed(
    jax_version: str = jax.__version__, kfac_jax_version: str = kfac_jax.__version__
) -> bool:
    """Tell whether this pair of versions needs the patch.

    Args:
        jax_version: for instance "0.10.2".
        kfac_jax_version: for instance "0.0.8".

    Returns:
        True for jax 0.9.2 or later together with kfac-jax 0.0.8 or earlier.

    Example:
        >>> from fisherjax import compat
        >>> compat.is_patch_needed("0.9.1", "0.0.8"), compat.is_patch_needed("0.10.2", "0.0.8")
        (False, True)
    """
    return _numbers(jax_version) >= (0, 9, 2) and _numbers(kfac_jax_version) <= (0, 0, 8)


def patch_kfac_jax() -> None:
    """Let kfac-jax evaluate equations on this version of JAX; calling it again changes nothing."""
    if is_patch_needed():
        tag_graph_matcher.eval_jaxpr_eqn = _evaluate_equation


def _evaluate_equation(equation: Any, inputs: list[Any]) -> list[Any]:
    """Compute the outputs of one equation of a traced function."""
    parameters = equation.primitive.get_bind_params(equation.params)
    with jax.extend.source_info_util.user_context(equation.source_info.traceback):
        outputs = equation.primitive.bind(*inputs, **parameters)
    return list(outputs) if equation.primitive.multiple_results else [outputs]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release's first three numbers: (0, 10, 2) for "0.10.2.dev1"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
