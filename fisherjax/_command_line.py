"""Make the parser of the command line, `python -m fisherjax`."""

import argparse
import ast
from collections.abc import Callable, Mapping
from typing import Any

from fisherjax import files

HELP = {
    "merge": (
        "Merge uploads, or checkpoints, or adapters into one model.",
        "merge merged.safetensors client0.safetensors client1.safetensors",
        "merge merged.safetensors a.safetensors b.safetensors --weights 1 3",
        "merge merged/ a/ b/ --fisher a_fisher.safetensors b_fisher.safetensors",
    ),
    "fisher": (
        "Compute the Fisher file of a checkpoint, which merge reads.",
        "fisher a_fisher.safetensors a.safetensors --import my_file.py:model_and_data",
    ),
    "inspect": ("Check a file and print its content.", "inspect client0.safetensors"),
    "check": ("Check that this machine computes correctly.", "check", "check --one-per-core"),
}
"""Each command: what it does, and examples."""
_MORE = "\n\npython -m fisherjax COMMAND --help has the options of a command."


def parser(text: str, functions: Mapping[str, Callable[..., Any]]) -> argparse.ArgumentParser:
    """Make the parser of the command line.

    Args:
        text: What the program does; its first line is printed.
        functions: Function of each command, which `command` of the parsed arguments is.
    """
    raw = argparse.RawDescriptionHelpFormatter  # examples keep their lines
    epilog = _examples(*(lines[0] for _, *lines in HELP.values())) + _MORE
    first = text.split("\n")[0]
    made = argparse.ArgumentParser(
        "python -m fisherjax", description=first, epilog=epilog, formatter_class=raw
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND", title="commands")
    merge, fisher, inspect, check = (
        commands.add_parser(
            name, help=about, description=about, epilog=_examples(*lines), formatter_class=raw
        )
        for name, (about, *lines) in HELP.items()
    )
    for name, command in zip(HELP, (merge, fisher, inspect, check), strict=True):
        command.set_defaults(command=functions[name])
    about = "the file to write, .safetensors; or a new folder, if the start or the first one is one"
    merge.add_argument("out", help=about)
    about = (
        "files that files.save_update wrote, one per client; or checkpoints, each a .safetensors "
    )
    about += "file or a folder of shards with their index"
    merge.add_argument("uploads", nargs="+", help=about)
    about = (
        "default: that for which the uploads were made; of checkpoints fedavg, or the first one "
    )
    about += "that reads their Fisher files"
    merge.add_argument("--algorithm", help=about)
    about = "Fisher files of the checkpoints or adapters, in their order (see the command fisher)"
    merge.add_argument("--fisher", nargs="+", metavar="FILE", help=about)
    merge.add_argument("--damping", type=float, help="default: that of the algorithm")
    option = {"type": _option, "action": "append", "default": [], "dest": "options"}
    about = "another option of the algorithm, such as shrink=0.5 or centre=sum; may be repeated"
    merge.add_argument("--option", **option, metavar="NAME=VALUE", help=about)
    about = "one per file; default: numbers of examples, and equal weights of checkpoints"
    merge.add_argument("--weights", type=float, nargs="+", help=about)
    about = "file, or folder, of the arrays from which clients started; needed for uploads of "
    about += "differences, for methods that merge changes of checkpoints, and for frozen leaves, "
    about += "which are copied from it and missing in the merged file without it"
    merge.add_argument("--start", help=about)
    about = "copy leaves that not all checkpoints have alike from the start or from the first one, "
    about += "or leave them out (default: an error with their list)"
    choices = ("raise", "start", "first", "skip")
    merge.add_argument("--unequal", choices=choices, default="raise", help=about)
    about = "stop at an upload with values that are not finite (raise, the default), or leave it "
    choices = ("raise", "drop")
    merge.add_argument(
        "--on-nonfinite", choices=choices, default="raise", help=f"{about}out (drop)"
    )
    limit = {"type": _option, "action": "append", "default": [], "dest": "limits"}
    known = ", ".join(f"{name}={value}" for name, value in files.Limits()._asdict().items())
    sizes = f"largest sizes of a file (default {known}); may be repeated"
    merge.add_argument("--limit", **limit, metavar="NAME=VALUE", help=sizes)
    fisher.add_argument("out", help="the file to write, .safetensors")
    fisher.add_argument("checkpoint", help="a .safetensors file, or a folder of shards")
    about = (
        "a Python file, and a function in it that returns the fj.Model, whose params are a dict "
    )
    about += "by the names of the checkpoint's arrays, and the data, a pair of inputs and targets"
    place = {"metavar": "FILE.py:FUNCTION", "dest": "source"}
    fisher.add_argument("--import", required=True, **place, help=about)
    about = "the algorithm that is to read it, such as fedfisher_kfac or regmean"
    fisher.add_argument(
        "--algorithm", default="fisher_merge", help=f"{about} (default %(default)s)"
    )
    about = (
        "checkpoint that clients started from, which regmean_plus_plus reads: its Gram matrices "
    )
    about += "are of the inputs in this network"
    fisher.add_argument("--start", help=about)
    about = "an option of the algorithm, such as max_examples=500; may be repeated"
    fisher.add_argument("--option", **option, metavar="NAME=VALUE", help=about)
    fisher.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    about = "an upload, a checkpoint, a merged model or a Fisher file"
    inspect.add_argument("file", help=about)
    inspect.add_argument("--limit", **limit, metavar="NAME=VALUE", help=sizes)
    about = "make each CPU core a device first, as devices.one_per_core does"
    check.add_argument("--one-per-core", action="store_true", help=about)
    return made


def _examples(*lines: str) -> str:
    return "\n".join(["examples:", *(f"  python -m fisherjax {line}" for line in lines)])


def _option(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, where the value is a Python literal, or else text."""
    name, _, value = text.partition("=")
    if not (name and value):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE with a value such as 0.1, 50, True or sum"
        )
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
