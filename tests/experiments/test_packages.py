"""Installed packages as clients: what is read of them, and that a key draws it."""

import numpy as np
import pytest

from experiments.federated.packages import packages


def install(folder, name, files):
    """Write a package as pip leaves it: its files, and their list."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    for path, content in files.items():
        (folder / name / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / path).write_bytes(content)
    (info / "RECORD").write_text("".join(f"{name}/{path},,\n" for path in files))


@pytest.fixture
def folder(tmp_path):
    install(tmp_path, "Second", {"b.py": b"y = 2\n", "a.md": b"# Docs\n", "c.so": b"\0" * 99})
    install(tmp_path, "binary", {"c.so": b"\0" * 99})
    install(tmp_path, "first", {f"sub/{k:02}.py": bytes([k]) * 40 for k in range(20)})
    return tmp_path


def test_a_client_is_a_package_and_its_texts_follow_one_another(folder):
    clients = packages(folder, context=4)
    assert [clients.name(k) for k in range(clients.num_clients)] == ["first", "second"]
    assert clients.sizes.tolist() == [20, 2]
    inputs, targets = clients.read(1)
    assert bytes(inputs) == b"# Docs\ny = 2"
    assert bytes(targets.astype(np.uint8)) == b" Docs\ny = 2\n"


def test_a_seed_draws_other_files_of_a_package_with_more_and_the_first_come_without(folder):
    clients = packages(folder, context=4)
    whole = clients.read(0)[0]
    np.testing.assert_array_equal(clients.read(0, 30)[0], whole[:30])
    np.testing.assert_array_equal(clients.read(0, len(whole), seed=1)[0], whole)
    drawn = [clients.read(0, 30, (seed, 0))[0] for seed in range(4)]
    assert {own.shape for own in drawn} == {(30, 4)}
    assert len({own.tobytes() for own in drawn}) == 4
    np.testing.assert_array_equal(drawn[2], clients.read(0, 30, (2, 0))[0])


def test_no_more_files_are_read_than_are_needed(folder):
    for k in range(5, 20):
        (folder / f"first/sub/{k:02}.py").unlink()
    clients = packages(folder, context=4)
    assert clients.read(0, 20)[0].shape == (20, 4)
    with pytest.raises(FileNotFoundError, match=r"first/sub/\d+.py"):
        clients.read(0)


def test_a_folder_without_packages_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} has no package with files .py"):
        packages(tmp_path, context=4)
