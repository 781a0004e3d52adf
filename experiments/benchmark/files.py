"""Measure a process's peak memory while it merges four clients' files, layer by layer or at once.

    python -m experiments.benchmark.files FOLDER write 8
    python -m experiments.benchmark.files FOLDER files 8
    python -m experiments.benchmark.files FOLDER memory 8

`write` writes clients with a number of dense layers of 1024 x 1024 and their K-FAC factors. The
other words run in separate processes and print MiB: `files` calls `files.merge_files`, `memory`
loads all uploads, and `nothing` merges none.
"""

import argparse
import resource
from pathlib import Path

import jax
import jax.numpy as jnp

import fisherjax as fj

WAYS = ("write", "files", "memory", "nothing")
_CLIENTS, _WIDTH = 4, 1024


def _model(layers: int) -> fj.Model:
    def apply(params: dict, x: jax.Array) -> jax.Array:
        for number in range(layers):
            x = x @ params[f"dense{number}"]
        return x[:, :2]

    return fj.Model(apply, fj.likelihoods.gaussian)


def _write(method: fj.algorithms.Algorithm, layers: int, paths: list[Path]) -> None:
    for client, path in enumerate(paths):
        *keys, key = jax.random.split(jax.random.key(client), layers + 1)
        shape = _WIDTH, _WIDTH
        params = {f"dense{i}": jax.random.normal(k, shape) / 32 for i, k in enumerate(keys)}
        examples = fj.Examples(jax.random.normal(key, (64, _WIDTH)))
        values = {"params": params, "fisher": fj.fisher.kfac(_model(layers), params, examples)}
        update = fj.algorithms.Update(values, method.kind)
        who = {"client": str(client), "examples": 1}
        fj.files.save_update(path, update, algorithm="fedfisher_kfac", **who)


def main() -> None:
    """Run one way, and print the peak memory in MiB."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("layers", type=int)
    asked = parser.parse_args()
    paths = [asked.folder / f"client{number}.safetensors" for number in range(_CLIENTS)]
    method = fj.algorithms.fedfisher(_model(asked.layers))
    if asked.way == "write":
        asked.folder.mkdir(parents=True, exist_ok=True)
        _write(method, asked.layers, paths)
    elif asked.way == "files":
        fj.files.merge_files(asked.folder / "merged.safetensors", paths)
    elif asked.way == "memory":
        sent = [fj.files.load_update(path)[0] for path in paths]
        updates = jax.tree.map(lambda *leaves: jnp.stack(leaves), *sent)
        start = jax.tree.map(lambda leaf: leaf[0], updates.values["params"])
        jax.block_until_ready(fj.merging.merge(method, start, updates)[0])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


if __name__ == "__main__":
    main()
