"""Sums under masks: exact, whatever the order and whoever drops out; nothing but the sum shows."""

import math
import subprocess
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

import fisherjax as fj
from fisherjax import algorithms, merging, secure_aggregation
from fisherjax.secure_aggregation import (
    fixed_point,
    keys,
    messages,
    protocol,
    secure_merge,
    secure_sum,
    shares,
)

TEN = 10


def entropy(seed=0):
    """Give bytes of a generator: every test draws the same."""
    return np.random.default_rng(seed).bytes


def draw(seed=0, number=TEN):
    source = np.random.default_rng(seed)
    return [
        {"w": source.normal(size=(3, 4)).astype("f4"), "n": source.integers(0, 50, 2)}
        for _ in range(number)
    ]


BOUND = {"w": 8.0, "n": 50}


# Fixed point


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 200),
    st.sampled_from([32, 64]),
    st.floats(1e-30, 1e30),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
@example(1, 64, 1.0, [4, 4], 0)  # where the logarithm of what fits rounds up
def test_the_sum_modulo_two_to_the_bits_is_the_sum_of_the_rounded_values(
    number, bits, bound, shape, seed
):
    """Bit for bit, in whatever order, though running sums of numbers at the bound wrap around."""
    source = np.random.default_rng(seed)
    values = source.uniform(-bound, bound, (number, *shape))
    values[source.random(values.shape) < 0.3] = bound
    ring = fixed_point.ring(values[0], bound, number, bits)
    rows = [fixed_point.encode(ring, row) for row in values]
    total = np.sum(rows, axis=0, dtype=ring.dtype)
    backwards = np.sum(rows[::-1], axis=0, dtype=ring.dtype)
    np.testing.assert_array_equal(total, backwards)
    exponent = ring.leaves[0].exponent
    rounded = [[round(float(np.ldexp(x, exponent))) for x in row.ravel()] for row in values]
    exact = [sum(column) for column in zip(*rounded, strict=True)]
    found = fixed_point.decode(ring, total).ravel()
    assert [float(np.ldexp(x, exponent)) for x in found] == [float(x) for x in exact]
    # The exponent is as large as it may be.
    assert number * (bound * 2.0 ** (exponent + 1) + 1) >= 2.0 ** (bits - 1) - 1 - number


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"w": np.array([0.0, np.nan])}, "'w' of client 3 is not finite"),
        ({"w": np.array([0.0, np.inf])}, "'w' of client 3 is not finite"),
        ({"w": np.array([0.0, -1.5])}, "'w' of client 3 has an entry of 1.5, beyond .* bound 1"),
        ({"w": np.array([0, 1])}, "'w' of client 3 has dtype int64; expected floating point"),
        ({"w": np.zeros(3)}, r"client 3 has leaves .*\(3,\).*expected"),
        ({"v": np.zeros(2)}, "client 3 has leaves .*'v'.*expected"),
    ],
)
def test_what_does_not_fit_the_ring_is_refused_by_name(given, said):
    ring = fixed_point.ring({"w": np.zeros(2)}, 1.0, 4)
    with pytest.raises(ValueError, match=said):
        fixed_point.encode(ring, given, "client 3")


@pytest.mark.parametrize(
    ("given", "bound", "number", "bits", "said"),
    [
        (np.zeros(1), 0.0, 2, 32, "bound of leaf '' is 0"),
        (np.zeros(1), np.nan, 2, 32, "bound of leaf '' is nan"),
        (np.zeros(1), {"w": 1.0}, 2, 32, r"bound has leaves \['w'\]"),
        (np.zeros(1, int), 1e9, 4, 32, "4 clients with leaf '' up to 1e.09"),
        (np.zeros(1), 1.0, 4, 24, "bits is 24"),
        (np.zeros(1), 1.0, 0, 32, "num_clients is 0"),
        ({}, 1.0, 2, 32, "no leaves"),
        (np.zeros(1, bool), 1.0, 2, 32, "dtype bool"),
    ],
)
def test_an_agreement_that_cannot_hold_is_refused(given, bound, number, bits, said):
    with pytest.raises((ValueError, TypeError), match=said):
        fixed_point.ring(given, bound, number, bits)


