"""Client-level differential privacy: clipped and noisy sums over clients."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, as_sent, check_algorithm
from fisherjax.privacy._repair import repaired
from fisherjax.privacy.accounting import Ledger, add_noise
from fisherjax.privacy.clipping import ALL, Clipped, clipping_reduce, leaves_by_group
from fisherjax.privacy.keys import no_fingerprints, record
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params


class State(NamedTuple):
    """State of a private algorithm.

    Attributes:
        algorithm: State of the wrapped algorithm.
        rounds: Number of releases so far.
        fingerprints: [1024, 2] hashes of the keys of the latest releases; other rows are zero.
    """

    algorithm: Any
    rounds: Array
    fingerprints: Array


def private(
    algorithm: Algorithm,
    *,
    clip: float | Mapping[str, float | None],
    noise_multiplier: float | Mapping[str, float],
    damping: float = 2.0,
) -> Algorithm[Ledger]:
    """Make an algorithm private for clients: clip their contributions, add noise to the sums.

    The server computes

        S = sum_i min(1, C / |c_i|) c_i + sigma C N(0, I)    for each group of the sums,

    where c_i is the contribution of client i alone, with weight one, and with its params as
    differences from its start. All clients have equal weights. Sums are divided by the number of
    clients, which is public: a client that diverged, or has no examples, adds zeros and is counted.

    The server is trusted with the sums. It draws the noise from the key of the merge, which has to
    be secret and used only once: take `system_key`. A merge warns of a key that a number made, and
    refuses one that made the noise of an earlier release in its state.

    The noise is of floating-point numbers, which do not take all real values. Whoever sees all
    digits of a sum may rule out some of the neighbours by them, which epsilon does not count;
    `discrete_gaussian` has no such weakness.

    Post-processing of noisy sums costs no privacy: a noisy Fisher or second moment is replaced by
    the nearest positive semi-definite one, and is damped by the size of its own noise, which pulls
    the merged model towards the clients' noisy mean.

    Args:
        algorithm: An algorithm with a `reduce`, such as fedavg,
            fedfisher(model, fisher=fisher.diagonal) or analytic_head(model, ridge=0.01).
        clip: C, one number for all sums together, or a dict from groups to numbers. A group is a
            beginning of names of the sums' leaves (`tree.names`): {"total": C} for averages,
            "fisher", "product" and "mean" for Fishers, "total/inputs" and so on for heads. A group
            whose clip is None is not released: its sum is zero and costs nothing.
        noise_multiplier: sigma, one number for all groups or a dict from groups to numbers. With 0
            there is no privacy.
        damping: Damping of a noisy Fisher or second moment, in units of the spectral norm of its
            noise (default 2); smaller eigenvalues are mostly noise. This norm is sqrt(2 a) standard
            deviations for a matrix [a, a], and sqrt(2 log d) for a diagonal of d entries.

    Returns:
        The algorithm. Its updates are those of the wrapped algorithm, with params as differences.
        Its `info` is a `Ledger`.

    Raises:
        ValueError: If a clip is not positive, if a noise multiplier is negative, or if the
            algorithm has no `reduce` or its uploads are encoded. On merge, if groups do not match
            the sums, or the key was used before. On summarize, if params come without their start.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import fisherjax as fj
        >>> method = private(fj.algorithms.fedavg(), clip=1.0, noise_multiplier=0.0)
        >>> updates = fj.algorithms.Update({"params": jnp.array([[0.5], [9.0]])}, method.kind)
        >>> params, key = jnp.array([2.0]), fj.privacy.system_key()
        >>> merged, _, ledger = fj.merging.merge(method, params, updates, key=key)
        >>> print(merged, int(ledger.rounds))
        [2.75] 1

    Source: McMahan, Ramage, Talwar, Zhang, Learning differentially private recurrent language
        models, ICLR 2018, algorithm 1 with the fixed denominator; clients have equal weights, as
        their numbers of examples are private. Damping by the noise: Wang, Revisiting differentially
        private linear regression, UAI 2018. The weakness: Mironov, On significance of the least
        significant bits for differential privacy, CCS 2012.
    """
    check_algorithm(algorithm)
    # A method that reads each update alone has no sum that noise could protect, and a model of one
    # client depends on that client's data beyond any clip.
    if algorithm.reduce is None or algorithm.link.personal:
        raise ValueError(
            "This method needs every client's update (its reduce is None), and only sums over "
            "clients can be made private; expected a method with a reduce, such as fedavg, "
            "fisher_merge or fedfisher(model, fisher=fisher.diagonal)."
        )
    # Codes cannot be clipped: their norms are not those of the contributions.
    if algorithm.decode is not as_sent:
        raise ValueError(
            "This method's updates are encoded on the clients; expected updates that can be added "
            "up. Wrap in the other order: compress the private algorithm."
        )
    clips = clip if isinstance(clip, Mapping) else {ALL: clip}
    for name, bound in clips.items():
        if bound is not None:
            checks.positive(f"clip of '{name}'", bound)
    # Groups that are not released need no noise multiplier, and cost nothing.
    released = [name for name, bound in clips.items() if bound is not None]
    if not released:
        raise ValueError(f"clip is {clip!r}; expected a bound for at least one group.")
    is_one = not isinstance(noise_multiplier, Mapping)
    multipliers = dict.fromkeys(released, noise_multiplier) if is_one else noise_multiplier
    if set(multipliers) != set(released):
        raise ValueError(
            f"noise_multiplier has groups {sorted(multipliers)}; expected those that have a clip, "
            f"{sorted(released)}."
        )
    for name, sigma in multipliers.items():
        checks.number(f"noise_multiplier of '{name}'", sigma)
    checks.number("damping", damping)
    # Plain tuples are hashable, so that equal arguments return the same object and compile once.
    return _private(algorithm, tuple(clips.items()), tuple(multipliers.items()), damping)


@cached
def _private(
    algorithm: Algorithm,
    clip: tuple[tuple[str, float | None], ...],
    noise_multiplier: tuple[tuple[str, float], ...],
    damping: float,
) -> Algorithm:
    clips, multipliers = dict(clip), dict(noise_multiplier)
    sensitivity = {name: bound for name, bound in clips.items() if bound is not None}
    # A client can move a sum by its clip, so that the noise is measured in clips.
    deviation = {name: multipliers[name] * bound for name, bound in sensitivity.items()}

    def init(params: Params, num_clients: int) -> State:
        # Releases are counted in the state, because their cost adds up over rounds.
        own = algorithm.link.init(params, num_clients)
        return State(own, jnp.asarray(0, jnp.int32), no_fingerprints())

    def broadcast(params: Params, state: State, place: Array | None) -> Any:
        return algorithm.link.broadcast(params, state.algorithm, place)

    def summarize(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        # Params themselves have norms far above those of their changes: clipped, they would shrink.
        values, kept = algorithm.summarize(key, trained, examples, private)
        if "params" in values:
            values = values | {"params": _difference(values["params"], trained.start)}
        return values, kept

    def aggregate(
        key: Key, received: Clipped, params: Params, state: State, cohort: Array
    ) -> tuple[Params, State, Ledger]:
        fingerprints = record(key, state.fingerprints, state.rounds)
        # The wrapped method may draw too, and must not draw the same numbers as the noise.
        noise_key, key = jax.random.split(key)
        leaves, structure = jax.tree.flatten(received.sums)
        deviations = [0.0] * len(leaves)
        for name, places in leaves_by_group(received.sums, tuple(clips)).items():
            for place in places:
                deviations[place] = deviation.get(name, 0.0)
        sums = jax.tree.unflatten(structure, add_noise(noise_key, leaves, deviations))
        # Solvers need definite matrices, and noise may make a sum of them indefinite.
        sums = repaired(sums, jax.tree.unflatten(structure, deviations), damping)
        # Differences from the start are merged as models near zero, and added to it afterwards.
        start = jax.tree.map(jnp.zeros_like, params) if received.centred else params
        merged, kept, info = algorithm.aggregate(key, sums, start, state.algorithm, cohort)
        if received.centred:
            merged = jax.tree.map(jnp.add, params, merged)
        # The ledger holds public numbers only, so that it can be published with the model.
        rounds = state.rounds + 1
        ledger = Ledger(rounds, sensitivity, deviation, multipliers, info, fingerprints)
        return merged, State(kept, rounds, fingerprints), ledger

    return algorithm._replace(
        summarize=summarize,
        reduce=clipping_reduce(algorithm, clip),
        aggregate=aggregate,
        # Updates hold differences from the start, which the wrapped method must not merge as
        # params.
        kind=f"{algorithm.kind}, to be clipped",
        # It draws noise, so that a merge without a key is refused rather than repeated with a fixed
        # one.
        link=algorithm.link._replace(init=init, broadcast=broadcast, draws=True),
    )


def _difference(params: Params, start: Params | None) -> Params:
    if jax.tree.structure(params) != jax.tree.structure(start):
        raise ValueError(
            "Clients are clipped by how far they moved from their start, which is not given, or "
            "has other leaves than their update; expected the result of training.train, or "
            "training.Trained(stacked params, start). If some leaves stay local, wrap the private "
            "algorithm in keep_local, not the other way round."
        )
    return jax.tree.map(jnp.subtract, params, start)
