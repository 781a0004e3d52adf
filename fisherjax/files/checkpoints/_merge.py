"""Merge checkpoints of any size: compare their leaves, plan the files to write, and write them."""

import hashlib
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fisherjax import algorithms
from fisherjax._core import checks
from fisherjax._upload_checks import check_any_left, check_not_all_zero, check_weights
from fisherjax.algorithms import Pieces
from fisherjax.clients import shares
from fisherjax.files import base
from fisherjax.files._limits import ArrayKind, Limits
from fisherjax.files._shards import (
    SHARD,
    Checkpoint,
    is_folder,
    of_file,
    open_checkpoint,
    pieces_of,
)
from fisherjax.files._shown import shown
from fisherjax.files.checkpoints._compared import UNEQUAL, Sources, compare, in_memory
from fisherjax.files.checkpoints._fishers import check_fishers, hash_of, open_fisher
from fisherjax.files.checkpoints._leaf_writers import Task, kind_of, write_layers, write_pieces
from fisherjax.files.checkpoints._pieces import Plan, check_finite, find_nonfinite
from fisherjax.files.checkpoints._plain import check_names, checkpoint_method, plain_record
from fisherjax.files.checkpoints._unfinished import Shard, unfinished
from fisherjax.files.uploads import update as uploads
from fisherjax.files.uploads._reads import check_clients
from fisherjax.files.uploads._records import Merge


def place_of(out: Any, first: Any, start: Any) -> Path:
    """Return the path to write: a file, or a new folder if the first checkpoint or start is one.

    Raises:
        ValueError: If it is neither.
    """
    first = first[0] if isinstance(first, tuple | list) and first else first
    is_path = isinstance(out, (str, bytes, os.PathLike))
    if not (is_path and (is_folder(first) or is_folder(start))):
        return base.checked_path(out, SHARD)
    path = Path(os.fsdecode(out))
    if path.suffix == SHARD:
        return base.checked_path(path, SHARD)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{str(path)!r} exists: name a new folder, or remove it first")
    return path


def open_sources(paths: list[Any], limits: Limits) -> tuple[list[Any], Sources]:
    """Open uploads, or checkpoints and their Fisher files."""
    found, models, fishers = [], [], []
    for each in paths:
        path, *beside = each if isinstance(each, tuple | list) else (each,)
        if is_folder(path):
            models.append(open_checkpoint(path, limits))
        else:
            file = base.opened(path, limits)
            if file.about.get("what", "model") == "model":
                models.append(of_file(file))
            else:
                found.append(uploads.described(file, limits))
        fishers += [open_fisher(other, limits) for other in beside]
    # Their weights are not comparable: one has a number of examples, the other has none.
    if models and found:
        plain = "was written by another program: its arrays have no description"
        raise ValueError(
            f"{str(models[0].path)!r} {'is a model' if models[0].about else plain}; expected an "
            "upload of files.save_update like the others, or only checkpoints."
        )
    if fishers and len(fishers) != len(models):
        raise ValueError(
            f"{len(fishers)} Fisher files were given for {len(models)} checkpoints; expected one "
            "beside each checkpoint, and none beside an upload."
        )
    return found, Sources(models, fishers, None)


def merge_plain(
    out: Path, sources: Sources, start: Any, asked: tuple[Any, ...], how: dict[str, Any]
) -> Merge:
    """Merge checkpoints; see `merge_files`."""
    algorithm, weights, unequal, options = asked
    checks.one_of("unequal", unequal, UNEQUAL)
    models, limits = sources.models, how["limits"]
    if start is not None:
        is_files = is_folder(start) or str(start).endswith(SHARD)
        opened = open_checkpoint(start, limits) if is_files else in_memory(start, limits)
        sources = sources._replace(start=opened)
    check_out(out, [stored.path for x in models for stored in x.arrays.values()])
    _check_outside(out, sources)
    check_clients([plain_record(model) for model in models])
    _check_files(models)
    # The method for which Fisher files are is told by what they hold.
    default = sources.fishers[0].algorithm if sources.fishers else plain_record(models[0]).algorithm
    name = default if algorithm is None else algorithm
    row, method = checkpoint_method(name, options, sources.fishers)
    weights = check_weights(np.ones(len(models)) if weights is None else weights, len(models))
    check_not_all_zero(weights)
    known = algorithms.options(name) | options
    about = about_of(name, method.kind, options)
    task = Task(name, row, method, known, weights, unequal, about=about, **how)
    return _merge(out, sources, task)


