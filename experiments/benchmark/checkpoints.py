"""Measure the time and memory of merging checkpoints of 1.5 billion numbers, in bfloat16.

    python -m experiments.benchmark.checkpoints FOLDER write
    python -m experiments.benchmark.checkpoints FOLDER bytes
    python -m experiments.benchmark.checkpoints FOLDER ties

`write` writes a start, two checkpoints of two shards each and their diagonal Fisher files, 15 GB in
all, of the shapes of a transformer with 28 layers and a vocabulary of 151,936. `bytes` reads the
checkpoints and writes as many bytes as one has, which no merge can undercut. Any other word is the
algorithm of a merge. Each prints seconds, seconds of cores, gigabytes, and the peak memory of its
process in MiB. `--layers 3 --vocabulary 15000` makes a tenth of it.
"""

import argparse
import json
import os
import resource
import shutil
import time
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import fisherjax as fj

WIDTH, HIDDEN, KEYS = 1536, 8960, 256
_NAMES = "start", "a", "b"


def _shapes(layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, WIDTH)}
    for layer in range(layers):
        rows = {"q": WIDTH, "k": KEYS, "v": KEYS, "o": WIDTH}
        block = {f"self_attn.{name}_proj.weight": (size, WIDTH) for name, size in rows.items()}
        block |= {f"self_attn.{name}_proj.bias": (rows[name],) for name in "qkv"}
        block |= {f"mlp.{name}_proj.weight": (HIDDEN, WIDTH) for name in ("gate", "up")}
        block |= {"mlp.down_proj.weight": (WIDTH, HIDDEN), "input_layernorm.weight": (WIDTH,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return shapes | {"model.norm.weight": (WIDTH,)}


def _numbers(name: str, leaf: str, shape: tuple[int, ...]) -> np.ndarray:
    """Make the entries of a leaf: the start's, and of another model the start's and its change."""

    def drawn(*words: str) -> np.ndarray:
        source = np.random.default_rng(zlib.crc32(repr(words).encode()))
        block = source.standard_normal(1 << 20, np.float32)
        return np.resize(block, shape)

    made = 0.02 * drawn("start", leaf)
    if name != "start":
        made += 0.002 * drawn(name, leaf)
    return made.astype(ml_dtypes.bfloat16)


def _write(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    halves = np.array_split(list(shapes), 2)
    for name in _NAMES:
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        places = {}
        model = {leaf: _numbers(name, leaf, shape) for leaf, shape in shapes.items()}
        for number, half in enumerate(halves, 1):
            shard = f"model-0000{number}-of-00002.safetensors"
            places |= dict.fromkeys(map(str, half), shard)
            own = {str(leaf): model[leaf] for leaf in half}
            save_file(own, folder / name / shard, {"format": "pt"})
        index = {"metadata": {}, "weight_map": places}
        (folder / name / "model.safetensors.index.json").write_text(json.dumps(index))
        if name != "start":
            entries = {leaf: np.abs(x) for leaf, x in model.items()}
            path = folder / f"{name}.fisher.safetensors"
            fj.files.save_fisher(path, fj.fisher.Diagonal(entries), params=model)
            del entries
        del model


def _copy_bytes(folder: Path) -> int:
    """Read the checkpoints, and write as many bytes as one has; return how many these are."""
    total = 0
    for name in ("a", "b"):
        with open(folder / "copied", "wb") as out:
            for path in sorted((folder / name).glob("*.safetensors")):
                with open(path, "rb") as file:
                    while content := file.read(1 << 23):
                        total += len(content)
                        if name == "a":
                            total += out.write(content)
            out.flush()
            os.fsync(out.fileno())
    (folder / "copied").unlink()
    return total


def main() -> None:
    """Run one way, and print what it took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("way", help="write, bytes, or an algorithm such as ties")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    asked = parser.parse_args()
    begin, folder = time.perf_counter(), asked.folder
    shapes, moved = _shapes(asked.layers, asked.vocabulary), 0
    if asked.way == "write":
        print(f"{sum(map(np.prod, shapes.values())):,} numbers")
        _write(folder, shapes)
    elif asked.way == "bytes":
        moved = _copy_bytes(folder)
    else:
        out, start = folder / "merged", None
        paths: list = [folder / "a", folder / "b"]
        model = fj.Model(lambda _, x: x, fj.likelihoods.categorical)
        if fj.algorithms.make(asked.way, model).link.reads_start:
            start = folder / "start"
        if fj.algorithms.METHODS[asked.way].reads == {"fisher": fj.fisher.Diagonal}:
            paths = [(path, folder / f"{path.name}.fisher.safetensors") for path in paths]
        merged = fj.files.merge_files(out, paths, algorithm=asked.way, start=start)
        moved = sum(record.nbytes for record in merged.records)
        moved += sum(path.stat().st_size for path in out.glob("*.safetensors"))
        shutil.rmtree(out)
    seconds = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_SELF)
    cores = used.ru_utime + used.ru_stime
    peak = used.ru_maxrss // 1024
    print(f"{asked.way}: {seconds:.1f} s, {cores:.1f} core s, {moved / 1e9:.2f} GB, {peak} MiB")


if __name__ == "__main__":
    main()
