"""Fine-tune a sentence encoder on four domains, a client each, and merge the clients in one round.

With --num-clients, each domain is a federation of its own instead, whose clients have its sentences
in unequal shares of the labels.

Clients are fine-tuned once for each seed and kept, so that further methods merge them untrained.
Beside the methods stand the start, each client on its own domain, and joint training on the
sentences of all clients. Changes of merged models are also scaled, as in task arithmetic.

Clients may train adapters (LoRA) instead. The names of rows then have the rank of adapters and what
is merged as options, as in regmean@rank=8,merged='products'.
"""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, figures, folders, names, records, studies, tables
from experiments.pretrained import paired, text_clients, weights
from experiments.pretrained.sentences import DOMAINS
from experiments.pretrained.text_clients import Clients, Data, Task
from fisherjax.algorithms import Algorithm, Update
from fisherjax.typing import Examples, Params

REFERENCES = {"start": "the start", "own": "each client on its own domain", "joint": "joint"}
SPLIT = REFERENCES | {"own": "a client's own model"}
"""Rows that are no merge."""
MERGED = ("factors", "products", "cut")
"""What is merged of adapters."""


@dataclasses.dataclass(frozen=True)
class Config(Task):
    """Domains, fine-tuning, and methods that merge."""

    algorithms: Annotated[tuple[str, ...], commands.names(fj.algorithms.merges())] = (
        *("fedavg", "ties", "regmean", "fedfisher_diag", "fedfisher_kfac"),
        "fedfisher_sequential",
    )
    """Methods that merge; with options as in fedfisher_kfac@damping=0.1,kind='true'."""
    scales: tuple[float, ...] = (1.0, 2.0, 3.0)
    """Factors of the change of a merged model; 1 is the method itself."""
    ranks: tuple[int, ...] = (0,)
    """Ranks of the adapters that clients train; with 0 they train the whole network."""
    alpha: float = 16.0
    """Numerator of the scale of adapters, alpha / rank."""
    merged: Annotated[tuple[str, ...], commands.names(MERGED)] = MERGED
    """What is merged of adapters: factors, products, or products cut to the clients' rank."""
    max_examples: int = 500
    """Largest number of a client's sentences in its Fisher pass or Gram matrices."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the split by document and of fine-tuning."""
    folder: commands.FolderOrNone = None
    """Folder of the weights; None takes FISHERJAX_WEIGHTS, else a folder in the user's cache."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; None takes the environment's TFDS_DATA_DIR."""
    client_folder: commands.FolderOrNone = None
    """Folder that keeps fine-tuned clients; None takes `clients` in the folder of the results."""
    out: commands.Folder = Path("runs/text")
    """Folder for the results; an unfinished run there continues."""


Unit = tuple[int, str]
"""Seed and method; of adapters, their rank is an option of the method."""


class Measurement(NamedTuple):
    """One accuracy on the test sentences of a domain, a fraction; see `studies`.

    `bytes` is what a client sends, and `seconds` are those of all summaries and the merge,
    compilation included; of `own` and `joint` they are those of training.
    """

    algorithm: str
    scale: float
    seed: int
    domain: str
    accuracy: float
    bytes: int
    seconds: float

    @property
    def unit(self) -> Unit:
        """The unit that the measurement belongs to."""
        return self.seed, self.algorithm


class Seed(NamedTuple):
    """The data and the networks of a seed: those of all domains, or of one that clients share."""

    data: Data
    clients: Clients


def units(asked: Config) -> dict[Unit, int]:
    """Return the units, each computed and written as a whole, and their numbers of measurements."""
    number = len(asked.domains)
    sizes = {"start": number}
    for rank in asked.ranks:
        sizes |= {_name(name, rank): number for name in ("own", "joint")}
        merged = asked.merged if rank else ("",)
        # Methods that share what clients send follow one another.
        rows = [_name(name, rank, which) for name in asked.algorithms for which in merged]
        sizes |= dict.fromkeys(rows, number * len(asked.scales))
    return {(seed, name): size for seed in asked.seeds for name, size in sizes.items()}


