"""Merge uploads, inspect files, check this machine: `python -m fisherjax merge|inspect|check`."""

import argparse
import ast
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jaxlib

from fisherjax import devices, files, tree
from fisherjax._core import checks
from fisherjax._self_check import IDENTITIES
from fisherjax.files import _description_checks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0 on success. 1 if the input is invalid: then one line on stderr says why, and no file is
        written. Also 1 if `check` found a fault.
    """
    given = vars(_parser().parse_args(arguments))
    command = given.pop("command")
    if arguments is None and command is not _check:
        # Only when this is the program of the process; `check` must not change what it checks.
        devices.disable_faulty_fusion()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found_faults = command(**given)
    except (OSError, TypeError, ValueError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    for line in dict.fromkeys(str(warning.message) for warning in caught):
        print("warning:", line, file=sys.stderr)
    return int(bool(found_faults))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m fisherjax", description=(__doc__ or "").split(":")[0] + "."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    merge = commands.add_parser("merge", help="merge uploads to one model")
    merge.set_defaults(command=_merge)
    merge.add_argument("out", help="the merged model, .safetensors")
    merge.add_argument(
        "uploads", nargs="+", help="files that files.save_update wrote, one per client"
    )
    merge.add_argument("--algorithm", help="default: the algorithm for which the uploads were made")
    merge.add_argument("--damping", type=float, help="default: that of the algorithm")
    option = {"type": _option, "action": "append", "default": [], "dest": "options"}
    about = "another option of the algorithm, such as shrink=0.5; may be repeated"
    merge.add_argument("--option", **option, metavar="NAME=VALUE", help=about)
    merge.add_argument(
        "--weights", type=float, nargs="+", help="one per client; default: numbers of examples"
    )
    about = "file of the arrays from which clients started; needed for uploads of differences, and "
    about += "for frozen leaves, which are copied from it and missing in the merged file without it"
    merge.add_argument("--start", help=about)
    merge.add_argument("--on-nonfinite", choices=("raise", "drop"), default="raise")
    limit = {"type": _option, "action": "append", "default": [], "dest": "limits"}
    known = ", ".join(f"{name}={value}" for name, value in files.Limits()._asdict().items())
    about = f"largest sizes of an upload (default {known}); may be repeated"
    merge.add_argument("--limit", **limit, metavar="NAME=VALUE", help=about)
    inspect = commands.add_parser("inspect", help="check a file and print its content")
    inspect.set_defaults(command=_inspect)
    inspect.add_argument("file")
    inspect.add_argument("--limit", **limit, metavar="NAME=VALUE", help=about)
    check = commands.add_parser("check", help="check that this machine computes correctly")
    check.set_defaults(command=_check)
    about = "make each CPU core a device first, as devices.one_per_core does"
    check.add_argument("--one-per-core", action="store_true", help=about)
    return parser


def _option(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, where the value is a Python literal."""
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE with a value such as 0.1, 50, True or 'name'"
        ) from error


def _limits(options: list[tuple[str, Any]]) -> files.Limits:
    for name, value in options:
        checks.one_of("limit", name, files.Limits._fields)
        checks.count(f"limit {name}", value)
    return files.Limits(**dict(options))


def _merge(
    out: str, uploads: list[str], damping: float | None, options: list[tuple[str, Any]], **how: Any
) -> None:
    how["limits"] = _limits(how["limits"])
    given: dict[str, Any] = dict(options) | ({} if damping is None else {"damping": damping})
    progress = _progress if sys.stderr.isatty() else None
    merged = files.merge_files(out, uploads, progress=progress, **how, **given)
    clients = (
        (x.client, f"{x.examples:g}", f"{share:.3f}", str(x.nbytes), _finite(x.client, merged))
        for x, share in zip(merged.records, merged.shares, strict=True)
    )
    _table(("client", "examples", "share", "bytes", "finite"), clients)
    for client, leaf in merged.left_out.items():
        print(f"{client} is left out: {leaf} is not finite")
    print()
    votes = ((name, *(f"{v:.3f}" for v in vote)) for name, vote in merged.votes.items())
    _table(("vote", *(record.client for record in merged.records)), votes)
    print(f"\n{merged.algorithm} of {len(merged.records)} clients is in {out}")
    if (frozen := merged.records[0].frozen) and how["start"] is None:
        number = tree.count(len(frozen), "frozen leaf", "frozen leaves")
        print(f"The file lacks {number}, such as '{frozen[0]}'. --start FILE copies them.")


def _finite(client: str, merged: files.Merge) -> str:
    return "no" if client in merged.left_out else "yes"


def _inspect(file: str, limits: list[tuple[str, Any]]) -> None:
    sealed = files.unseal(file, _limits(limits))
    if sealed.about.get("what") == "upload":
        _description_checks.check(sealed, _limits(limits))
    # Statistics are printed among the arrays.
    hidden = "values", _description_checks.STATISTICS
    about = {name: value for name, value in sealed.about.items() if name not in hidden}
    clients = about.pop("clients", {})
    about |= {"bytes": sealed.nbytes, "sha256": sealed.digest}
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
    print(f"[{number + 1}/{total}] {name}", file=sys.stderr)


def _table(heads: tuple[str, ...] | None, rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; all columns but the first are right-aligned if there are several of them."""
    rows = [*([heads] if heads else []), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        right = (
            rest if len(rest) == 1 else [x.rjust(w) for x, w in zip(rest, widths[1:], strict=True)]
        )
        print("  ".join([first.ljust(widths[0]), *right]))


if __name__ == "__main__":
    sys.exit(main())
