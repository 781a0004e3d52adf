"""Sums under masks: exact, whatever the order and whoever drops out; nothing but the sum shows."""

import itertools
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
    _masks,
    _message_checks,
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
        (np.zeros(1, int), 1e9, 4, 32, "4 clients with leaf '' up to 1000000000.0"),
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
    "accept": {"accept": [1, 2, 5]},
    "every stage": {"advertise": [9], "share": [8], "mask": [2], "unmask": [3]},
    "as many as may": {"advertise": [9], "share": [8], "accept": [0], "mask": [2]},
}


@pytest.mark.parametrize("stage", GONE)
@pytest.mark.parametrize("bits", [32, 64])
def test_dropouts_at_any_stage_give_the_exact_sum_of_the_survivors(stage, bits):
    given, gone = draw(), GONE[stage]
    how = {"threshold": 6, "entropy": entropy(), "bits": bits, "absent": gone}
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


@pytest.mark.parametrize("stage", ["advertise", "share", "accept", "mask", "unmask"])
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

    def __init__(self, given, session=b"one", seed=0, signing=()):
        source, number = entropy(seed), len(given)
        verifiers = tuple(map(keys.verifier, signing))
        threshold = None if signing else number // 2 + 1
        how = (number, threshold, len(given[0]), 32, session)
        setting = protocol.setting(*how, verifiers=verifiers)
        signing = signing or [b""] * number
        states, sent = pairs(
            protocol.advertise(setting, u, source, signing[u]) for u in range(number)
        )
        self.setting, self.roster = setting, protocol.roster(setting, sent)
        self.advertised = states
        self.shared, self.sealed = pairs(
            protocol.share(setting, own, self.roster, source) for own in states
        )
        self.boxes = protocol.deliver(setting, self.roster, self.sealed)
        self.states, self.accepted = pairs(
            protocol.accept(setting, own, self.boxes[own.place]) for own in self.shared
        )
        self.partners = protocol.partners(setting, self.roster, self.accepted)
        self.masking, self.masked = pairs(
            protocol.mask(setting, own, self.partners, given[own.place]) for own in self.states
        )
        told = setting, self.roster, self.partners
        stayed, self.confirmed = protocol.survivors(*told, self.masked), []
        before = self.masking
        if verifiers:
            before, sent = pairs(protocol.confirm(setting, own, stayed) for own in before)
            self.confirmed = protocol.confirmed(*told, stayed, sent)
        self.after, self.answers = pairs(
            protocol.unmask(setting, own, stayed, self.confirmed) for own in before
        )
        self.total = protocol.finish(*told, self.masked, self.answers)

    def bare(self):
        """Take each client's own mask off, which the server can."""
        view = _masks.mask_view(self.setting, self.roster, self.partners)
        own = [_masks.self_key(view, state.seed) for state in self.states]
        drawn = [_masks.expanded(self.setting, key) for key in own]
        return [m.values - mask for m, mask in zip(self.masked, drawn, strict=True)]


def fresh(own):
    """Return a client's state as if it had gone no further, as a copy of its memory would."""
    order = (*protocol.stages(messages.Setting(2, 2, 1, 32, b"")), "")
    return own._replace(spent=set(order[: order.index(own.stage) + 1]))


def again(message, **changed):
    """Return a message with other fields and the checksum of these."""
    return _message_checks.tagged(b"", message._replace(**changed))


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
    """The test above, broken on purpose: masks are almost constant."""
    stretch = keys.keystream
    own = partial(np.bitwise_and, np.uint32(3))
    monkeypatch.setattr(
        keys, "keystream", lambda *args: own(np.frombuffer(stretch(*args), np.uint32)).tobytes()
    )
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
            Views(constant(1, 2, 3, 4, length=1), session)
    return used


def is_used_once(used):
    """Each by two: a pair's by its owners, another by its owner and the server; two sessions."""
    counts = [used.count(key) for key in set(used)]
    return counts == [2] * (4 + 6) * 2


def test_no_mask_is_used_twice(monkeypatch):
    assert is_used_once(recorded_masks(monkeypatch))


