"""Run one command in several processes, on one host or on many, with the clients divided over all.

JAX starts the processes and connects them. Each of them runs the whole program on the same data,
its devices train and summarize their share of the clients, and what they found is brought to every
process, which then merges as a single one does. Process 0 prints and writes the folder. The others
print errors only; their folder is a temporary copy, so that a run that continues finds the same
results everywhere.
"""

import argparse
import atexit
import contextlib
import dataclasses
import io
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.experimental import multihost_utils

import fisherjax as fj

OPTION = "distributed"
Option = Annotated[
    tuple[str, ...] | None,
    tyro.conf.arg(
        metavar="[ADDRESS:PORT N I]",
        help="Start this command in N processes: an address and port of process 0, N, and the "
        "number I of this one from 0. Without values those of the cluster, as Slurm knows them.",
    ),
]
HEARTBEAT = 30
"""Seconds without a sign of life after which a process counts as dead, and the others end."""
LOST = (
    "another process of this run has ended, and so this one ends too; its own messages say why. "
    "The same commands continue the run"
)


@contextlib.contextmanager
def connected(arguments: Sequence[str], on_terminate: Callable[[int, Any], None]) -> Iterator[None]:
    """Connect this process to the others of the run, if the arguments have the option.

    JAX must not have computed anything, so that it comes before the other options are read. A
    process that fails ends at once, and the others when its heartbeat is missing.

    Raises:
        ValueError: If the values are not an address, a number and an index below it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{OPTION}", nargs="*")
    words = getattr(parser.parse_known_args(arguments)[0], OPTION)
    if words is None:
        yield
        return
    how: dict[str, Any] = {}
    if words:
        address, number, index = _checked(words)
        how = {"coordinator_address": address, "num_processes": number, "process_id": index}
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(**how, heartbeat_timeout_seconds=HEARTBEAT)
    # JAX would only take note of the signal that terminates a process.
    signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        # After the traceback. JAX itself would wait five minutes for others, who wait for this one.
        atexit.register(_end)
        if "Gloo" in str(error):
            raise ValueError(LOST) from error
        raise


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _checked(words: Sequence[str]) -> tuple[str, int, int]:
    with contextlib.suppress(ValueError):
        address, number, index = words[0], *map(int, words[1:])
        host, _, port = address.rpartition(":")
        if host and 0 < int(port) < 2**16 and 0 <= index < number:
            return address, number, index
    raise ValueError(
        f"--{OPTION} is {' '.join(words)}, expected the address and port of process 0, the number "
        f"of processes, and the number of this one from 0, such as --{OPTION} 10.0.0.1:1234 2 0; "
        "or nothing on a cluster that JAX knows"
    )


def is_first() -> bool:
    """Return whether this is process 0, or the only one."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def beside(asked: Any) -> Iterator[Any]:
    """Print and write nothing but in process 0; yield the options with the folder of this one."""
    if is_first():
        yield asked
        return
    with (
        tempfile.TemporaryDirectory() as own,
        open(os.devnull, "w") as nothing,
        contextlib.redirect_stdout(nothing),
    ):
        yield dataclasses.replace(asked, out=Path(own))


def copy(folder: Path) -> None:
    """Copy the files of process 0's folder to that of every other process."""
    if not jax.distributed.is_initialized():
        return
    packed = io.BytesIO()
    if is_first():
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(folder, ".")
    size = multihost_utils.broadcast_one_to_all(np.int32(packed.getbuffer().nbytes))
    sent = np.frombuffer(packed.getbuffer(), np.uint8) if is_first() else np.zeros(size, np.uint8)
    found = multihost_utils.broadcast_one_to_all(sent)
    if not is_first():
        with tarfile.open(fileobj=io.BytesIO(found.astype(np.uint8).tobytes())) as archive:
            archive.extractall(folder, filter="data")


def gathered(found: Any) -> Any:
    """Return arrays that each process can read, in place of those that are spread over several."""

    def gather(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return x
        return jnp.asarray(np.asarray(fj.devices.replicate(x, fj.devices.mesh_of(x))))

    return jax.tree.map(gather, found)
