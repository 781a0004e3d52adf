"""Arrays of one merge may lie on several devices, such as updates of clients with one each.

The law: a merge of them is that of the same arrays on one device, the first client's.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj

first, second = devices = jax.devices()
model = fj.Model(lambda p, x: jnp.tanh(x @ p["a"]) @ p["h"], fj.likelihoods.gaussian)
draw = np.random.default_rng(0).normal
start, *models = [{"a": draw(size=(3, 4)), "h": draw(size=(4, 2))} for _ in range(3)]
data = draw(size=(16, 3)), draw(size=(16, 2))
federation = fj.clients.federation(data, [range(8), range(8, 16)])
key = jax.random.key(0)


def alike(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    used = {device for x in jax.tree.leaves(found) for device in x.devices()}
    assert used == {first}, used


def spread(trees):
    return [jax.device_put(tree, device) for tree, device in zip(trees, devices)]


for method in (
    fj.algorithms.fedavg(),
    fj.algorithms.regmean(model),
    fj.algorithms.fedfisher(model, fisher=fj.fisher.kfac),
    fj.algorithms.task_arithmetic(),
):
    together = fj.merging.summarize(method, models, federation, key=key)
    alike(fj.merging.summarize(method, spread(models), federation, key=key), together)
    updates = [jax.tree.map(lambda x: x[n : n + 1], together) for n in range(2)]
    apart = spread(jax.tree.map(lambda x: x[0], update) for update in updates)
    expected = fj.merging.merge(method, start, together, [1, 3])[0]
    for params in (start, jax.device_put(start, second)):
        alike(fj.merging.merge(method, params, apart, [1, 3])[0], expected)
    if method.reduce is not None:
        chunks = [(update, weight) for update, weight in zip(updates, ([1.0], [3.0]))]
        expected = fj.merging.merge_stream(method, start, chunks)[0]
        chunks = list(zip(spread(updates), ([1.0], [3.0])))
        alike(fj.merging.merge_stream(method, jax.device_put(start, second), chunks)[0], expected)

adapters = [{"l": fj.adapters.Adapter(draw(size=(2, 3)), draw(size=(4, 2)))} for _ in range(2)]
adapters = jax.tree.map(jnp.asarray, adapters)
alike(fj.adapters.merge(spread(adapters)), fj.adapters.merge(adapters))
"""


@pytest.mark.long
def test_updates_on_several_devices_are_merged_on_the_first():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    folder = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=folder, check=True)