def test_integers_beyond_the_bound_are_seen_before_they_wrap_around():
    ring = fixed_point.ring(np.zeros(1, np.uint64), 100, 2, 64)
    with pytest.raises(ValueError, match="beyond the agreed bound 100"):
        fixed_point.encode(ring, np.array([2**64 - 1], np.uint64))


# Shares


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 2**32 - 1), st.data())
def test_any_so_many_shares_give_the_secret_and_fewer_do_not(threshold, more, seed, data):
    source = entropy(seed)
    secret, places = source(32), list(range(0, 2 * (threshold + more), 2))
    split = shares.split(secret, threshold, places, source)
    some = data.draw(st.permutations(places))[:threshold]
    assert shares.combine({place: split[place] for place in some}, 32) == secret
    if threshold > 1:
        with pytest.raises(ValueError, match="too few"):
            shares.combine({place: split[place] for place in some[1:]}, 32)


def test_fewer_shares_than_needed_are_those_of_any_secret():
    """For every other secret there is a polynomial through the same shares."""
    split = shares.split(bytes(32), 3, range(4), entropy())
    known = {place: split[place] for place in (0, 2)}
    for other in (bytes(31) + b"\1", entropy(1)(32)):
        # The share of place 1 that would make it so: from the other secret by interpolation.
        coefficients = shares.interpolation([0, 1, 2])
        rest = sum(coefficients[p] * int.from_bytes(known[p]) for p in known)
        missing = (int.from_bytes(other) - rest) * pow(coefficients[1], -1, shares.PRIME)
        whole = known | {1: (missing % shares.PRIME).to_bytes(shares.SIZE)}
        assert shares.combine(whole, 32) == other


# Dropouts

GONE = {
    "nobody": {},
    "advertise": {"advertise": [1, 4, 9]},
    "share": {"share": [0, 5, 6]},
    "mask": {"mask": [2, 3, 8]},
    "unmask": {"unmask": [0, 1, 7]},
    "every stage": {"advertise": [0, 9, 4], "share": [1, 8], "mask": [2], "unmask": [3]},
}


@pytest.mark.parametrize("stage", GONE)
@pytest.mark.parametrize("bits", [32, 64])
def test_dropouts_at_any_stage_give_the_exact_sum_of_the_survivors(stage, bits):
    given, gone = draw(), GONE[stage]
    how = {"threshold": 3, "entropy": entropy(), "bits": bits, "absent": gone}
    found = secure_sum(given, BOUND, **how)
    left = {place for name, places in gone.items() if name != "unmask" for place in places}
    assert found.survivors == tuple(sorted(set(range(TEN)) - left))
    ring = fixed_point.ring(given[0], BOUND, TEN, bits)
    rows = [fixed_point.encode(ring, given[place]) for place in found.survivors]
    expected = fixed_point.decode(ring, np.sum(rows, axis=0, dtype=ring.dtype))
    chex.assert_trees_all_equal(found.total, expected)
    exact = sum(np.float64(given[place]["w"]) for place in found.survivors)
    np.testing.assert_allclose(found.total["w"], exact, atol=1e-5 if bits == 32 else 1e-14)
    np.testing.assert_array_equal(
        found.total["n"], sum(given[place]["n"] for place in found.survivors)
    )


@pytest.mark.parametrize("stage", ["advertise", "share", "mask", "unmask"])
def test_fewer_than_the_threshold_is_an_error(stage):
    how = {"threshold": 8, "entropy": entropy(), "absent": {stage: [0, 1, 2]}}
    with pytest.raises(ValueError, match=f"7 clients .* after stage '{stage}'.* threshold 8"):
        secure_sum(draw(), BOUND, **how)


# What the server sees


def pairs(results):
    """Separate what clients keep from what they send."""
    return tuple(zip(*results, strict=True))


class Views:
    """Everything that the server of three clients gets in one sum, and what follows from it."""

    def __init__(self, given, session=b"one", seed=0, threshold=2):
        source, number = entropy(seed), len(given)
        setting = protocol.setting(number, threshold, len(given[0]), 32, session)
        states, sent = pairs(protocol.advertise(setting, u, source) for u in range(number))
        self.setting, self.roster = setting, protocol.roster(setting, sent)
        self.advertised = states
        self.states, self.sealed = pairs(
            protocol.share(setting, own, self.roster, source) for own in states
        )
        boxes = protocol.deliver(setting, self.sealed)
        states, self.masked = pairs(
            protocol.mask(setting, own, boxes[own.place], given[own.place]) for own in self.states
        )
        stayed = protocol.survivors(setting, self.masked)
        self.after, self.answers = pairs(protocol.unmask(setting, own, stayed) for own in states)
        self.total = protocol.finish(setting, self.roster, self.masked, self.answers)

    def bare(self):
        """Take each client's own mask off, which the server can."""
        own = [protocol.self_key(self.setting, state.seed) for state in self.states]
        drawn = [protocol._expanded(self.setting, key) for key in own]
        return [m.values - mask for m, mask in zip(self.masked, drawn, strict=True)]


