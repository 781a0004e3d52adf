"""The columns of the registry's table of methods, and the laws that a merge may obey."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

LAWS = {
    "identity": "If all clients send one model, the merge is that model, whatever else they send.",
    "single client": "The merge of a single client is its own model.",
    "order": "The merge does not depend on the order of the clients.",
    "weights": "Only the ratios of the weights matter; without weights, all clients count equally.",
    "empty": "A client of weight zero has no influence, whatever it sends.",
    "shift": "If the start and all models move by the same amount, so does the merged model.",
    "equal curvatures": "If the curvatures of all clients are equal, or none is sent, the merge is "
    "the weighted mean of the models.",
    "damping": "As `damping` grows, the merged model moves monotonically to the weighted mean.",
    "layerwise": "Each layer can be merged without the layers after it.",
    "statistics": "The merged running statistics of BatchNorm are those of the clients' mixture.",
    "frozen": "Leaves that the model's mask freezes are not sent, and stay the same bit for bit.",
    "exchange": "Clients that do not train improve the model that they receive: the method is one "
    "of `merging.exchange`, and merges no models.",
}
"""The laws that a method may obey, by name; `Row.laws` lists those that hold."""


class Pieces(NamedTuple):
    """How plain checkpoints are merged a piece at a time, so that leaves need not fit into memory.

    The method's `summarize` then receives a piece of a model and of the start, and no examples.

    Attributes:
        unit: The smallest piece: an "entry", or a "leaf" in its shape, such as a matrix.
        kept: Option with the share of a model's entries that `summarize` keeps; it receives the
            smallest magnitude of those as `local`.
        floor: Option with the least curvature, in units of the leaf's mean, of a method that is a
            mean weighted by diagonal Fishers.
    """

    unit: Literal["entry", "leaf"] = "entry"
    kept: str | None = None
    floor: str | None = None


class Row(NamedTuple):
    """A method, as the registry lists it.

    Attributes:
        label: Name in tables and figures.
        paper: Authors, venue and year.
        sends: Content of an upload, in words.
        factory: Function that makes the algorithm. Its first argument is `model` if the method
            needs the network; its keyword arguments are the options of the command line.
        laws: Names of the `LAWS` that hold.
        reads: What `files.merge_files` reads of an upload besides params, as types by name; or the
            reason why the method cannot merge files, as a sentence without its subject; None if the
            method has no uploads.
        gives: What a merge returns: one model of the clients' shapes, one of more units, a model
            for each client, or all models stacked, for a vote.
        pieces: How `files.merge_files` merges plain checkpoints, whose updates need no data; None
            if the method reads curvature of whole layers, or cannot merge checkpoints.

    Example:
        >>> from fisherjax.algorithms import METHODS, fedavg, make
        >>> METHODS["mean"] = Row("Mean", "an example", "weights", fedavg, reads={})
        >>> make("mean", None) is fedavg()
        True
        >>> del METHODS["mean"]
    """

    label: str
    paper: str
    sends: str
    factory: Callable[..., Any]
    laws: tuple[str, ...] = ()
    reads: Mapping[str, type] | str | None = "does not say in its row what it reads of uploads"
    gives: Literal["model", "wider model", "model per client", "votes"] = "model"
    pieces: Pieces | None = None
