"""Every process traces the same programs, so that a cache of compiled ones contains them."""

import os
import subprocess
import sys

import pytest

LOWER = """
import hashlib
import jax, jax.numpy as jnp, optax
import fisherjax as fj

key = jax.random.key(0)
images, labels = jnp.linspace(0, 1, 6 * 784).reshape(6, 28, 28, 1), jnp.arange(6)
numbers = jnp.linspace(0, 1, 6 * 64).reshape(6, 64)
networks = {
    "mlp": (fj.networks.MLP((8, 8)), numbers, ("fedfisher_sequential", "fedlpa", "regmean")),
    "cnn": (fj.networks.NormedCNN(), images, ("fedfisher_kfac",)),
}

def lower(function, *arguments):
    text = jax.jit(function).lower(*arguments).as_text()
    return hashlib.sha256(text.encode()).hexdigest()[:16]

for network, (module, inputs, methods) in networks.items():
    params = fj.networks.init(module, key, inputs)
    model = fj.networks.model(module, params, fj.likelihoods.categorical)
    examples = fj.Examples(inputs, labels)

    def kfac(params, examples, fallback=fj.fisher.zero, **options):
        return fj.fisher.kfac(model, params, examples, fallback=fallback, **options)

    def sampled(params, examples):
        return kfac(params, examples, kind=fj.fisher.sampled, key=key)

    def with_diagonal(params, examples):
        return kfac(params, examples, fallback=fj.fisher.diagonal)

    def diagonal(params, examples):
        return fj.fisher.diagonal(model, params, examples)

    for function in (kfac, sampled, with_diagonal, diagonal):
        print(network, function.__name__, lower(function, params, examples))
    federation = fj.clients.federation(examples, [[0, 1, 2], [3, 4, 5]])
    for name in methods:
        algorithm = fj.algorithms.make(name, model)

        def summaries(params, federation):
            trained = fj.training.train(
                model, params, federation, key=key, optimizer=optax.sgd(0.1), epochs=1, batch_size=3
            )
            return fj.merging.summarize(algorithm, trained, federation, key=key)

        def merge(params, updates):
            return fj.merging.merge(algorithm, params, updates, jnp.ones(2) / 2, key=key)[0]

        print(network, name, "summaries", lower(summaries, params, federation))
        updates = jax.eval_shape(summaries, params, federation)
        print(network, name, "merge", lower(merge, params, updates))
"""


@pytest.mark.slow
def test_two_processes_lower_every_pass_and_merge_to_the_same_text():
    """Neither addresses in memory nor hashes of strings, which differ, may order equations."""
    flags = {"PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LOWER]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environments = [os.environ | flags | {"PYTHONHASHSEED": seed} for seed in "12"]
    processes = [subprocess.Popen(command, env=one, **pipe) for one in environments]
    (one, error), (two, _) = [process.communicate() for process in processes]
    assert one.count("\n") == 16, error
    assert one.splitlines() == two.splitlines()
