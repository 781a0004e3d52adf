"""Measure the seconds of a process of Flower, which serves one message or one run and ends.

This module is imported before JAX, so that its first line is the end of the start: Python, Flower,
and the download of the app.
"""

import time

IMPORTED = time.time()
NAMES = ("start", "import", "compile", "work")
"""What a client measures: its start, its imports, compilation by JAX, and the rest."""
# JAX reports the durations of these; reading a kept program counts as compilation.
_COMPILATION = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
_compiled: list[float] = []


def process_began() -> float:
    """Return the time at which this process began; where that is not known, of this import."""
    import os
    from pathlib import Path

    try:
        # Fields are counted from behind the name, which may hold spaces and parentheses.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError):
        return IMPORTED
    return time.time() - age


def listen() -> None:
    """Sum up the seconds that JAX compiles from now on."""
    import jax

    def note(event: str, duration: float, **_: object) -> None:
        if event.endswith(_COMPILATION):
            _compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(note)


def compiled() -> float:
    """Return the seconds of compilation since `listen`."""
    return sum(_compiled, 0.0)
