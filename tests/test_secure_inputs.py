"""What users pass to a secure sum: taken in whatever form it has, or refused in words."""

import os

import numpy as np
import pytest

from fisherjax.secure_aggregation import _message_checks, fixed_point, keys, protocol, secure_sum

FORMS = {
    "array": np.array,
    "NumPy's integers": lambda x: list(map(np.int64, x)),
    "bytes of NumPy": lambda x: [np.uint8(place) for place in x],
    "another order": lambda x: tuple(reversed(x)),
    "each twice": lambda x: [*x, *x],
    "an iterator": iter,
}


@pytest.mark.parametrize("is_signed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_server_takes_places_and_settings_in_every_form(form, is_signed):
    """As they are read from files and computed by NumPy, when clients got Python's integers."""
    number, told = 4, FORMS[form]
    signing = [os.urandom(32) for _ in range(number)] if is_signed else [b""] * number
    verifiers = list(map(keys.verifier, signing)) if is_signed else []
    agreed = protocol.setting(number, None, 2, 32, b"one", b"", verifiers)
    # As from JSON, where tuples are lists, and from NumPy.
    loose = agreed._replace(num_clients=np.int64(number), verifiers=verifiers)
    values = np.arange(8, dtype=np.uint32).reshape(number, 2)

    def step(function, places, *given):
        found = [function(loose, own[u], *(x[u] for x in given)) for u in places]
        own.update(zip(places, [state for state, _ in found], strict=True))
        return [message for _, message in found]

    places = range(number)
    first = [protocol.advertise(loose, u, os.urandom, signing[u]) for u in places]
    own = dict(enumerate(state for state, _ in first))
    public = protocol.roster(loose, [message for _, message in first])
    sent = step(lambda a, o: protocol.share(a, o, public, os.urandom), places)
    # The roster that the server keeps, by NumPy's integers.
    kept = {np.int64(u): x for u, x in public.items()}
    boxes = protocol.deliver(loose, kept, sent)
    partners = protocol.partners(loose, kept, step(protocol.accept, places, boxes))
    masked = step(lambda a, o, x: protocol.mask(a, o, partners, x), places, values)[:3]
    stayed = protocol.survivors(loose, kept, told(partners), masked)
    assert stayed == (0, 1, 2)
    seen = []
    if is_signed:
        said = step(lambda a, o: protocol.confirm(a, o, told(stayed)), stayed)
        seen = protocol.confirmed(loose, kept, told(partners), told(stayed), said)
    answers = step(lambda a, o: protocol.unmask(a, o, stayed, seen), stayed)
    total = protocol.finish(loose, kept, told(partners), masked, answers)
    np.testing.assert_array_equal(total, values[:3].sum(0))


def test_one_verifier_too_many_is_refused():
    """Though as many are different as there are clients, places 0 and 1 had the same."""
    known = [keys.verifier(os.urandom(32)) for _ in range(3)]
    with pytest.raises(ValueError, match="There are 4 verifiers of 3 clients"):
        protocol.setting(3, None, 1, 32, b"one", b"", [known[0], *known])


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("number", [1, 3, 1000])
def test_a_sum_is_finite_or_refused(number, bits):
    """In float64, in which it is returned: the largest bound, and the first beyond."""
    most = np.finfo(float).max
    for bound in (most, most / number, most / number * (1 - 1e-6)):
        if bound >= most / number:
            with pytest.raises(ValueError, match="overflow float64"):
                fixed_point.ring(np.zeros(1), bound, number, bits)
            continue
        ring = fixed_point.ring(np.zeros(1), bound, number, bits)
        row = fixed_point.encode(ring, np.array([bound]))
        total = fixed_point.decode(ring, np.multiply(row, number, dtype=row.dtype))
        np.testing.assert_allclose(total, number * bound, rtol=number / 2.0**29)


def test_what_is_beyond_a_bound_is_written_with_its_last_digit():
    ring = fixed_point.ring(np.zeros(1), 1.0, 3)
    with pytest.raises(ValueError, match=r"entry of 1\.0000000000000002, beyond .* bound 1\.0\."):
        fixed_point.encode(ring, np.array([1 + 2.0**-52]))
    with pytest.raises(ValueError, match="up to 715827883 overflow integers of 32 bits"):
        fixed_point.ring(np.zeros(1, int), 715827883, 3)


@pytest.mark.parametrize("bound", [0, -1, -0.5, np.inf, np.nan])
def test_a_bound_is_positive_in_one_sentence(bound):
    with pytest.raises(ValueError, match="expected a positive number that is finite"):
        fixed_point.ring(np.zeros(1), bound, 3)


@pytest.mark.parametrize("make", [list, iter, tuple, np.stack, lambda x: (row for row in x)])
def test_contributions_come_in_any_order_that_has_one(make):
    rows = list(np.eye(3) / 2)
    gone = {"mask": iter([np.int64(1)])}
    found = secure_sum(make(rows), 1.0, threshold=2, entropy=os.urandom, absent=gone)
    assert found.total.tolist() == [0.5, 0, 0.5]


WRONG = {
    "a dict of clients": ({"contributions": {"a": np.eye(3)}}, "contributions is a dict"),
    "a number": ({"contributions": 3.0}, "contributions is a float"),
    "an array without clients": ({"contributions": np.array(1.0)}, "contributions is a ndarray"),
    "a place for places": ({"absent": {"mask": 1}}, r"absent\['mask'\] has clients 1; expected"),
    "True for a place": ({"absent": {"mask": [True]}}, r"absent\['mask'\] has client True"),
    "pairs": ({"absent": [("mask", [1])]}, "absent is a list"),
    "a function for noise": ({"noise": lambda leaf: 0}, "noise is a function; expected fixed_poi"),
    "noise that draws nothing": ({"noise": fixed_point.Noise(1, 2.0)}, "noise.draw is 1"),
    "no signing keys": ({"signing": None}, "signing is a NoneType"),
    "a short signing key": ({"signing": [bytes(31)] * 3}, "A signing key has 31 bytes"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_argument_of_a_sum_is_refused_in_words(what):
    given, said = WRONG[what]
    how = {"contributions": list(np.eye(3)), "bound": 1.0, "entropy": os.urandom} | given
    with pytest.raises((ValueError, TypeError), match=said):
        secure_sum(**how)


def test_what_is_no_state_or_roster_is_refused_in_words():
    agreed = protocol.setting(3, None, 3, 32, b"one")
    for act, said in (
        (lambda: protocol.mask(agreed, None, (0, 1), None), "own is a NoneType; expected the cli"),
        (lambda: protocol.deliver(agreed, [1, 2], []), "The roster is a list; expected the keys"),
        (lambda: protocol.survivors(agreed, {0: 1}, (0, 1), []), "entry of client 0 is an int"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            act()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda box: box + b"x", "has 161 bytes; expected the 160 bytes of two sealed shares"),
        (lambda box: box[:-1], "has 159 bytes"),
        (lambda box: bytes(50_000), "has 50000 bytes"),
        (bytearray, "is a bytearray"),
        (lambda box: None, "is a NoneType"),
    ],
)
def test_a_box_of_another_length_is_not_passed_on(change, said):
    """Its sender made it so: the message has its checksum."""
    agreed = protocol.setting(3, None, 1, 32, b"one")
    first = [protocol.advertise(agreed, u, os.urandom) for u in range(3)]
    roster = protocol.roster(agreed, [message for _, message in first])
    sent = [protocol.share(agreed, own, roster, os.urandom)[1] for own, _ in first]
    assert protocol.deliver(agreed, roster, sent)[2][1] == sent[1].boxes[2]
    boxes = sent[1].boxes | {2: change(sent[1].boxes[2])}
    sent[1] = _message_checks.tagged(b"", sent[1]._replace(boxes=boxes))
    with pytest.raises(ValueError, match=f"The box of client 1 for client 2 {said}"):
        protocol.deliver(agreed, roster, sent)