BROKEN = {
    "the view left out": lambda secret, view, use: (secret, b"", use),
    "the secret left out": lambda secret, view, use: (bytes(32), view, use),
    "only the use": lambda secret, view, use: (bytes(32), b"", use.split()[0]),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_derivation_is_caught(monkeypatch, how):
    derive = keys.derive

    def broken(*given):
        # A commitment is no mask: one without its secret is refused, as those of all are equal.
        return derive(*(given if given[2] == "commitment" else BROKEN[how](*given)))

    monkeypatch.setattr(keys, "derive", broken)
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
    with pytest.raises(ValueError, match=r"of stage 'unmask' .* already; expected .* once"):
        protocol.unmask(views.setting, views.after[0], (0, 1, 2))


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


def finish(played, **changed):
    known = {k: vars(played)[k] for k in ("roster", "partners", "masked", "answers")}
    return protocol.finish(played.setting, **{**known, **changed})


def test_a_duplicated_client_is_named(played):
    setting, sent = played.setting, list(played.masked)
    with pytest.raises(ValueError, match="Client 1 sent two messages of stage 'mask'"):
        finish(played, masked=[*sent, sent[1]])
    copy = again(played.roster[1], client=2)
    with pytest.raises(ValueError, match="Clients 1 and 2 have the same key"):
        protocol.roster(setting, [played.roster[0], played.roster[1], copy])


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda p: protocol.setting(3, 4, 1, 32, b""), "threshold is 4 with 3 clients"),
        (lambda p: protocol.setting(3, 1, 1, 32, b""), "threshold is 1 with 3 clients"),
        (lambda p: protocol.setting(3, 0, 1, 32, b""), "threshold is 0"),
        (lambda p: protocol.setting(3, 2, 1, 32, "one"), "session is a str"),
        (lambda p: protocol.setting(1, None, 1, 32, b""), "num_clients is 1"),
        (lambda p: protocol.setting(2, 2, 1, 32, b"", b"", [b"x", b"y"]), "2 verifiers of 2"),
        (lambda p: protocol.setting(2, 2, 1, 32, b"", b"", [bytes(32)] * 2), "all different"),
        (lambda p: protocol.advertise(p.setting, 3, entropy()), "place is 3"),
        (lambda p: protocol.advertise(p.setting, 0, entropy(), bytes(32)), "is another"),
        (lambda p: protocol.advertise(p.setting, 0, entropy(), b"x"), "signing key has 1 bytes"),
        (lambda p: protocol.advertise((3, 2, 1), 0, entropy()), "agreed is a tuple"),
        (
            lambda p: protocol.mask(p.setting, fresh(p.states[0]), p.partners, np.zeros(2)),
            "client 0 has shape .* float64; expected .* uint32",
        ),
        (
            lambda p: protocol.mask(p.setting, fresh(p.states[0]), p.partners, [1, 2]),
            "vector of client 0 is a list",
        ),
        (
            lambda p: protocol.accept(p.setting, fresh(p.shared[0]), {1: b"", 7: b""}),
            "got a box of client 7; expected an integer of 0 to 2",
        ),
        (
            lambda p: protocol.accept(p.setting, fresh(p.shared[0]), {0: b"", 1: b""}),
            r"Clients \[0\] are in later messages",
        ),
        (
            lambda p: protocol.confirm(p.setting, fresh(p.masking[0]), p.partners),
            "The stage is 'confirm'",
        ),
        (lambda p: protocol.unmask(p.setting, fresh(p.masking[0]), (1, 2)), "client 0 among them"),
        (
            lambda p: protocol.mask(p.setting, fresh(p.masking[0]), p.partners, p.masked[0].values),
            "expected a state after stage 'accept'",
        ),
        (
            lambda p: protocol.unmask(p.setting, fresh(p.states[0]), (0, 1, 2)),
            "expected a state after stage 'mask'",
        ),
        (
            lambda p: protocol.unmask(p.setting._replace(length=3), fresh(p.masking[0]), (0, 1, 2)),
            "drew its keys for another setting",
        ),
        (
            lambda p: protocol.unmask(p.setting, fresh(p.masking[0]), (0, 1, 2, 9)),
            "got the client 9; expected an integer of 0 to 2",
        ),
        (
            lambda p: protocol.survivors(p.setting, p.roster, p.partners, p.masked[:1]),
            "1 clients are left",
        ),
        (
            lambda p: protocol.survivors(
                p.setting, p.roster, p.partners, [p.masked[0]._replace(client=8)]
            ),
            "message of client 8",
        ),
        (lambda p: finish(p, masked=p.masked[:2]), "Client 0 .* 'unmask' with another view"),
        (lambda p: secure_sum([], 1.0, entropy=entropy()), "no contributions"),
        (
            lambda p: secure_sum(draw(), BOUND, entropy=entropy(), absent={"x": []}),
            "stage of `absent` is 'x'",
        ),
        (
            lambda p: secure_sum(draw(), BOUND, entropy=entropy(), absent={"confirm": [1]}),
            "stage of `absent` is 'confirm'",
        ),
        (
            lambda p: secure_sum(draw(), BOUND, entropy=entropy(), absent={"mask": [10]}),
            r"absent\['mask'\] has client 10; expected an integer of 0 to 9",
        ),
        (lambda p: secure_sum(draw(), BOUND, threshold=6, entropy=7), "entropy is 7"),
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
    return messages.Keys(place, box, mask, entropy(7)(32))


