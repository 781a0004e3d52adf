"""Spread over devices or processes, training, summaries and merges are those of one device."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("distributed.py")


def start(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=SCRIPT.parents[1],
    )


def finish(*processes):
    """Wait for all, and stop all where one fails or hangs."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
            yield output.splitlines()[-1]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.long
def test_eight_devices_give_the_result_of_one():
    assert list(finish(start(8))) == ["1 processes, 8 devices"]


@pytest.mark.slow
def test_two_processes_give_the_result_of_one():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    outputs = list(finish(start(2, port, 0), start(2, port, 1)))
    assert outputs == ["2 processes, 4 devices"] * 2


@pytest.mark.slow
def test_long_loops_of_large_products_on_every_core_are_right():
    # Where XLA divides elementwise operations results are wrong after 500 turns.
    program = """
import jax, jax.numpy as jnp, numpy as np, fisherjax as fj
fj.devices.one_per_core()

def norms(key):
    # Of scaled identities, which the compiler does not know: every product is known.
    matrices = jax.random.uniform(key, (24, 1, 1), minval=1) * jnp.eye(400)
    identities = jnp.tile(jnp.eye(8), (24, 1, 1))
    def turn(x, _):
        y = jax.vmap(lambda a, b: jnp.linalg.multi_dot([a, x, b]))(matrices, identities).sum(0)
        return y / jnp.linalg.norm(y), jnp.linalg.norm(y)
    x = jax.random.normal(key, (400, 8))
    found = jax.lax.scan(turn, x / jnp.linalg.norm(x), length=600)[1]
    return found / jnp.trace(matrices.sum(0)) * 400

mesh = fj.devices.client_mesh()
keys = jax.vmap(jax.random.key)(jnp.arange(mesh.size))
run = jax.jit(lambda keys: fj.parallel.spread_clients(norms, keys, mesh=mesh))
np.testing.assert_allclose(fj.parallel.in_order(run(keys), mesh), 1, rtol=1e-4)
"""
    options = {"env": os.environ | {"JAX_PLATFORMS": "cpu"}, "cwd": SCRIPT.parents[1]}
    subprocess.run([sys.executable, "-c", program], check=True, **options)


@pytest.mark.long
def test_every_core_becomes_a_device_unless_somebody_has_chosen():
    program = "import jax, fisherjax as fj; fj.devices.one_per_core(); print(jax.device_count())"
    cores = str(len(os.sched_getaffinity(0)))
    own = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    chosen = [
        ({}, cores),
        ({"JAX_NUM_CPU_DEVICES": "3"}, "3"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "3"),
    ]
    for told, expected in chosen:
        options = {"env": own | told | {"JAX_PLATFORMS": "cpu"}, "cwd": SCRIPT.parents[1]}
        found = subprocess.check_output([sys.executable, "-c", program], text=True, **options)
        assert found.strip() == expected