def constant(*values, length=20_000):
    return [np.full(length, value, np.uint32) for value in values]


def top(values):
    """Give the top three bits, and the low three."""
    return np.concatenate([values >> np.uint32(29), values & np.uint32(7)])


def looks_uniform(given, seed):
    """Ask whether what the server sees of two of three clients is uniform on pairs."""
    first, second, _ = map(top, Views(given, seed=seed).bare())
    table = np.bincount(8 * first + second, minlength=64)
    return stats.chisquare(table).pvalue > 1e-4


def test_two_inputs_with_one_sum_give_views_of_one_distribution():
    """Without their own masks, two vectors of three are uniform, and the third makes the sum."""
    for values in ((1, 2, 3), (6, 0, 0), (2**31, 2**31, 6)):
        given = constant(*values)
        views = Views(given)
        assert looks_uniform(given, seed=0)
        np.testing.assert_array_equal(sum(views.bare()), views.total)
        np.testing.assert_array_equal(views.total, np.full(20_000, 6, np.uint32))


def test_masks_that_are_none_are_caught(monkeypatch):
    """The test above, broken on purpose: pairs agree on a key whose mask is almost constant."""
    stretch = protocol._expanded
    own = partial(np.bitwise_and, np.uint32(3))
    monkeypatch.setattr(protocol, "_expanded", lambda *args: own(stretch(*args)))
    assert not looks_uniform(constant(1, 2, 3), seed=0)


def recorded_masks(monkeypatch):
    """Play sums with the same randomness in two sessions, and note the keys that are stretched."""
    used = []
    stretch = keys.keystream

    def noting(key, size):
        used.append(key)
        return stretch(key, size)

    with monkeypatch.context() as patch:
        patch.setattr(keys, "keystream", noting)
        for session in (b"one", b"two"):
            setting = protocol.setting(4, 2, 1, 32, session)
            source = entropy()
            states, sent = pairs(protocol.advertise(setting, u, source) for u in range(4))
            roster = protocol.roster(setting, sent)
            states, sent = pairs(protocol.share(setting, own, roster, source) for own in states)
            boxes = protocol.deliver(setting, sent)
            for own in states:
                protocol.mask(setting, own, boxes[own.place], np.zeros(1, np.uint32))
    return used


def is_used_once(used):
    """Each pair's mask by its two owners, every other by one; two sessions, four clients."""
    counts = [used.count(key) for key in set(used)]
    return sorted(counts) == [1] * 4 * 2 + [2] * 6 * 2


def test_no_mask_is_used_twice(monkeypatch):
    assert is_used_once(recorded_masks(monkeypatch))