def _merge(out: Path, sources: Sources, task: Task) -> Merge:
    """Merge checkpoints to a file, or to a folder with the shards of the start or the first one."""
    models, pieces = sources.models, task.row.pieces
    records = [plain_record(model) for model in models]
    for model in models:
        check_names(repr(str(model.path)), list(model.arrays))
    needs_start = task.method.link.reads_start
    compared = compare(sources, task.unequal, needs_start)
    covered = check_fishers(sources.fishers, models, compared.merged)
    taken = compared.taken | {
        leaf: "averaged, as Fisher files lack it"
        for leaf in compared.merged
        if sources.fishers and leaf not in covered
    }
    option = pieces and (pieces.kept or pieces.floor)
    plan = Plan(
        models=models,
        fishers=sources.fishers,
        start=sources.start if needs_start else None,
        weights=task.weights,
        method=task.method,
        pieces=pieces or Pieces(),
        share=float(task.options[option]) if option else 0.0,
        leaves=compared.merged,
        covered=covered,
    )
    if task.on_nonfinite == "drop" and (left_out := find_nonfinite(plan)):
        weights = np.where([str(model.path) in left_out for model in models], 0, task.weights)
        check_any_left(weights)
        plan = plan._replace(weights=weights)
        warnings.warn(warning_of(left_out), stacklevel=4)
    else:
        left_out = {}
    p = shares(plan.weights)
    clients = {str(model.path): float(share) for model, share in zip(models, p, strict=True)}
    about = task.about | {"clients": clients, "left_out": left_out}
    kinds = {leaf: kind_of(compared, records, leaf) for leaf in compared.merged}
    kinds |= {name: stored.kind for name, stored in compared.copied.items()}
    shards, folder = _shards(out, sources, compared.like, kinds, (about, task.limits))
    index = _index(shards) if folder is not None and folder.index else b""
    others = [] if folder is None else [folder.path / name for name in folder.others]
    more = len(index) + sum(path.stat().st_size for path in others)
    votes: dict[str, np.ndarray] = {}
    with unfinished(out, shards, _key(sources, task, about), more) as output:
        for name, stored in compared.copied.items():
            if name not in output.done:
                for piece in pieces_of(stored):
                    check_finite(piece, stored.path, name)
                    output.put(name, piece)
                output.finish(name)
        write = write_layers if pieces is None else write_pieces
        write(plan, task, compared, records, output, votes)
        if folder is not None and index:
            (output.folder / folder.index).write_bytes(index)
        for path in others:
            copy = output.folder / path.relative_to(folder.path)  # pyright: ignore
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    copied_from = str(folder.path) if others else ""  # pyright: ignore
    return Merge(task.name, tuple(records), p, left_out, votes, taken, copied_from)


def warning_of(left_out: dict[str, str]) -> str:
    """Say which clients were left out, in one line that can be printed."""
    clients = "; ".join(f"client {client!r} for leaf '{x}'" for client, x in left_out.items())
    return shown(f"Left out, as uploads that are not finite: {clients}.")


def about_of(name: str, kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Describe a merge, for the header of its result."""
    # As text, because options may be functions, which JSON cannot hold.
    texts = {key: str(value) for key, value in options.items()}
    return {"what": "model", "algorithm": name, "kind": kind, "options": texts}


def check_out(out: Path, paths: list[Path]) -> None:
    """Check that the file to write is none of those that are read."""
    # Compared as files, because one file may have several paths.
    if out.is_file() and any(out.samefile(path) for path in {*paths} if path != Path()):
        raise ValueError(f"{str(out)!r} is one of the uploads: write the model to another file.")


def _check_outside(out: Path, sources: Sources) -> None:
    """Check that the result is in none of the folders that are read, whose files it would join."""
    target = Path(os.path.realpath(out))
    for source in (*sources.models, sources.start):
        if source is None or not source.is_folder:
            continue
        if target.is_relative_to(folder := os.path.realpath(source.path)):
            raise ValueError(
                f"{str(out)!r} is in {folder!r}, which is read: write to a place outside of it."
            )


def _check_files(models: list[Checkpoint]) -> None:
    """Check that no file belongs to two checkpoints, such as a folder and the file in it."""
    owners: dict[str, Checkpoint] = {}
    for model in models:
        for path in {os.path.realpath(stored.path) for stored in model.arrays.values()}:
            if (first := owners.setdefault(path, model)) is not model:
                raise ValueError(
                    f"{path!r} is read twice, by {str(first.path)!r} and {str(model.path)!r}: "
                    "merge only one of them."
                )


def _shards(
    out: Path,
    sources: Sources,
    like: Checkpoint,
    kinds: dict[str, ArrayKind],
    how: tuple[dict[str, Any], Limits],
) -> tuple[dict[str, Shard], Checkpoint | None]:
    """Plan the files of the result; return the folder too that has the same ones, if any."""
    folder = next((x for x in (like, sources.models[0]) if x.is_folder), None)
    if out.suffix == SHARD or folder is None:
        [metadata] = list(like.metadata.values())[:1]
        return {out.name: Shard(kinds, *base.header_of(out, kinds, *how, metadata))}, None
    owners = {name: place for place, names in folder.shards.items() for name in names}
    first = next(iter(folder.shards))
    names: dict[str, dict[str, ArrayKind]] = {}
    for name, kind in kinds.items():
        names.setdefault(owners.get(name, first), {})[name] = kind
    return {
        place: Shard(own, *base.header_of(out / place, own, *how, folder.metadata[place]))
        for place, own in sorted(names.items())
    }, folder


def _index(shards: dict[str, Shard]) -> bytes:
    places = {name: place for place, each in shards.items() for name in each.kinds}
    size = sum(kind.nbytes for each in shards.values() for kind in each.kinds.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


def _key(sources: Sources, task: Task, about: dict[str, Any]) -> str:
    """Return a text that differs for merges of other files, or by other methods."""
    digest = hashlib.sha256(repr((base.version(), about, task.unequal)).encode())
    for source in (*sources.models, *sources.fishers, sources.start):
        for name, stored in sorted(() if source is None else source.arrays.items()):
            digest.update(repr((name, stored.kind)).encode())
            if stored.array is not None:
                digest.update(hash_of(stored.array).encode())
            else:
                about_file = os.stat(stored.path)
                where = os.path.realpath(stored.path), stored.offset
                digest.update(repr((*where, about_file.st_size, about_file.st_mtime_ns)).encode())
    return digest.hexdigest()
