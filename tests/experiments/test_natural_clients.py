"""Clients that differ by nature: people who draw characters, and hands that write digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.federated import slanted, tasks
from experiments.harness import config
from experiments.harness.config import AnyData
from tests.harness.test_drawings import archive

PLAIN = slanted.Hand(*map(jnp.float32, (0, 1, 0)))


def image(seed=0):
    drawn = np.zeros((28, 28, 1), np.uint8)
    drawn[9:19, 9:19] = np.random.default_rng(seed).integers(0, 256, (10, 10, 1))
    return drawn


def test_a_plain_hand_changes_nothing():
    np.testing.assert_array_equal(slanted.write(PLAIN, image()), image())


def test_a_slant_moves_rows_apart_by_their_distance_from_the_middle():
    line = np.zeros((29, 29, 1), np.uint8)
    line[:, 14] = 255
    found = np.asarray(slanted.write(PLAIN._replace(slant=jnp.float32(0.5)), line))[..., 0]
    columns = np.arange(29)
    for row in (10, 12, 14, 16, 18):
        centre = (found[row] * columns).sum() / found[row].sum()
        assert centre == pytest.approx(14 - 0.5 * (row - 14), abs=0.05)


def test_scale_and_stroke_give_more_ink():
    ink = [
        np.asarray(slanted.write(PLAIN._replace(**{name: jnp.float32(x)}), image())).sum(dtype=int)
        for name, x in [("scale", 0.8), ("scale", 1.25), ("stroke", -1), ("stroke", 1)]
    ]
    plain = image().sum(dtype=int)
    assert ink[0] < plain < ink[1]
    assert ink[2] < plain < ink[3]
    assert ink[1] / plain == pytest.approx(1.25**2, rel=0.05)


def test_each_image_is_in_the_hand_of_its_client_and_a_key_draws_the_same_hands():
    images = np.stack([image(seed) for seed in range(5)])
    hands = slanted.draw(jax.random.key(3), 2)
    found = slanted.written(images, [np.array([0, 3]), np.array([1, 4])], hands)
    for client, rows in enumerate(([0, 3], [1, 4])):
        own = jax.tree.map(lambda x, c=client: x[c], hands)
        for row in rows:
            np.testing.assert_array_equal(found[row], slanted.write(own, images[row]))
    np.testing.assert_array_equal(found[2], images[2])
    again, others = (slanted.draw(jax.random.key(seed), 2) for seed in (3, 4))
    np.testing.assert_array_equal(again.slant, hands.slant)
    assert (others.slant != hands.slant).all()


def test_a_client_is_a_person_and_held_out_people_write_the_test(tmp_path):
    (tmp_path / "omniglot").mkdir()
    names = ["Greek", "Latin"]
    archive(tmp_path / "omniglot", "images_background_small1.zip", names, people=(1, 2, 3, 4))
    data = AnyData("writers", "lenet", data_dir=tmp_path)
    task = tasks.rounds(config.Federated(data, cohort=1, validation_clients=1, held_out_clients=1))
    assert task.train.sizes.tolist() == [4, 4]
    assert task.held_out.sizes.tolist() == task.validation.sizes.tolist() == [4]
    held = set(task.held_out.indices[0].tolist())
    assert held == set(task.test.indices[0].tolist())
    groups = [set(rows) for rows in task.train.indices.tolist()]
    groups += [held, set(task.validation.indices[0].tolist())]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 16
    assert task.train.inputs.shape == (16, 28, 28, 1)
    for rows in groups:  # each has drawn each character once
        assert sorted(np.asarray(task.train.targets)[sorted(rows)].tolist()) == [0, 1, 2, 3]