BROKEN = {
    "the session left out": lambda secret, session, use: (secret, b"", use),
    "the secret left out": lambda secret, session, use: (bytes(32), session, use),
    "only the use": lambda secret, session, use: (bytes(32), b"", use.split()[0]),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_derivation_is_caught(monkeypatch, how):
    derive = keys.derive
    monkeypatch.setattr(keys, "derive", lambda *given: derive(*BROKEN[how](*given)))
    assert not is_used_once(recorded_masks(monkeypatch))


def test_keys_of_other_uses_have_nothing_in_common():
    found = {
        keys.derive(secret, session, use)
        for secret in (bytes(32), entropy()(32))
        for session in (b"", b"a", b"ab")
        for use in ("self mask", "pair mask 1 2", "pair mask 2 1", "box 1 2", "box 2 1", "bbox 1 2")
    }
    assert len(found) == 2 * 3 * 6


def test_nobody_gives_shares_of_both_secrets_of_a_client():
    """Nor of another's than was asked for: a seed of who stayed, a key of who did not."""
    views = Views(constant(1, 2, 3, length=1))
    for answer in views.answers:
        assert set(answer.seeds) == {0, 1, 2}
        assert not answer.keys
    with pytest.raises(ValueError, match="has sent its shares already"):
        protocol.unmask(views.setting, views.after[0], (0, 1))


def test_shares_and_masks_say_nothing_without_the_receiver():
    """A box opens for its receiver, with its sender and session, and for nobody else."""
    key, header = entropy()(32), b"box 0 1"
    box = keys.seal(key, b"share", header, entropy(1))
    assert keys.unseal(key, box, header) == b"share"
    for wrong in ((entropy(2)(32), box, header), (key, box, b"box 1 0"), (key, box[:-1], header)):
        with pytest.raises(ValueError, match="does not open"):
            keys.unseal(*wrong)


# Messages that do not fit


@pytest.fixture(scope="module")
def played():
    return Views(constant(1, 2, 3, length=2))


def test_a_duplicated_client_is_named(played):
    setting, sent = played.setting, list(played.masked)
    with pytest.raises(ValueError, match="Client 1 sent two messages of stage 'mask'"):
        protocol.finish(setting, played.roster, [*sent, sent[1]], played.answers)
    copy = played.roster[1]._replace(client=2)
    with pytest.raises(ValueError, match="Clients 1 and 2 have the same key"):
        protocol.roster(setting, [played.roster[0], played.roster[1], copy])


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda p: protocol.setting(3, 4, 1, 32, b""), "threshold is 4 with 3 clients"),
        (lambda p: protocol.setting(3, 1, 1, 32, b""), "threshold is 1 with 3 clients"),
        (lambda p: protocol.setting(3, 0, 1, 32, b""), "threshold is 0"),
        (lambda p: protocol.setting(3, 2, 1, 32, "one"), "session is a str"),
        (lambda p: protocol.advertise(p.setting, 3, entropy()), "place is 3"),
        (
            lambda p: protocol.mask(p.setting, p.states[0], {1: b"", 2: b""}, np.zeros(2)),
            "client 0 has shape .* float64; expected .* uint32",
        ),
        (
            lambda p: protocol.mask(p.setting, p.states[0], {1: b"", 7: b""}, p.masked[0].values),
            "got a box of client 7; expected an integer of 0 to 2",
        ),
        (
            lambda p: protocol.mask(p.setting, p.after[0], {1: b""}, p.masked[0].values),
            "sent its vector already",
        ),
        (
            lambda p: protocol.unmask(p.setting, p.after[0]._replace(answered=False), (1, 2)),
            "client 0 among them",
        ),
        (
            lambda p: protocol.unmask(p.setting, p.after[0]._replace(answered=False), (0, 9)),
            "got the survivor 9; expected an integer of 0 to 2",
        ),
        (lambda p: protocol.survivors(p.setting, p.masked[:1]), "1 clients are left"),
        (
            lambda p: protocol.survivors(p.setting, [p.masked[0]._replace(client=8)]),
            "message of client 8",
        ),
        (
            lambda p: protocol.finish(p.setting, p.roster, p.masked[:2], p.answers),
            r"answered for other clients .* seeds of clients \[0, 1\]",
        ),
        (lambda p: secure_sum([], 1.0, threshold=2, entropy=entropy()), "no contributions"),
        (
            lambda p: secure_sum(draw(), BOUND, threshold=2, entropy=entropy(), absent={"x": []}),
            "stage of `absent` is 'x'",
        ),
        (
            lambda p: secure_sum(
                draw(), BOUND, threshold=2, entropy=entropy(), absent={"mask": [10]}
            ),
            r"absent\['mask'\] has \[10\]",
        ),
        (lambda p: secure_sum(draw(), BOUND, threshold=2, entropy=7), "entropy is 7"),
    ],
)
def test_what_does_not_belong_to_the_protocol_is_refused(played, act, said):
    with pytest.raises((ValueError, TypeError), match=said):
        act(played)


def strange(entry):
    """Give a roster of three with one more entry, or with one that is another."""
    return lambda p: {**p.roster, **entry(p)}


def drawn(place, seed=9):
    """Keys that somebody drew for a place."""
    source = entropy(seed)
    return keys_of(place, *(keys.pair(source)[1] for _ in range(2)))


def keys_of(place, box, mask):
    return messages.Keys(place, box, mask)