def agreeing(p, roster):
    """Return a roster of which nothing but the keys and places is strange."""
    view = _masks.plan_view(p.setting)
    return {
        k: again(x, view=view) if isinstance(x, messages.Keys) else x for k, x in roster.items()
    }


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
    roster = agreeing(played, make(played))
    with pytest.raises((ValueError, TypeError), match=said):
        protocol.share(played.setting, fresh(played.advertised[0]), roster, entropy())
    # Nor is a sum made with another roster than the clients', whatever is strange about it.
    with pytest.raises((ValueError, TypeError)):
        finish(played, roster=roster)


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
    own = [fresh(played.advertised[0]) for _ in range(2)]
    expected = protocol.share(played.setting, own[0], played.roster, source[0])
    assert protocol.share(played.setting, own[1], roster, source[1]) == expected


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
        (lambda p: protocol.roster(p.setting, None), "'advertise' is a NoneType"),
        (
            lambda p: protocol.roster(p.setting, [again(x, seed=b"short") for x in roster_of(p)]),
            "commitment of client 0 to its seed is b'short'",
        ),
        (
            lambda p: protocol.deliver(
                p.setting, p.roster, [p.sealed[0], again(p.sealed[1], boxes={-1: b""})]
            ),
            "A box of client 1 is for client -1",
        ),
        (
            lambda p: protocol.accept(p.setting, fresh(p.shared[0]), {1: b"", True + 1.5: b""}),
            "got a box of client 2.5",
        ),
        (
            lambda p: protocol.partners(
                p.setting, p.roster, [again(x, senders=(0.5,)) for x in p.accepted]
            ),
            "A box that client 0 accepted is of client 0.5",
        ),
        (
            lambda p: protocol.unmask(p.setting, fresh(p.masking[0]), [0, 1, 2, -1]),
            "got the client -1",
        ),
        (
            lambda p: finish(p, answers=with_keys(p.answers, {-1: bytes(shares.SIZE)})),
            "A share of keys of client 0 is of client -1",
        ),
        (
            lambda p: finish(p, answers=with_keys(p.answers, {1: bytes(shares.SIZE)})),
            r"keys of clients \[1\]; expected .* keys of \[\], whose vectors did not",
        ),
        (lambda p: finish(p, partners=(0, 1)), "Client 0 .* 'mask' with another view"),
        (
            lambda p: finish(p, answers=[again(x, seeds=cut(x.seeds)) for x in p.answers]),
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
    return [again(x, keys={**x.keys, **more}) for x in answers]


def roster_of(played):
    return list(played.roster.values())


def cut(found):
    return {place: share[1:] for place, share in found.items()}


def seal(played, text, sender=1, receiver=0):
    """Make a box as a client could that lies to another."""
    view = _masks.roster_view(played.setting, played.roster)
    own, other = played.shared[sender], played.roster[receiver]
    return keys.seal(*_box(view, own, other, sender, receiver, text), entropy())


def _box(view, own, other, sender, receiver, text):
    key, header = _masks.box_key(view, own, other, sender, receiver)
    return key, text, header


GARBAGE = {
    "bytes": lambda p: b"garbage of some length, longer than a nonce and a tag",
    "nothing": lambda p: b"",
    "no bytes": lambda p: {1: 2},
    "no box": None,
    "one that opens and holds five bytes": lambda p: seal(p, b"short"),
    "one that opens and holds no shares": lambda p: seal(p, b"\xff" * 2 * shares.SIZE),
    "that of another": lambda p: p.boxes[0][2],
    "one for another": lambda p: p.boxes[2][1],
    "one of another view": lambda p: Views(constant(1, 2, 3, length=2), b"two").boxes[0][1],
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_box_that_does_not_open_is_told_and_its_sender_left_out(played, what):
    """Before anything is masked, and by name; the others go on."""
    boxes, make = dict(played.boxes[0]), GARBAGE[what]
    if make is None:
        del boxes[1]
    else:
        boxes[1] = make(played)
    _, said = protocol.accept(played.setting, fresh(played.shared[0]), boxes)
    assert said.senders == (2,)
    told = [said, *played.accepted[1:]]
    with pytest.warns(UserWarning, match=r"Client 1 is left out.* open for clients \[0\]"):
        assert protocol.partners(played.setting, played.roster, told) == (0, 2)


def test_garbage_of_one_client_does_not_stop_the_others():
    """Whether it sends boxes that nobody can open, or says that it can open nobody's."""
    for lies in (lambda u, said: {0, 1, 3, 4} - {u}, lambda u, said: () if u == 2 else said):
        given = constant(1, 2, 3, 4, 5, length=2)
        views = Views(given)
        told = [again(x, senders=tuple(sorted(lies(x.client, x.senders)))) for x in views.accepted]
        with pytest.warns(UserWarning, match="Client 2 is left out"):
            partners = protocol.partners(views.setting, views.roster, told)
        assert partners == (0, 1, 3, 4)
        states = [fresh(views.states[u]) for u in partners]
        states, masked = pairs(
            protocol.mask(views.setting, own, partners, given[own.place]) for own in states
        )
        answers = [protocol.unmask(views.setting, own, partners)[1] for own in states]
        told = {"partners": partners, "masked": masked, "answers": answers}
        np.testing.assert_array_equal(finish(views, **told), [12, 12])


# One state twice, broken entropy, thresholds


def test_no_state_gives_two_messages(played):
    """A client's states know of each other, so that an older one gives nothing more."""
    asked = {
        "share": lambda p: protocol.share(p.setting, p.advertised[0], p.roster, entropy(5)),
        "accept": lambda p: protocol.accept(p.setting, p.shared[0], p.boxes[0]),
        "mask": lambda p: protocol.mask(p.setting, p.states[0], p.partners, p.masked[0].values),
        "unmask": lambda p: protocol.unmask(p.setting, p.masking[0], (0, 1, 2)),
    }
    for stage, act in asked.items():
        with pytest.raises(ValueError, match=f"already; expected .* for stage '{stage}', once"):
            act(played)


def test_a_message_that_fails_leaves_the_state_as_it_was(played):
    own = fresh(played.states[0])
    with pytest.raises(ValueError, match="expected"):
        protocol.mask(played.setting, own, played.partners, np.zeros(3, np.uint32))
    _, sent = protocol.mask(played.setting, own, played.partners, constant(1, length=2)[0])
    np.testing.assert_array_equal(sent.values, played.masked[0].values)


BROKEN_SOURCES = {
    "fewer bytes": (lambda size: entropy()(size - 1), "returned 15 bytes; expected 16"),
    "more bytes": (lambda size: entropy()(size + 1), "returned 17 bytes; expected 16"),
    "zeros": (bytes, "returned 16 equal bytes"),
    "ones": (lambda size: b"\xff" * size, "returned 16 equal bytes"),
    "text": (lambda size: "x" * size, "returned a str"),
    "nothing": (lambda size: None, "returned a NoneType"),
    "one seed at every call": (lambda size: entropy()(size), "returned the same bytes twice"),
    "a counter from zero": (lambda size: bytes(range(size)), "returned the same bytes twice"),
}


@pytest.mark.parametrize("how", BROKEN_SOURCES)
def test_entropy_that_is_none_is_refused(how):
    source, said = BROKEN_SOURCES[how]
    with pytest.raises(ValueError, match=said):
        secure_sum(list(np.eye(3)), 1.0, entropy=source)


def test_entropy_is_checked_wherever_it_is_drawn(played):
    def short(size):
        return entropy()(size)[1:]

    for act in (
        lambda: protocol.advertise(played.setting, 0, short),
        lambda: protocol.share(played.setting, fresh(played.advertised[0]), played.roster, short),
        lambda: shares.split(b"secret", 2, [0, 1], short),
    ):
        with pytest.raises(ValueError, match="entropy returned"):
            act()


@pytest.mark.parametrize(
    ("number", "plain", "signed"), [(2, 2, 2), (3, 2, 3), (4, 3, 3), (9, 5, 7), (1000, 501, 667)]
)
def test_the_least_threshold_is_that_of_the_model(number, plain, signed):
    """With c clients that lie, a server needs 2 t shares of n + c, and t shares of c.

    An honest client gives one share of each client's secrets, a liar both: two groups of t clients
    have to share an honest one, 2 t > n + c. That holds for all c < n / 3 if t > 2 n / 3.
    """
    known = [number.to_bytes(32) for number in range(number)]
    for least, verifiers in ((plain, ()), (signed, known)):
        assert protocol.setting(number, least, 1, 32, b"", b"", verifiers).threshold == least
        expected = f"{least} to {number}" if least < number else number
        with pytest.raises(ValueError, match=f"expected {expected} with"):
            protocol.setting(number, least - 1, 1, 32, b"", b"", verifiers)
        default = protocol.setting(number, None, 1, 32, b"", b"", verifiers).threshold
        assert default == signed
        colluders = (number - 1) // 3
        assert 2 * default > number + colluders
        assert default > colluders


def test_as_many_keys_as_the_threshold_are_enough():
    given = constant(1, 2, 3, 4, 5)
    gone = {"advertise": [1, 3]}
    how = {"threshold": 3, "entropy": entropy(), "absent": gone}
    assert secure_sum([x[:1].astype(int) for x in given], 9, **how).total == 1 + 3 + 5


# Bounds


@pytest.mark.parametrize("number", [1, 2, 3, 1000])
@pytest.mark.parametrize("bits", [32, 64])
def test_integers_at_the_edge_of_their_bound_do_not_wrap(number, bits):
    """The largest bound that is accepted, by all clients, has the sum of Python's integers."""
    edge = (2 ** (bits - 1) - 1) // number
    ring = fixed_point.ring(np.zeros(2, int), edge, number, bits)
    row = fixed_point.encode(ring, np.array([edge, -edge]))
    total = np.multiply(row, number, dtype=row.dtype)
    assert fixed_point.decode(ring, total).tolist() == [edge * number, -edge * number]
    with pytest.raises(ValueError, match="overflow integers"):
        fixed_point.ring(np.zeros(2, int), edge + 1, number, bits)


@pytest.mark.parametrize("more", [1, 100, -(2**60) * 2 - 1])
def test_bounds_are_compared_as_integers(more):
    """2^60 + 100 is 2^60 in floating point."""
    ring = fixed_point.ring(np.zeros(1, int), 2**60, 2, 64)
    assert fixed_point.encode(ring, np.array([2**60])) == 2**60
    with pytest.raises(ValueError, match=f"{abs(2**60 + more)}, beyond the agreed bound {2**60}"):
        fixed_point.encode(ring, np.array([2**60 + more]))


def test_clients_with_other_encodings_refuse_each_other(monkeypatch):
    """Their integers would be added as if they were of one scale."""
    like, rings = {"w": np.zeros(2)}, []
    for how in ((like, 1.0, 3), (like, 2.0, 3), (like, 1.0, 3, 64), ({"v": np.zeros(2)}, 1.0, 3)):
        rings.append(fixed_point.ring(*how))
    rings.append(fixed_point.ring(like, 1.0, 3, room=0.5))
    assert len(set(map(fixed_point.digest, rings))) == len(rings)
    assert fixed_point.digest(rings[0]) == fixed_point.digest(fixed_point.ring(like, 1.0, 3))
    settings = [protocol.setting(3, 2, 2, 32, b"", fixed_point.digest(x)) for x in rings[:2]]
    sent = [protocol.advertise(settings[u == 2], u, entropy(u))[1] for u in range(3)]
    with pytest.raises(ValueError, match=r"Client 2 .* with another view of the sum"):
        protocol.roster(settings[0], sent)
    # A sum of all parties in one process states its encoding too.
    stated, make = [], protocol.setting
    monkeypatch.setattr(protocol, "setting", lambda *given: stated.append(given) or make(*given))
    secure_sum([like] * 3, 1.0, entropy=entropy())
    assert fixed_point.digest(rings[0]) in stated[0]


def test_a_client_that_is_not_finite_is_refused_before_a_key_is_drawn():
    given = [np.zeros(2), np.array([0.0, np.nan]), np.ones(2)]
    drawn = []

    def source(size):
        drawn.append(size)
        return entropy(len(drawn))(size)

    with pytest.raises(ValueError, match="client 1 is not finite"):
        secure_sum(given, 1.0, entropy=source)
    assert drawn == [16], "nothing but the session, which is public"
    # A client that is left out, or that drops out before, need not have a vector.
    for stage in ("advertise", "share", "accept", "mask"):
        how = {"threshold": 2, "entropy": entropy(), "absent": {stage: [1]}}
        np.testing.assert_array_equal(secure_sum(given, 1.0, **how).total, [1.0, 1.0])


@pytest.mark.parametrize("bits", [32, 64])
def test_noise_is_added_to_the_integers_before_they_are_masked(bits):
    """The sum is that of the rounded values and all draws, and its room is kept."""
    given, drawn = draw(number=4), []

    def source(leaf):
        drawn.append((leaf, np.random.default_rng(len(drawn)).integers(-9, 10, leaf.shape)))
        return drawn[-1][1]

    noise = fixed_point.Noise(source, room=20.0)
    found = secure_sum(given, BOUND, entropy=entropy(), bits=bits, noise=noise).total
    for name in ("w", "n"):
        mine = [(leaf, x) for leaf, x in drawn if name in leaf.name]
        exponent = mine[0][0].exponent
        rounded = sum(np.rint(np.ldexp(x[name].astype(float), exponent)) for x in given)
        exact = np.ldexp(rounded + sum(x for _, x in mine), -exponent)
        np.testing.assert_array_equal(found[name], exact)
    # Clients at the bound and noise at the end of its room still fit.
    ring = fixed_point.ring(np.zeros(1), 1.0, 3, bits, room=2.0)

    def most(leaf):
        return np.full(leaf.shape, math.floor(math.ldexp(2.0, leaf.exponent)))

    row = fixed_point.encode(ring, np.ones(1), "client 0", most)
    total = np.multiply(row, 3, dtype=row.dtype)
    np.testing.assert_allclose(fixed_point.decode(ring, total), [9.0], rtol=1e-6)
    for wrong in (lambda leaf: most(leaf) + 1, lambda leaf: 0.5, lambda leaf: np.zeros(2, int)):
        with pytest.raises(ValueError, match=r"The noise for leaf ''.* expected integers"):
            fixed_point.encode(ring, np.ones(1), "client 0", wrong)


# Signatures

SIGNING = [bytes([number]) * 32 for number in range(1, 8)]


@pytest.mark.parametrize("bits", [32, 64])
def test_signed_sums_are_exact_whoever_drops_out(bits):
    given = draw(number=7)
    for stage in ("advertise", "share", "accept", "mask", "confirm", "unmask"):
        gone = {stage: [1, 4]}
        how = {"entropy": entropy(), "bits": bits, "absent": gone, "signing": SIGNING}
        found = secure_sum(given, BOUND, **how)
        lost = () if stage in ("confirm", "unmask") else (1, 4)
        assert found.survivors == tuple(u for u in range(7) if u not in lost)
        exact = sum(given[u]["n"] for u in found.survivors)
        np.testing.assert_array_equal(found.total["n"], exact)


def test_clients_that_were_told_of_other_survivors_do_not_answer():
    """A server that asks one for a client's seed and another for its key gets neither."""
    views = Views(constant(1, 2, 3, 4, length=1), signing=SIGNING[:4])
    told = (0, 1, 2), (0, 1, 2, 3)
    states, sent = [], []
    for own in views.masking:
        own, said = protocol.confirm(views.setting, confirmed_none(own), told[own.place > 1])
        states.append(own)
        sent.append(said)
        if own.place == 2:
            break
    for own in states:
        for stayed in told:
            with pytest.raises(ValueError, match=r"another view|clients are left|in later"):
                protocol.unmask(views.setting, own, stayed, sent)
    # All that it can say again is what it signed.
    with pytest.raises(ValueError, match="for stage 'confirm', once"):
        protocol.confirm(views.setting, states[0], told[1])


def test_a_client_answers_for_the_list_that_it_signed_alone():
    """Even if enough others signed another."""
    views = Views(constant(1, 2, 3, 4, length=1), signing=SIGNING[:4])
    lists = [(0, 1, 2, 3)] * 3 + [(1, 2, 3)]
    states, sent = pairs(
        protocol.confirm(views.setting, confirmed_none(own), stayed)
        for own, stayed in zip(views.masking, lists, strict=True)
    )
    protocol.unmask(views.setting, states[0], lists[0], sent[:3])
    with pytest.raises(ValueError, match=r"client 3 got .* signed the survivors \[1, 2, 3\]"):
        protocol.unmask(views.setting, states[3], lists[0], sent[:3])


@pytest.mark.parametrize("told", list(itertools.product([(0, 1, 2, 3), (0, 1, 3)], repeat=2)))
def test_no_lists_of_survivors_give_both_secrets_of_a_client(told):
    """Client 2 is the victim, client 3 helps the server, which tells each its own list."""
    views, victim = Views(constant(1, 2, 3, 4, length=1), signing=SIGNING[:4]), 2
    lists = dict(zip((0, 1), told, strict=True)) | {2: (0, 1, 2, 3)}
    honest, signed = {}, {stayed: [] for stayed in {*told, (0, 1, 2, 3)}}
    for own in views.masking:
        # Who helps the server signs every list.
        for stayed in signed if own.place == 3 else [lists[own.place]]:
            after, said = protocol.confirm(views.setting, confirmed_none(own), stayed)
            signed[stayed].append(said)
            honest[own.place] = after
    # The helper knows its share of both.
    found = {"seeds": 1, "keys": 1}
    for place, stayed in lists.items():
        try:
            _, answer = protocol.unmask(views.setting, honest[place], stayed, signed[stayed])
        except ValueError:
            continue
        found["seeds"] += victim in answer.seeds
        found["keys"] += victim in answer.keys
    assert min(found.values()) < views.setting.threshold
    # One list has enough signatures, and the sum over it is what the server may learn.
    assert max(found.values()) >= views.setting.threshold


def confirmed_none(own):
    return own._replace(spent={"advertise", "share", "accept", "mask"})


def test_a_share_that_was_changed_is_blamed_on_its_sender():
    """By what the owners published, where the others are enough; and the sum goes on without."""
    for kind, gone in (("seeds", ()), ("keys", (3,))):
        views = Views(constant(1, 2, 3, 4, 5, length=1))
        stayed = tuple(u for u in range(5) if u not in gone)
        masked = [x for x in views.masked if x.client in stayed]
        answers = [
            protocol.unmask(views.setting, fresh(views.masking[u]), stayed)[1] for u in stayed
        ]
        owner = 3
        share = getattr(answers[1], kind)[owner]
        wrong = (int.from_bytes(share) ^ 1).to_bytes(shares.SIZE)
        changed = {**getattr(answers[1], kind), owner: wrong}
        lies = [answers[0], again(answers[1], **{kind: changed}), *answers[2:]]
        said = f"shares of the {kind[:-1]} of client 3 .* those of clients \\[1\\] are wrong"
        with pytest.raises(protocol.WrongShares, match=said) as found:
            finish(views, masked=masked, answers=lies)
        assert found.value.clients == (1,)
        lies.pop(1)
        exact = sum(u + 1 for u in stayed)
        assert finish(views, masked=masked, answers=lies) == exact


def test_one_who_shared_another_secret_than_it_published_is_named():
    """Nobody who passes on its shares is blamed for that."""
    views = Views(constant(1, 2, 3, 4, 5, length=1))
    other = shares.split(bytes(keys.SECRET), views.setting.threshold, range(5), entropy())
    lies = [again(x, seeds={**x.seeds, 3: other[x.client]}) for x in views.answers]
    with pytest.raises(protocol.WrongShares, match="or client 3 shared another secret") as found:
        finish(views, answers=lies)
    assert found.value.clients == ()


def test_keys_that_are_equal_as_points_are_one_key(played):
    """A point of order two added to another gives all the same secrets, in other bytes."""
    own, other = keys.pair(entropy(1))[0], played.roster[1].mask
    # On y^2 = x^3 + 486662 x^2 + x the point (0, 0) has order two, and adding it takes x to 1 / x.
    field = 2**255 - 19
    twin = pow(int.from_bytes(other, "little"), -1, field).to_bytes(32, "little")
    assert keys.exchange(own, twin) == keys.exchange(own, other)
    roster = {**played.roster, 2: again(played.roster[2], mask=twin)}
    with pytest.raises(ValueError, match="Clients 1 and 2 have the same key"):
        protocol.share(played.setting, fresh(played.advertised[0]), roster, entropy())


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
    "task_arithmetic": algorithms.task_arithmetic(),
    "fedfisher_diag": algorithms.fedfisher(MODEL, fisher=fj.fisher.diagonal, centre="sum"),
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
