"""Roles and windows: every character of speech once, and each target is the next input."""

import itertools
import string

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherjax import (
    Examples,
    Model,
    clients,
    datasets,
    likelihoods,
    metrics,
    networks,
    text,
    training,
)

PLAY = """A street.

ROMEO:
Is the day so young?

BENVOLIO:
But new struck nine.

ROMEO:
Ay me! sad hours seem long:
Was that my father?"""


@pytest.fixture(scope="module")
def shakespeare(shared):
    if not (shared / "data" / "tiny_shakespeare").is_dir():
        pytest.skip("needs ../shared/data/tiny_shakespeare")
    return datasets.load_text(data_dir=shared / "data")


@pytest.fixture(scope="module")
def roles(shakespeare):
    return text.roles(shakespeare)


# Roles


def test_a_role_is_everything_that_its_speaker_says():
    assert text.roles(PLAY, openings=()) == (
        ("", "ROMEO", "Is the day so young?\nAy me! sad hours seem long:\nWas that my father?"),
        ("", "BENVOLIO", "But new struck nine."),
    )


def test_a_speaker_of_two_plays_is_two_roles():
    openings = [("one", "ROMEO:\nIs the day"), ("two", "BENVOLIO:\nBut new")]
    found = text.roles(PLAY, openings)
    assert [role[:2] for role in found] == [("one", "ROMEO"), ("two", "BENVOLIO"), ("two", "ROMEO")]


def test_paragraphs_without_a_name_and_names_without_words_are_nobodys():
    extra = "\n\nROMEO:\n\n:\nNo name.\n\nEnter JULIET: she sighs.\nAy me!"
    assert text.roles(PLAY + extra, openings=()) == text.roles(PLAY, openings=())


def test_line_ends_and_the_number_of_empty_lines_do_not_matter():
    other = PLAY.replace("\n\n", "\n\n\n").replace("\n", "\r\n") + "\r\n"
    assert text.roles(other, openings=()) == text.roles(PLAY, openings=())


@pytest.mark.parametrize(
    ("openings", "found"),
    [
        ([("one", "JULIET:\nAy me")], "[]"),
        ([("one", "Is the day")], "[]"),
        ([("two", "BENVOLIO:\nBut"), ("one", "ROMEO:\nIs")], "['one', 'two']"),
        ([("one", "ROMEO:\n")], "['one', 'one']"),
    ],
)
def test_openings_that_are_missing_out_of_order_repeated_or_no_beginnings_are_refused(
    openings, found
):
    with pytest.raises(ValueError, match=r"openings=\(\)") as caught:
        text.roles(PLAY, openings)
    assert f"the plays {found} were found" in str(caught.value)


def test_a_text_without_speech_is_refused():
    with pytest.raises(ValueError, match=r"no speech.*name and a colon"):
        text.roles("Once upon a time\n\nthere was a king.")


def test_the_nine_plays_are_found_in_order_and_in_every_play_its_hero(roles):
    plays = list(dict.fromkeys(role.play for role in roles))
    assert plays == [play for play, _ in text.OPENINGS]
    plays_of = {}
    for play, speaker, _ in roles:
        plays_of.setdefault(speaker, []).append(play)
    for play, *names in (
        ("Coriolanus", "MENENIUS", "CORIOLANUS", "VOLUMNIA"),
        ("Richard III", "KING RICHARD III", "LADY ANNE", "TYRREL"),
        ("Richard II", "JOHN OF GAUNT", "HENRY BOLINGBROKE", "EXTON"),
        ("Romeo and Juliet", "SAMPSON", "ROMEO", "MERCUTIO"),
        ("Henry VI, Part 3", "KING HENRY VI", "WARWICK", "KING LEWIS XI"),
        ("The Winter's Tale", "LEONTES", "PERDITA", "AUTOLYCUS", "Time"),
        ("Measure for Measure", "ANGELO", "ISABELLA", "POMPEY", "MARIANA"),
        ("The Taming of the Shrew", "SLY", "KATHARINA", "PETRUCHIO", "Widow"),
        ("The Tempest", "PROSPERO", "ARIEL", "CALIBAN", "Boatswain"),
    ):
        assert {name: plays_of[name] for name in names} == {name: [play] for name in names}
    assert plays_of["JULIET"] == ["Romeo and Juliet", "Measure for Measure"]
    assert plays_of["First Citizen"][:2] == ["Coriolanus", "Richard III"]


def test_every_character_of_speech_belongs_to_exactly_one_role(shakespeare, roles):
    # Counted a second time, line by line: a line is a heading if it ends in a colon after an
    # empty line, and every other line that is not empty is speech.
    lines = ["", *shakespeare.split("\n")]
    speech = [
        line
        for before, line in itertools.pairwise(lines)
        if line and (before or not line.endswith(":"))
    ]
    said = [line for role in roles for line in role.text.split("\n")]
    assert sorted(said) == sorted(speech)
    assert len({role[:2] for role in roles}) == len(roles)


# Windows

ALPHABET = "ab c\n"
SPEECHES = st.lists(st.text(ALPHABET, max_size=60), min_size=1, max_size=6)


