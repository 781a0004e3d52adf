"""Write the uploads beside this file, and their merges, by fisherjax 0.2.

    PYTHONPATH=SOURCE_OF_0_2 python tests/uploads_of_0_2/write.py

Versions before 0.3 sent every leaf of a network among its params: running statistics of BatchNorm,
which nobody trains, and a frozen layer too. The files were written by commit 7d64596.
"""

from pathlib import Path

import flax.linen
import jax
import numpy as np
import optax

import fisherjax as fj

FOLDER = Path(__file__).parent
CLIENTS, SIZES = ("ann", "bob"), (20, 10)


class Small(flax.linen.Module):
    """A dense layer, its BatchNorm, and a head."""

    @flax.linen.compact
    def __call__(self, inputs, train=False):
        """Compute the outputs."""
        hidden = flax.linen.Dense(3, name="first")(inputs)
        norm = flax.linen.BatchNorm(momentum=0.5, use_running_average=not train, name="norm")
        return flax.linen.Dense(2, name="head")(jax.numpy.tanh(norm(hidden)))


def main() -> None:
    """Train two clients, and write what they send, compressed and not, and the merged models."""
    source, key = np.random.default_rng(0), jax.random.key(0)
    data = source.normal(1, 2, (30, 2)).astype("float32"), source.integers(0, 2, 30)
    federation = fj.clients.federation(data, np.split(np.arange(30), [20]))
    start = fj.networks.init(Small(), key, data[0])
    model = fj.networks.model(Small(), start, fj.likelihoods.categorical)
    how = {"key": key, "optimizer": optax.sgd(0.1), "epochs": 2, "batch_size": 8}
    trained = fj.training.train(model, start, federation, **how)
    plain = fj.algorithms.fedfisher(model)
    small = fj.compression.compressed(plain, fj.compression.quantized(8))
    for kind, method in (("", plain), ("-small", small)):
        updates, paths = fj.merging.summarize(method, trained, federation, key=key), []
        for number, (client, size) in enumerate(zip(CLIENTS, SIZES, strict=True)):
            own = fj.files.of_client(updates, number)
            paths.append(FOLDER / f"{client}{kind}.safetensors")
            said = {"algorithm": "fedfisher_kfac", "client": client, "examples": size}
            fj.files.save_update(paths[-1], own, **said)
        fj.files.merge_files(FOLDER / f"merged{kind}.safetensors", paths)


if __name__ == "__main__":
    main()