def set_bit(public):
    """Set the bit that X25519 ignores: the same key in other bytes."""
    return public[:-1] + bytes([public[-1] | 128])


# Of orders 4, 1 and 2, and both of order 8 (Langley, Hamburg and Turner, RFC 7748, section 6.1, ask
# to refuse what they lead to); `test_what_the_roster_refuses_is_dangerous` sees that they do.
ORDERS = [
    0,
    1,
    2**255 - 20,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]
STRANGE_ROSTERS = {
    "place -1, whose share is the secret": (strange(lambda p: {-1: drawn(-1)}), "client -1"),
    "place 3 of three": (strange(lambda p: {3: drawn(3)}), "client 3; expected an integer"),
    "half a place": (strange(lambda p: {1.5: drawn(1.5)}), "client 1.5; expected an integer"),
    "True for a place": (lambda p: {0: p.roster[0], True: p.roster[1]}, "client True"),
    "a word for a place": (strange(lambda p: {"2": drawn("2")}), "client '2'"),
    "another's entry": (strange(lambda p: {2: drawn(1)}), "client 1 at the place of client 2"),
    "an entry of place -1": (strange(lambda p: {2: drawn(-1)}), "keys of client -1"),
    "other keys of one's own": (strange(lambda p: {0: drawn(0)}), "client 0 got has other keys"),
    "another mask key of one's own": (
        strange(lambda p: {0: p.roster[0]._replace(mask=drawn(0).mask)}),
        "client 0 got has other keys",
    ),
    "no keys of one's own": (lambda p: {k: p.roster[k] for k in (1, 2)}, "has no keys of its own"),
    "one key twice": (
        strange(lambda p: {2: p.roster[2]._replace(mask=p.roster[1].mask)}),
        "Clients 1 and 2 have the same key",
    ),
    "one's own key as another's": (
        strange(lambda p: {2: p.roster[2]._replace(box=p.roster[0].mask)}),
        "Clients 0 and 2 have the same key",
    ),
    "the unused bit": (
        strange(lambda p: {2: p.roster[2]._replace(mask=set_bit(p.roster[1].mask))}),
        "mask key of client 2 is not canonical",
    ),
    "a number beyond the field": (
        strange(lambda p: {2: p.roster[2]._replace(box=(2**255 - 10).to_bytes(32, "little"))}),
        "box key of client 2 is not canonical",
    ),
    "a short key": (strange(lambda p: {2: keys_of(2, b"x", b"y")}), "box key of client 2 is b'x'"),
    "no key": (strange(lambda p: {2: keys_of(2, None, None)}), "box key of client 2 is None"),
    "no entry": (strange(lambda p: {2: None}), "entry of client 2 is a NoneType"),
} | {
    f"low order {number % 1000}": (
        lambda p, n=number: {
            **p.roster,
            2: p.roster[2]._replace(mask=n.to_bytes(32, "little")),
        },
        "mask key of client 2 is of low order",
    )
    for number in ORDERS
}


@pytest.mark.parametrize("case", STRANGE_ROSTERS)
def test_a_strange_roster_is_refused_before_a_box_is_made(played, case):
    """By a client that shares, and by the server that takes the masks off the sum."""
    make, said = STRANGE_ROSTERS[case]
    roster = make(played)
    with pytest.raises((ValueError, TypeError), match=said):
        protocol.share(played.setting, played.advertised[0], roster, entropy())
    if "client 0 got" not in said and "its own" not in said:
        with pytest.raises((ValueError, TypeError), match=said):
            protocol.finish(played.setting, roster, played.masked, played.answers)


def test_what_the_roster_refuses_is_dangerous(played):
    """Another writing of a key is that key, and what is agreed on with a low order is known."""
    own, other = keys.pair(entropy(1))[0], played.roster[1].mask
    assert keys.exchange(own, set_bit(other)) == keys.exchange(own, other)
    for number in ORDERS:
        with pytest.raises(ValueError, match="shared key"):
            keys.exchange(own, number.to_bytes(32, "little"))
    # The polynomial at zero, which is where a share of place -1 would be.
    split = shares.split(b"secret", 2, [0, 1], entropy())
    first, second = (int.from_bytes(split[place]) for place in (0, 1))
    assert (2 * first - second) % shares.PRIME == int.from_bytes(b"secret")