@given(SPEECHES, st.integers(1, 9), st.integers(0, 30))
@settings(deadline=None)
def test_windows_rebuild_what_each_role_says(speeches, context, min_characters):
    roles = [text.Role("", str(number), speech) for number, speech in enumerate(speeches)]
    expected = [r for r in roles if len(r.text) >= min_characters and len(r.text) > context]
    if not expected:
        with pytest.raises(ValueError, match="roles"):
            text.windows(roles, context, min_characters, ALPHABET)
        return
    cut = text.windows(roles, context, min_characters, ALPHABET)
    assert list(cut.roles) == expected
    assert cut.inputs.shape == cut.targets.shape == (sum(map(len, cut.partition)), context)
    np.testing.assert_array_equal(np.concatenate(cut.partition), np.arange(len(cut.inputs)))
    np.testing.assert_array_equal(cut.inputs[:, 1:], cut.targets[:, :-1])
    for role, rows in zip(cut.roles, cut.partition, strict=True):
        inputs, targets = cut.inputs[rows].ravel(), cut.targets[rows].ravel()
        rebuilt = text.decode(inputs, ALPHABET) + ALPHABET[targets[-1]]
        assert rebuilt == role.text[: len(rebuilt)]
        assert text.decode(targets, ALPHABET) == rebuilt[1:]
        assert 0 <= len(role.text) - len(rebuilt) < context


def test_the_order_of_the_roles_is_the_order_of_the_clients():
    roles = [text.Role("", name, name * 9) for name in "abc"]
    cut, turned = (text.windows(order, 4, 1) for order in (roles, roles[::-1]))
    for rows, other in zip(cut.partition, turned.partition[::-1], strict=True):
        np.testing.assert_array_equal(cut.inputs[rows], turned.inputs[other])
        np.testing.assert_array_equal(cut.targets[rows], turned.targets[other])


def test_the_alphabet_is_that_of_all_roles_and_no_type_is_larger_than_it_needs():
    roles = [text.Role("", "A", "cab" * 5), text.Role("", "B", "xy")]
    cut = text.windows(roles, 2, 3)
    assert (cut.alphabet, cut.num_classes, len(cut.roles)) == ("abcxy", 5, 1)
    assert (cut.inputs.dtype, cut.targets.dtype) == (np.uint8, np.int32)
    assert text.encode("b", "".join(map(chr, range(256)))).dtype == np.uint8
    assert text.encode("b", "".join(map(chr, range(257)))).dtype == np.uint16


def test_tiny_shakespeare_has_a_hundred_large_roles(roles):
    cut = text.windows(roles)
    # The definition, apart from the cutting: at least 2000 characters.
    assert [r for r in roles if len(r.text) >= 2000] == list(cut.roles)
    assert len(cut.roles) == 100
    assert cut.num_classes == 65
    assert set(string.ascii_letters) < set(cut.alphabet)
    assert min(map(len, cut.partition)) == (min(len(r.text) for r in cut.roles) - 1) // 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context is 0.*at least 1"),
        ({"min_characters": 50}, "none of 2 roles.*=50.*longest has 20.*up to 20"),
        ({"context": 20, "min_characters": 1}, "context=20 and one more: the longest has 20"),
        ({"min_characters": 1, "alphabet": "Bt"}, r"characters ' .*not among the 2"),
        ({"min_characters": 1, "alphabet": string.printable + "a"}, "a character twice"),
    ],
)
def test_windows_that_cannot_be_cut_are_refused_with_what_would_do(options, message):
    roles = [text.Role("", "BENVOLIO", "But new struck nine."), text.Role("", "ROMEO", "Ay me!")]
    with pytest.raises(ValueError, match=message):
        text.windows(roles, **{"context": 8, **options})


@given(st.text(ALPHABET))
def test_decoding_undoes_encoding(speech):
    assert text.decode(text.encode(speech, ALPHABET), ALPHABET) == speech


# Training


@pytest.mark.slow
def test_clients_learn_their_own_periodic_speech(key):
    """Each client alone learns its own rhythm, and the accuracy counts next characters."""
    roles = [text.Role("", "A", "abc" * 70), text.Role("", "B", "acb" * 70)]
    cut = text.windows(roles, context=8, min_characters=100)
    federation = clients.federation(cut, cut.partition)
    network = networks.Transformer(cut.num_classes, width=16, num_layers=1, num_heads=2, context=8)
    model = Model(networks.apply_fn(network), likelihoods.categorical)
    trained = training.train(
        model,
        networks.init(network, key, cut.inputs),
        federation,
        key=key,
        optimizer=optax.adam(1e-2),
        epochs=12,
        batch_size=8,
    )
    for own, other in ((0, 1), (1, 0)):
        params = jax.tree.map(lambda leaf, own=own: leaf[own], trained.params)
        mine, theirs = (
            metrics.accuracy(model, params, Examples(cut.inputs[rows], cut.targets[rows]))
            for rows in (cut.partition[own], cut.partition[other])
        )
        assert mine == 1
        assert theirs < 0.2
    # The loss of an example is the sum over its positions, log 3 each for someone who guesses.
    assert (trained.loss[:, 0] > 0.5 * 8 * np.log(3)).all()
    assert (trained.loss[:, -1] < 0.1 * 8 * np.log(3)).all()