def measured(
    asked: Config, console: Console, missing: Sequence[Unit]
) -> Iterator[list[Measurement]]:
    """Merge the clients of a seed by a method, and test the merged network on every domain."""
    groups = [(domain,) for domain in asked.domains] if asked.num_clients else [asked.domains]
    # Units of the same seed and rank follow one another. Adapters send two kinds of updates, for
    # merges of factors and of products; four domains' would take gigabytes.
    of_seed = lru_cache(1)(partial(_seed, asked))
    sent: dict[tuple, tuple[Update, float]] = {}
    for seed, name in studies.each(console, missing, lambda unit: f"seed {unit[0]}, {unit[1]}"):
        first, options = name.partition("@")[0], names.options_in(name)
        rank = options.pop("rank", asked.ranks[0] if name == "start" else 0)
        rows = []
        for domains in groups:
            of = of_seed(domains, seed, rank)
            if first in REFERENCES:
                found = _references(of, first)
            else:
                method = _method(asked, first, options, of.clients)
                key = domains, seed, rank, method.summarize, method.kind
                if key not in sent:
                    while len(sent) > 1:
                        del sent[next(iter(sent))]
                    sent[key] = _sent(of, method, seed)
                found = _merged(asked, of, method, *sent[key])
            rows += [
                Measurement(name, scale, seed, domain, round(accuracy, 6), size, round(seconds, 3))
                for scale, accuracies, size, seconds in found
                for domain, accuracy in zip(domains, accuracies, strict=True)
            ]
        plain = [100 * row.accuracy for row in rows if row.scale == rows[0].scale]
        mean, seconds = sum(plain) / len(plain), rows[0].seconds
        console.print(f"seed {seed}, {name}: {mean:.1f}  [dim]({seconds:.0f} s)[/]")
        yield rows


def run(asked: Config, program: str, console: Console) -> None:
    """Measure what is missing in the folder of the results, and report all of it."""
    commands.check_names(asked, "domains", DOMAINS)
    commands.check_names(asked, "merged", MERGED)
    for name in asked.algorithms:
        commands.check_name("algorithms", name.partition("@")[0], fj.algorithms.merges())
    with records.folder(asked.out):
        asked, found = folders.resume(asked, type(asked)(), Measurement._fields, Measurement)
        one = partial(measured, asked, console)
        found = studies.completed(asked, program, found, units(asked), one, console)
        heading = "MiniLM on domains of sentences: accuracy %"
        how = {"words": paired.words("seeds and domains"), "heading": heading}
        studies.report(asked, program, [table(asked, found)], {}, console, **how)


def table(asked: Config, found: Sequence[Measurement]) -> tables.Table:
    """Return the accuracies by domain and their mean, compared with others, bytes and seconds."""
    lines, dim = [], []
    cases = tables.gathered(((one.algorithm, one.scale), one) for one in found)
    references, against = (SPLIT if asked.num_clients else REFERENCES), _compared(found)
    for (name, scale), ones in cases.items():
        first, at, given = name.partition("@")
        label = references.get(first) or figures.label(first)
        label += at and f", {given}"
        label += f", change x {scale:g}" if scale != 1 else ""
        dim += [len(lines)] * (first in REFERENCES)
        by_domain = tables.gathered((one.domain, 100 * one.accuracy) for one in ones)
        by_seed = tables.gathered((one.seed, 100 * one.accuracy) for one in ones)
        means = [sum(values) / len(values) for values in by_seed.values()]
        cells = [tables.spread(by_domain[domain]) for domain in asked.domains]
        size = tables.size(ones[0].bytes) if ones[0].bytes else "-"
        # Domains that are merged together have the same seconds.
        each = 1 if asked.num_clients else len(asked.domains)
        seconds = tables.spread([one.seconds for one in ones][::each], 0)
        better = against.get((name, scale), "-")
        lines.append((label, *cells, tables.spread(means), better, size, seconds))
    headings = ("method", *asked.domains, "mean", paired.HEADING, "bytes", "seconds")
    return tables.Table("", headings, lines, dim=dim)


def _compared(found: Sequence[Measurement]) -> dict[tuple[str, float], str]:
    """Return how merged rows compare with the best one of others, for each rank of adapters."""
    merged = [one for one in found if one.algorithm.partition("@")[0] not in REFERENCES]
    ranks = tables.gathered((names.options_in(one.algorithm).get("rank"), one) for one in merged)
    words = {}
    for ones in ranks.values():
        words |= paired.compared(
            ones, lambda one: (one.algorithm, one.scale), lambda one: (one.seed, one.domain)
        )
    return words