def test_numpys_places_are_places(played):
    """They count as Python's, whatever their width."""
    roster = {np.uint8(k): x._replace(client=np.int64(k)) for k, x in played.roster.items()}
    source = entropy(3), entropy(3)
    own = played.advertised[0]
    expected = protocol.share(played.setting, own, played.roster, source[0])
    assert protocol.share(played.setting, own, roster, source[1]) == expected


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda p: protocol.advertise(p.setting, 1.5, entropy()), "place is 1.5"),
        (lambda p: protocol.advertise(p.setting, True, entropy()), "place is True"),
        (lambda p: protocol.advertise(p.setting, math.nan, entropy()), "place is nan"),
        (
            lambda p: protocol.share(
                p.setting._replace(threshold=1), p.advertised[0], p.roster, entropy()
            ),
            "threshold is 1 with 3 clients",
        ),
        (
            lambda p: protocol.unmask(p.setting._replace(threshold=0), p.after[0], [0]),
            "threshold is 0",
        ),
        (
            lambda p: protocol.roster(p.setting, [p.roster[0], p.roster[1]._replace(client=1.5)]),
            "message of client 1.5",
        ),
        (lambda p: protocol.roster(p.setting, [None, None]), "'advertise' is a NoneType"),
        (lambda p: protocol.roster(p.setting, p.masked), "'advertise' is a Masked"),
        (
            lambda p: protocol.deliver(
                p.setting, [p.sealed[0], p.sealed[1]._replace(boxes={0: b"", -1: b""})]
            ),
            "Client 1 sent a box for client -1",
        ),
        (
            lambda p: protocol.deliver(p.setting, [p.sealed[0]._replace(boxes={}), p.sealed[1]]),
            r"Client 0 sent no box for clients \[1\]",
        ),
        (
            lambda p: protocol.mask(
                p.setting, p.states[0], {1: b"", True + 1.5: b""}, p.masked[0].values
            ),
            "got a box of client 2.5",
        ),
        (
            lambda p: protocol.mask(p.setting, p.states[0], {0: b"", 1: b""}, p.masked[0].values),
            r"got boxes of clients \[0, 1\]; expected bytes, of others",
        ),
        (
            lambda p: protocol.mask(p.setting, p.states[0], {1: 1, 2: 2}, p.masked[0].values),
            "expected bytes, of others",
        ),
        (
            lambda p: protocol.unmask(
                p.setting, p.after[0]._replace(answered=False), [0, 1, 2, -1]
            ),
            "got the survivor -1",
        ),
        (
            lambda p: protocol.finish(
                p.setting, p.roster, p.masked, with_keys(p.answers, {-1: bytes(shares.SIZE)})
            ),
            "answers have keys of client -1",
        ),
        (
            lambda p: protocol.finish(
                p.setting, p.roster, p.masked, with_keys(p.answers, {1: bytes(shares.SIZE)})
            ),
            r"keys of clients \[1\], whose vectors arrived",
        ),
        (
            lambda p: protocol.finish(
                p.setting, {k: p.roster[k] for k in (0, 1)}, p.masked, p.answers
            ),
            r"Clients \[2\] are in later messages",
        ),
        (
            lambda p: protocol.finish(
                p.setting, p.roster, p.masked, [x._replace(seeds=cut(x.seeds)) for x in p.answers]
            ),
            "share of place 0 is not a number of 66 bytes",
        ),
        (lambda p: shares.split(b"s", 2, [-1, 0], entropy()), "A place is -1"),
        (lambda p: shares.split(b"s", 2, [shares.PRIME - 1, 0], entropy()), "A place is 68"),
        (lambda p: shares.split(b"s", 2, [0.5, 0], entropy()), "A place is 0.5"),
        (lambda p: shares.split(b"s", 2, [0, 0, 1], entropy()), "each only once"),
        (lambda p: shares.split(b"s", 0, [0, 1], entropy()), "threshold is 0"),
        (lambda p: shares.split(b"s", 3, [0, 1], entropy()), "threshold is 3 for 2 places"),
        (lambda p: shares.split(bytes(65), 2, [0, 1], entropy()), "A secret has 65 bytes"),
        (lambda p: shares.interpolation([0, 0]), "each only once"),
        (lambda p: shares.combine({-1: bytes(shares.SIZE)}, 32), "A place is -1"),
        (lambda p: shares.combine({0: b"\xff" * shares.SIZE, 1: bytes(66)}, 32), "place 0 is not"),
        (
            lambda p: shares.combine({0: bytes(66)}, 32, shares.interpolation([0, 1])),
            r"of places \[0, 1\] for shares of \[0\]",
        ),
    ],
)
def test_a_place_that_is_none_and_a_share_that_is_none_are_refused(played, act, said):
    with pytest.raises((ValueError, TypeError), match=said):
        act(played)


