"""Merge uploads and checkpoints, inspect files, compute Fisher files, check this machine.

`python -m fisherjax merge|inspect|fisher|check`.
"""

import io
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from fisherjax import _command_line, devices, files, tree
from fisherjax._core import checks
from fisherjax._self_check import IDENTITIES
from fisherjax.files import base
from fisherjax.files._shown import shown, shown_errors
from fisherjax.files.checkpoints import _fishers
from fisherjax.files.checkpoints._imported import save_imported
from fisherjax.files.uploads import _description_checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 on success. 1 if the input is invalid: then one line on stderr says why, and no file is
        written. Also 1 if `check` found a fault.
    """
    given = vars(_command_line.parser(__doc__ or "", _COMMANDS).parse_args(arguments))
    command = given.pop("command")
    if arguments is None:  # only when this is the program of the process
        # Python would end at once, and leave temporary files.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        # Not every locale has all characters of names.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        if command is not _check:  # which must not change what it checks
            devices.disable_faulty_fusion()
    try:
        with warnings.catch_warnings(record=True) as caught, shown_errors():
            warnings.simplefilter("always")
            found_faults = command(**given)
    except (OSError, TypeError, ValueError) as error:
        # That of a system call names a path, and is not ours to change.
        print("error:", shown(error), file=sys.stderr)
        return 1
    for line in dict.fromkeys(shown(warning.message) for warning in caught):
        print("warning:", line, file=sys.stderr)
    return int(bool(found_faults))


def _limits(options: list[tuple[str, Any]]) -> files.Limits:
    for name, value in options:
        checks.one_of("limit", name, files.Limits._fields)
        checks.count(f"limit {name}", value)
    return files.Limits(**dict(options))


def _merge(
    out: str,
    uploads: list[str],
    fisher: list[str] | None,
    damping: float | None,
    options: list[tuple[str, Any]],
    **how: Any,
) -> None:
    how["limits"] = _limits(how["limits"])
    _check_out(out, how["limits"])
    given: dict[str, Any] = dict(options) | ({} if damping is None else {"damping": damping})
    if fisher is not None and len(fisher) != len(uploads):
        raise ValueError(f"--fisher has {len(fisher)} files for {len(uploads)} checkpoints")
    if any((Path(path) / "adapter_config.json").is_file() for path in uploads):
        _merge_adapters(out, uploads, fisher, how, given)
        return
    paths = uploads if fisher is None else list(zip(uploads, fisher, strict=True))
    progress = _progress if sys.stderr.isatty() else None
    merged = files.merge_files(out, paths, progress=progress, **how, **given)
    clients = (
        (x.client, _examples(x), f"{share:.3f}", str(x.nbytes), _finite(x.client, merged))
        for x, share in zip(merged.records, merged.shares, strict=True)
    )
    _table(("client", "examples", "share", "bytes", "finite"), clients)
    for client, leaf in merged.left_out.items():
        print(shown(f"{client} is left out: {leaf} is not finite"))
    print()
    first, number = merged.records[0], len(merged.records)
    if merged.taken:
        _table(("leaf", "what was done"), merged.taken.items())
        print()
    if not first.is_plain or fisher:
        votes = ((name, *(f"{v:.3f}" for v in vote)) for name, vote in merged.votes.items())
        _table(("vote", *(record.client for record in merged.records)), votes)
        print()
    if first.is_plain:
        how_weighed = "equal weights" if how["weights"] is None else "the weights of --weights"
        is_mean = merged.algorithm == first.algorithm
        method = "The mean" if is_mean else merged.algorithm
        print(shown(f"{method} of {number} plain checkpoints, with {how_weighed}, is in {out}"))
    else:
        print(shown(f"{merged.algorithm} of {number} clients is in {out}"))
    if merged.copied_from:
        print(shown(f"Its other files are those of {merged.copied_from}."))
    if first.frozen and how["start"] is None:
        print(shown(_about_frozen(first)))


def _merge_adapters(
    out: str,
    folders: list[str],
    fisher: list[str] | None,
    how: dict[str, Any],
    options: dict[str, Any],
) -> None:
    weights, limits = how.pop("weights"), how.pop("limits")
    if unread := [name for name, value in how.items() if value not in (None, "raise")]:
        raise ValueError(
            f"--{unread[0].replace('_', '-')} does not belong to a merge of adapters, which are "
            "merged by their products: pass --weights, --fisher, --damping, --option rank=16"
        )
    options |= {"weights": weights, "factors": fisher, "limits": limits}
    merged = files.merge_adapters(out, folders, **options)
    shares = zip(folders, merged.shares, strict=True)
    _table(("adapter", "share"), ((folder, f"{share:.3f}") for folder, share in shares))
    print()
    lost = ((name, str(rank), f"{merged.lost[name]:.2g}") for name, rank in merged.ranks.items())
    _table(("module", "rank", "lost"), lost)
    print()
    what = "The mean" if fisher is None else "The merge by Fisher files"
    print(shown(f"{what} of {len(folders)} adapters is in {out}"))


def _fisher(out: str, checkpoint: str, source: str, algorithm: str, **how: Any) -> None:
    how["options"] = dict(how["options"])
    params = save_imported(out, checkpoint, source, algorithm, **how)
    print(shown(f"The Fisher of {tree.count(params, 'parameter')} of {checkpoint} is in {out}"))


def _check_out(out: str, limits: files.Limits) -> None:
    """Check that no checkpoint is replaced by those who forget the name of the file to write."""
    if not Path(out).is_file():
        return
    try:
        about = base.opened(out, limits).about
    except ValueError:  # another check refuses it, or it is no file of arrays
        return
    if about.get("what") != "model":
        raise ValueError(
            f"{out!r} is the file to write, as the first one, but it exists, and is no merged "
            f"model. To merge it, name a new file before it: merge merged.safetensors {out} ... To "
            "replace it, remove it first."
        )


def _about_frozen(first: files.Record) -> str:
    names = first.frozen
    if first.is_plain:
        number = tree.count(len(names), "array that is", "arrays that are")
        return f"It has {number} not of floats, such as '{names[0]}', as in {first.path}."
    number = tree.count(len(names), "frozen leaf", "frozen leaves")
    return f"The file lacks {number}, such as '{names[0]}'. --start FILE copies them."


def _examples(record: files.Record) -> str:
    return "unknown" if record.is_plain else f"{record.examples:g}"


def _finite(client: str, merged: files.Merge) -> str:
    return "no" if client in merged.left_out else "yes"


def _inspect(file: str, limits: list[tuple[str, Any]]) -> None:
    sealed = base.opened(file, _limits(limits))
    about: dict[str, Any] = dict(sealed.about) or {"what": "plain checkpoint"}
    if about["what"] == "upload":
        _description_checks.check(sealed, _limits(limits))
    elif about["what"] == "model":
        _description_checks.check_model(sealed)
    elif about["what"] == "fisher":
        _fishers.open_fisher(file, _limits(limits))
    # Statistics are printed among the arrays.
    for hidden in ("values", _description_checks.STATISTICS, "leaves", "hashes"):
        about.pop(hidden, None)
    clients = about.pop("clients", {})
    about["bytes"] = sealed.nbytes
    if sealed.digest:
        about["sha256"] = sealed.digest
    _table(None, ((name, str(x)) for name, x in about.items() if x != {}))
    print()
    if clients:
        _table(("client", "share"), ((name, f"{share:.3f}") for name, share in clients.items()))
        print()
    _table(("array", "type"), ((name, str(kind)) for name, kind in sealed.arrays.items()))


def _check(one_per_core: bool) -> bool:
    if one_per_core:
        devices.one_per_core()
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}"
    print(f"{versions}, {jax.device_count()} {jax.default_backend()} device(s)")
    faults = devices.self_check()
    for fault in faults:
        print(f"FAULT  {fault}")
    total = len(IDENTITIES)
    print(f"{total - len(faults)} of {total} identities hold.")
    return bool(faults)


def _progress(name: str, number: int, total: int) -> None:
    print(shown(f"[{number + 1}/{total}] {name}"), file=sys.stderr)


def _table(heads: tuple[str, ...] | None, rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; all columns but the first are right-aligned if there are several of them."""
    # Names come from elsewhere, and could forge lines of the table.
    rows = [tuple(map(shown, row)) for row in ([heads] if heads else []) + [*rows]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        right = (
            rest if len(rest) == 1 else [x.rjust(w) for x, w in zip(rest, widths[1:], strict=True)]
        )
        print("  ".join([first.ljust(widths[0]), *right]))


_COMMANDS = {"merge": _merge, "inspect": _inspect, "fisher": _fisher, "check": _check}


if __name__ == "__main__":
    sys.exit(main())