def _name(name: str, rank: int, merged: str = "") -> str:
    """Return the name of a row; adapters have their rank, and what is merged, as options."""
    added = [f"rank={rank}"] * (rank > 0) + [f"merged={merged!r}"] * (merged != "")
    return name + ("," if "@" in name else "@") * bool(added) + ",".join(added)


def _seed(asked: Config, domains: tuple[str, ...], seed: int, rank: int) -> Seed:
    asked = dataclasses.replace(asked, domains=domains)
    folder = Path(asked.data_dir or os.environ.get("TFDS_DATA_DIR", ".")) / "vader"
    checkpoint = weights.path("minilm/model.safetensors", asked.folder)
    tokenizer = weights.path("minilm/tokenizer.json", asked.folder)
    found = text_clients.data(asked, folder, tokenizer, seed)
    given = found, checkpoint.parent, seed, asked.client_folder or asked.out / "clients"
    return Seed(found, text_clients.clients(asked, *given, rank=rank, alpha=asked.alpha))


def _references(of: Seed, name: str) -> list[tuple]:
    clients, tests = of.clients, of.data.test
    if name == "start":
        return [(1.0, _accuracies(of, _whole(clients.start)), 0, 0.0)]
    is_joint = name == "joint"
    trained = (clients.trained, clients.joint)[is_joint]

    def tested(client: int, domains: Sequence[Examples]) -> list[float]:
        own = jax.tree.map(lambda x: x[client], trained.params)
        return _accuracies(of, _whole(fj.leaves.join(own, trained.frozen)), domains)

    number = of.data.train.num_clients
    if is_joint:
        accuracies = tested(0, tests)
    elif len(tests) == number:
        accuracies = [tested(client, [tests[client]])[0] for client in range(number)]
    else:
        accuracies = [sum(tested(client, tests)[0] for client in range(number)) / number]
    return [(1.0, accuracies, 0, clients.seconds[is_joint])]


def _sent(of: Seed, method: Algorithm, seed: int) -> tuple[Update, float]:
    """Return what the clients send, and the seconds that this took."""
    key, begun = jax.random.key(seed), time.perf_counter()
    update = fj.merging.summarize(method, of.clients.trained, of.data.train, key=key)
    return jax.block_until_ready(update), time.perf_counter() - begun


def _merged(
    asked: Config, of: Seed, method: Algorithm, update: Update, seconds: float
) -> list[tuple]:
    clients, train, begun = of.clients, of.data.train, time.perf_counter()
    merged, *_ = fj.merging.merge(method, clients.start, update, train.weights)
    merged = jax.block_until_ready(merged)
    seconds += time.perf_counter() - begun
    size = fj.compression.size(update) // train.num_clients
    start, merged = _whole(clients.start), _whole(merged)
    return [
        (scale, _accuracies(of, _scaled(scale, start, merged)), size, seconds)
        for scale in asked.scales
    ]


def _method(asked: Config, first: str, given: dict[str, Any], clients: Clients) -> Algorithm:
    known = names.takes(fj.algorithms.METHODS[first])
    # Two classes cost two backward passes, and drawn labels cost K-FAC a point.
    chosen: dict[str, Any] = {"max_examples": asked.max_examples, "kind": "true"}
    chosen = {option: x for option, x in chosen.items() if option in known} | given
    if "kind" in chosen:
        chosen["kind"] = getattr(fj.fisher, chosen["kind"])
    merged = chosen.pop("merged", None)
    if merged in (None, "factors"):
        return fj.algorithms.make(first, clients.model, **chosen)
    dense = fj.adapters.dense(clients.base, clients.start)
    made = fj.algorithms.make(first, dense, **chosen)
    # An adapter of the size of a kernel keeps all of a change.
    largest = max(max(x.shape) for x in clients.start["base"].values())
    how = {} if merged == "cut" else {"rank": largest}
    return fj.adapters.merge_products(made, clients.model, **how)


def _whole(params: Params) -> Params:
    """Return params of the base, with the changes that adapters make if there are any."""
    return fj.adapters.merged(params) if "adapters" in params else params


def _scaled(scale: float, start: Params, merged: Params) -> Params:
    return jax.tree.map(lambda a, b: a + scale * (jnp.asarray(b) - a), start, merged)


def _accuracies(of: Seed, params: Params, tests: Sequence[Examples] | None = None) -> list[float]:
    one = partial(fj.metrics.accuracy, of.clients.base, params, batch_size=150)
    return [float(one(test)) for test in (of.data.test if tests is None else tests)]
