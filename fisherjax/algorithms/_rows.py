"""What the registry says of a method: the columns of its table, and the laws of merging."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from fisherjax.algorithms.base import Algorithm

LAWS = {
    "identity": "Clients that all send one model get that model back, whatever else they send.",
    "single client": "A single client gets its own model back.",
    "order": "The order in which the clients stand does not matter.",
    "weights": "Only the ratios of the weights matter; without weights all clients count equally.",
    "empty": "A client of weight zero has no influence, whatever it sends.",
    "shift": "If the start and all models move by the same amount, so does the merged model.",
    "equal curvatures": "Clients whose curvatures are equal, or that send none, get the weighted "
    "mean of their models.",
    "damping": "A growing `damping` moves the merged model steadily to the weighted mean.",
    "layerwise": "Layers can be merged without those that come after them.",
    "statistics": "The merged running statistics of BatchNorm are those of the clients' mixture.",
    "frozen": "Leaves that the model's mask freezes are not sent, and come back bit for bit.",
    "exchange": "Clients that do not train improve the model that they receive: the method is one "
    "of `merging.exchange`, and merges no models.",
}
"""The laws that a method may obey, by name; `Row.laws` lists those that hold."""


class Row(NamedTuple):
    """What there is to know of a method.

    Attributes:
        label: Name in tables and figures.
        paper: Authors, venue and year.
        sends: What a client sends to the server.
        factory: Makes the algorithm. Its first argument is `model` if it needs the network, its
            defaults are the options of the command line.
        laws: Names of the `LAWS` that hold.
        reads: What `files.merge_files` reads of an upload besides params, with its type; or why
            files cannot be merged by the method, as a sentence without its subject; None if there
            are no uploads of the method.
        gives: What the algorithm gives: one model of the clients' shapes, one of more units, a
            model for each client, or all of the clients' models, which vote.

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
    factory: Callable[..., Algorithm]
    laws: tuple[str, ...] = ()
    reads: Mapping[str, type] | str | None = "does not say in its row what it reads of uploads"
    gives: Literal["model", "wider model", "model per client", "votes"] = "model"
