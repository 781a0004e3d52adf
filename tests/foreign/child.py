"""Run the cells whose names are on the standard input, and write what is found, a line each.

A process of its own, since JAX fixes the number of devices when it starts:
`JAX_NUM_CPU_DEVICES=2 python -m tests.foreign.child`.
"""

import json
import sys
import time
from pathlib import Path

import jax

import fisherjax as fj
from tests.foreign import cells, verify

MOST_MAPS = 20_000
"""Memory maps of compiled programs; beyond 65,530, which is what Linux allows, JAX crashes."""


def main() -> None:
    """Answer each name by a line of JSON: the cell, its findings, and the seconds it took."""
    if jax.config.jax_num_cpu_devices not in (None, -1, 1):
        # Before JAX begins: otherwise XLA may divide operations among threads that are all taken.
        fj.devices.one_per_core()
    for name in sys.stdin.read().split():
        begin = time.perf_counter()
        found = verify.findings(cells.named(name))
        seconds = time.perf_counter() - begin
        print(json.dumps({"cell": name, "seconds": seconds, "findings": found}), flush=True)
        _forget_programs()


def _forget_programs() -> None:
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MOST_MAPS:
        jax.clear_caches()


if __name__ == "__main__":
    main()