def with_keys(answers, more):
    return [x._replace(keys={**x.keys, **more}) for x in answers]


def cut(found):
    return {place: share[1:] for place, share in found.items()}


def test_a_box_of_other_bytes_is_refused_by_its_sender(played):
    """One that opens and holds something else than two shares."""
    own, (other, _) = played.after[0], played.states[1:]
    key, header = protocol._box_key(played.setting, other, played.roster[0], 1, 0)
    short = keys.seal(key, b"short", header, entropy())
    own = own._replace(answered=False, boxes={**own.boxes, 1: short})
    with pytest.raises(ValueError, match="box of client 1 for client 0 holds 5 bytes"):
        protocol.unmask(played.setting, own, (0, 1, 2))


@pytest.mark.long
def test_without_cryptography_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from fisherjax.secure_aggregation import keys\n"
        "try: keys.pair(bytes)\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'fisherjax[secure]'" in result.stdout, result.stderr


# Algorithms


def apply(params, x):
    return jnp.tanh(x @ params["a"]) @ params["b"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)
METHODS = {
    "fedavg": algorithms.fedavg(),
    "fedfisher_diag": algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal),
    "regmean": algorithms.regmean(MODEL),
    "analytic_head": algorithms.analytic_head(MODEL),
    "ccvr": algorithms.ccvr(MODEL),
    "natural_gradient": algorithms.natural_gradient(MODEL)[0],
    "fedfisher_sketched": algorithms.fedfisher_sketched(MODEL, terms=5),
}


@pytest.fixture(scope="module")
def world():
    source = np.random.default_rng(0)
    data = source.normal(size=(50, 4)).astype("f4"), source.integers(0, 3, 50).astype("i4")
    federation = fj.clients.federation(data, np.split(source.permutation(50), [14, 20, 31, 40]))
    params = {"a": source.normal(size=(4, 5)), "b": source.normal(size=(5, 3))}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    models = [jax.tree.map(lambda x, c=c: x * (1 + c / 10), params) for c in range(5)]
    return federation, params, models


def bounds(own):
    """Agree on twice the largest of anybody."""
    return jax.tree.map(lambda *x: 2 * max(float(jnp.abs(y).max()) for y in x) or 1.0, *own)


@pytest.mark.long
@pytest.mark.parametrize("name", METHODS)
def test_sums_under_masks_are_the_open_sums_of_the_survivors(world, name):
    federation, params, models = world
    method, weights = METHODS[name], federation.weights
    sent = merging.summarize(method, models, federation, key=jax.random.key(0))
    own = secure_aggregation.contributions(method, params, sent, weights)
    how = {"threshold": 3, "entropy": entropy(), "bits": 64, "absent": {"mask": [1]}}
    total, _ = secure_sum(own, bounds(own), **how)
    expected = jax.jit(method.reduce)(sent.values, weights.at[1].set(0))
    assert jax.tree.structure(total) == jax.tree.structure(expected)
    for found, exact in zip(*map(jax.tree.leaves, (total, expected)), strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


def test_a_merge_under_masks_is_the_open_merge_of_the_survivors(world):
    federation, params, models = world
    method, weights = METHODS["fedavg"], federation.weights
    sent = merging.summarize(method, models, federation, key=jax.random.key(0))
    how = {"bound": 4.0, "threshold": 3, "entropy": entropy(), "absent": {"mask": [1]}}
    masked, state, info = secure_merge(method, params, sent, weights, **how)
    merged, *_ = merging.merge(method, params, sent, weights.at[1].set(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(masked, merged)
    chex.assert_trees_all_close(masked, merged, atol=1e-6)
    assert state == info == ()


def test_factors_that_do_not_add_up_are_refused(world):
    federation, params, models = world
    method = algorithms.fedfisher(MODEL)
    sent = merging.summarize(method, models, federation, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"reduce is None.*fedfisher_sketched"):
        secure_aggregation.contributions(method, params, sent)
