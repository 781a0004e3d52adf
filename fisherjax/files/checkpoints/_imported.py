"""Compute the Fisher file of a checkpoint by a function of a user's Python file."""

import hashlib
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import algorithms, clients, merging, tree
from fisherjax._core import checks
from fisherjax.files import base
from fisherjax.files.arrays import load_arrays
from fisherjax.files.checkpoints._fishers import save_fisher
from fisherjax.files.checkpoints._plain import is_filed
from fisherjax.files.uploads.update import of_client
from fisherjax.training import Trained


def _check_replaceable(out: Path) -> None:
    """Check that no checkpoint is replaced by those who forget the name of the file to write."""
    if not out.is_file():
        return
    try:
        is_fisher = base.opened(out).about.get("what") == "fisher"
    except ValueError:
        is_fisher = False
    if not is_fisher:
        raise ValueError(
            f"{str(out)!r} is the file to write, but it exists, and is no Fisher file: name another"
            " one, or remove it first."
        )


def save_imported(
    out: str,
    checkpoint: str,
    source: str,
    algorithm: str,
    *,
    start: str | None = None,
    options: dict[str, Any],
    seed: int,
) -> int:
    """Compute what an algorithm reads of a checkpoint besides its params, and write it to a file.

    Args:
        out: Path of the Fisher file.
        checkpoint: A .safetensors file, or a folder of shards.
        source: "FILE.py:FUNCTION", of a function that returns the model and the data. Its params
            are a dict by the names of the checkpoint's arrays of floats, in float32.
        algorithm: A name in `algorithms.METHODS`.
        start: The checkpoint that clients started from, which RegMean++ reads.
        options: Options of the algorithm, such as `max_examples`.
        seed: Seed of what is drawn.

    Returns:
        The number of params.

    Raises:
        ValueError: If there is no such function, or it returns something else; if the algorithm
            reads no Fisher file, or the start, which is not given.
    """
    path, _, name = source.rpartition(":")
    if not Path(path).is_file() or not name.isidentifier():
        raise ValueError(
            f"--import is {source!r}; expected FILE.py:FUNCTION, of a file that exists"
        )
    known = [name for name, row in algorithms.METHODS.items() if is_filed(row)]
    checks.one_of("algorithm", algorithm, known)
    _check_replaceable(base.checked_path(out, ".safetensors"))
    params, begin = _floats_of(checkpoint), None if start is None else _floats_of(start)
    # As Python itself does for a file that it runs, which may import others beside it.
    sys.path.insert(0, str(Path(path).resolve().parent))
    function = runpy.run_path(path).get(name)
    made = function() if callable(function) else None
    if not (isinstance(made, tuple | list) and len(made) == 2):
        found = "no function" if function is None else f"a {type(made).__name__}"
        raise ValueError(
            f"{path!r} has {found} as {name!r}; expected a function without arguments that returns "
            "a fj.Model and its data"
        )
    model, data = made
    method = algorithms.make(algorithm, model, **options)
    key, federation = jax.random.key(seed), clients.federation([data])
    trained = Trained(tree.stack([params]), begin)
    sent = of_client(merging.summarize(method, trained, federation, key=key), 0)
    values = {name: x for name, x in sent.values.items() if name != "params"}
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    how = f"{sent.kind}; {Path(path).name}:{name}, sha256 {digest}; options {options}; seed {seed}"
    params = sent.values["params"]
    save_fisher(out, *values.values(), params=params, source=how)
    return sum(x.size for x in jax.tree.leaves(params))


def _floats_of(checkpoint: str) -> dict[str, np.ndarray]:
    """Read the params of a checkpoint in float32; counters and masks are none."""
    arrays = load_arrays(checkpoint)
    return {
        x: y.astype(np.float32) for x, y in arrays.items() if jnp.issubdtype(y.dtype, jnp.floating)
    }
