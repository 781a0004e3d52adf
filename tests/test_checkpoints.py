"""Checkpoints: what is saved comes back in every bit, whatever kills the run or spoils the disk."""

import dataclasses
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from experiments.harness import checkpoints, folders, records

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "int32", "bfloat16", "uint8", "bool", "float16", "uint32")


class State(NamedTuple):
    params: Any
    momentum: Any
    key: jax.Array
    seen: np.ndarray


def state_of(number: int, size: int = 50) -> State:
    """Every leaf says which number it is of."""
    params = {"dense": {"kernel": jnp.full((size, 7), number / 8, jnp.float32)}, "empty": None}
    return State(
        params=params,
        momentum=(jnp.full((3,), number % 256, jnp.bfloat16), jnp.zeros((0, 2), jnp.int32)),
        key=jax.random.key(number),
        seen=np.full((2, 2), number % 256, np.uint8),
    )


def rows_of(number: int) -> list:
    return [["fedavg", n, None, n / 3] for n in range(number)]


def refuse_to_warn(message: str) -> None:
    raise AssertionError(message)


def bits(tree: Any) -> list[tuple]:
    """List (is NumPy's, dtype, shape, bytes) of the leaves."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = np.asarray(jax.random.key_data(leaf) if key else leaf)
        leaves.append((isinstance(leaf, np.ndarray), str(leaf.dtype), leaf.shape, data.tobytes()))
    return leaves


def is_checkpoint(found: checkpoints.Checkpoint, number: int) -> bool:
    expected = state_of(number)
    return (
        found.number == number
        and found.rows == rows_of(number)
        and jax.tree.structure(found.state) == jax.tree.structure(expected)
        and bits(found.state) == bits(expected)
    )


@pytest.fixture
def two(tmp_path) -> Path:
    """A folder with checkpoints 3 and 5."""
    for number in (1, 3, 5):
        checkpoints.save(tmp_path / "two", number, state_of(number), rows_of(number))
    return tmp_path / "two"


def file(checkpoint: Path, name: str) -> Path:
    (path,) = checkpoint.rglob(name)
    return path


def flip(file: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)


@pytest.mark.long
@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_arrays_come_back_bit_for_bit(tmp_path, data):
    state = {}
    for name in data.draw(st.lists(st.text(max_size=5), min_size=1, max_size=10, unique=True)):
        dtype = np.dtype(data.draw(st.sampled_from([jnp.dtype(name) for name in DTYPES])))
        shape = data.draw(arrays.array_shapes(min_dims=0, max_dims=3, max_side=5))
        count = int(np.prod(shape)) * dtype.itemsize
        raw = data.draw(st.binary(min_size=count, max_size=count))
        if dtype.name == "bool":
            raw = bytes(byte % 2 for byte in raw)
        array = np.frombuffer(raw, dtype).reshape(shape)
        state[name] = jnp.asarray(array) if data.draw(st.booleans()) else array
    shutil.rmtree(tmp_path / "any", ignore_errors=True)
    checkpoints.save(tmp_path / "any", 0, state, [])
    found = checkpoints.restore(tmp_path / "any", state, refuse_to_warn)
    assert bits(found.state) == bits(state)


def test_a_checkpoint_holds_number_state_and_rows_of_one_moment(two):
    assert is_checkpoint(checkpoints.restore(two, state_of(0), refuse_to_warn), 5)


def test_leaves_come_back_where_they_were(tmp_path):
    placed = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    state = {"placed": jax.device_put(jnp.ones(3), placed), "free": jnp.ones(3)}
    checkpoints.save(tmp_path, 0, state, [])
    found = checkpoints.restore(tmp_path, state, refuse_to_warn).state
    assert {name: leaf.committed for name, leaf in found.items()} == {"placed": True, "free": False}
    assert found["placed"].sharding == placed


def threads():
    """Threads but those of the event loop's own pool, which grows when it is busy."""
    return {t for t in threading.enumerate() if not t.name.startswith("asyncio_")}


def test_saving_keeps_two_and_leaves_nothing_else_behind(two):
    (two / "6.orbax-checkpoint-tmp" / "arrays.of.a.killed.save").mkdir(parents=True)
    before = threads()
    checkpoints.save(two, 6, state_of(6), rows_of(6))
    assert {path.name for path in two.iterdir()} == {"5", "6"}
    assert threads() <= before


def test_saving_and_restoring_say_nothing(two, capfd):
    checkpoints.save(two, 6, state_of(6), rows_of(6))
    checkpoints.restore(two, state_of(0), refuse_to_warn)
    assert capfd.readouterr() == ("", "")


def flip_the_middle(checkpoint: Path) -> None:
    arrays = file(checkpoint, checkpoints.ARRAYS)
    flip(arrays, arrays.stat().st_size // 2)


def flip_a_row(checkpoint: Path) -> None:
    record = file(checkpoint, checkpoints.RECORD)
    flip(record, record.read_bytes().rindex(b"fedavg"))


def truncated(name: str, length: int) -> Callable[[Path], None]:
    return lambda checkpoint: os.truncate(file(checkpoint, name), length)


def without(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: file(checkpoint, name).unlink()


DAMAGE = {
    "truncated arrays": truncated(checkpoints.ARRAYS, 700),
    "empty arrays": truncated(checkpoints.ARRAYS, 0),
    "no arrays": without(checkpoints.ARRAYS),
    "flipped bit of an array": flip_the_middle,
    "flipped bit of the arrays' names": lambda path: flip(file(path, checkpoints.ARRAYS), 20),
    "flipped bit of a row": flip_a_row,
    "flipped bracket of the record": lambda path: flip(file(path, checkpoints.RECORD), 0),
    "truncated record": truncated(checkpoints.RECORD, 100),
    "empty record": truncated(checkpoints.RECORD, 0),
    "no record": without(checkpoints.RECORD),
    "truncated sums": truncated(checkpoints.SUMS, 100),
    "no sums": without(checkpoints.SUMS),
    "no files": lambda path: [shutil.rmtree(own) for own in path.iterdir() if own.is_dir()],
    "nothing": lambda path: [shutil.rmtree(path), path.mkdir()],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_spoilt_checkpoint_falls_back_to_the_one_before_and_says_so(two, damage, capfd):
    damage(two / "5")
    said = []
    assert is_checkpoint(checkpoints.restore(two, state_of(0), said.append), 3)
    (message,) = said
    assert re.fullmatch(
        f"checkpoint {re.escape(str(two))}/5 is corrupt \\(.+\\): moved to 5.unreadable, "
        "going on from checkpoint 3",
        message,
    )
    assert len(message.replace(str(two), "")) < 300
    assert capfd.readouterr() == ("", "")


def test_no_flipped_bit_changes_what_comes_back(two, tmp_path):
    files = sorted(path.relative_to(two) for path in (two / "5").rglob("*") if path.is_file())
    choose = random.Random(0)
    files = [own for own in files if (two / own).stat().st_size]
    for trial, own in enumerate(files * 3):
        folder = shutil.copytree(two, tmp_path / str(trial))
        flip(folder / own, choose.randrange((folder / own).stat().st_size), choose.randrange(8))
        said = []
        found = checkpoints.restore(folder, state_of(0), said.append)
        assert is_checkpoint(found, 3 if said else 5), own


def test_what_is_added_to_a_checkpoint_is_not_read(two):
    (file(two / "5", checkpoints.SUMS).parent / "new").write_text("")
    assert is_checkpoint(checkpoints.restore(two, state_of(0), refuse_to_warn), 5)


def test_checkpoints_of_version_0_1_are_set_aside_and_the_run_starts_over(tmp_path):
    folder = tmp_path / "unit"
    for number in ("20", "25"):
        (folder / number / "arrays").mkdir(parents=True)
        (folder / number / "record.json").write_text('{"leaves": [], "rows": []}')
        (folder / number / "sha256sums").write_text("")
    said = []
    assert checkpoints.restore(folder, state_of(0), said.append) is None
    (message,) = said
    assert re.fullmatch(".*/unit holds .* version 0.1, .* unit.version-0.1, starting over", message)
    checkpoints.save(folder, 1, state_of(1), rows_of(1))
    assert is_checkpoint(checkpoints.restore(folder, state_of(0), refuse_to_warn), 1)


def test_a_full_disk_is_an_error_with_the_path_and_leaves_what_was_there(two, monkeypatch, capfd):
    def fill(path, arrays):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(checkpoints.fj.files, "save_arrays", fill)
        with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(two))}/6'"):
            checkpoints.save(two, 6, state_of(6), rows_of(6))
    assert capfd.readouterr() == ("", "")
    assert {path.name for path in two.iterdir()} == {"3", "5"}
    assert is_checkpoint(checkpoints.restore(two, state_of(0), refuse_to_warn), 5)
    checkpoints.save(two, 6, state_of(6), rows_of(6))
    assert {path.name for path in two.iterdir()} == {"5", "6"}


def test_when_all_are_spoilt_the_run_starts_over_and_is_saved_again(two):
    os.truncate(file(two / "3", checkpoints.ARRAYS), 700)
    flip_the_middle(two / "5")
    said = []
    assert checkpoints.restore(two, state_of(0), said.append) is None
    assert [re.search(r"/(\d) is corrupt", message)[1] for message in said] == ["5", "3"]
    assert said[1].endswith("starting over")
    checkpoints.save(two, 1, state_of(1), rows_of(1))
    assert is_checkpoint(checkpoints.restore(two, state_of(0), refuse_to_warn), 1)


def test_a_spoilt_checkpoint_does_not_count_as_kept(two):
    flip_the_middle(two / "5")
    checkpoints.restore(two, state_of(0), lambda message: None)
    checkpoints.save(two, 5, state_of(5), rows_of(5))
    flip_the_middle(two / "5")
    assert is_checkpoint(checkpoints.restore(two, state_of(0), lambda message: None), 3)


def test_an_empty_or_missing_folder_has_nothing_to_go_on_from(tmp_path):
    assert checkpoints.restore(tmp_path, state_of(0), refuse_to_warn) is None
    assert checkpoints.restore(tmp_path / "missing", state_of(0), refuse_to_warn) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: {"params": {"dense": {"kernel": jnp.zeros((50, 8))}}},
            r"holds .*\['kernel'\] of float32\[50, 7\] where .*\['kernel'\] of float32\[50, 8\]",
        ),
        (
            lambda: {"params": {"conv": {"kernel": jnp.zeros((50, 7))}}},
            r"\['dense'\].* has .*\['conv'\]",
        ),
        (
            lambda: {"momentum": ()},
            r"holds state.momentum\[0\] of bfloat16\[3\] where .* state.key",
        ),
        (
            lambda: {"key": jax.random.key(0, impl="rbg")},
            r"key<fry>\[\] where .* key<rbg>\[\]",
        ),
        (lambda: {"seen": (np.zeros(2),)}, r"state.seen of .* state.seen\[0\] of"),
        (lambda: {"seen": ()}, "holds state.seen of .* has nothing more"),
    ],
)
def test_a_checkpoint_of_another_state_is_refused_by_its_first_leaf_that_differs(
    two, change, message
):
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(two, state_of(0)._replace(**change()), refuse_to_warn)
    assert checkpoints.saved(two) == [3, 5]


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (lambda: 1.5, "is 1.5, expected a JAX or NumPy array"),
        (lambda: jnp.asarray(1.5), "weakly typed"),
        (lambda: np.arange(3, dtype=np.dtype("int32").newbyteorder()), "byte order"),
    ],
)
def test_a_leaf_that_would_not_come_back_as_it_was_is_refused(tmp_path, leaf, message):
    with pytest.raises(TypeError, match=rf"state\['a'\]\[1\] .*{message}"):
        checkpoints.save(tmp_path / "new", 0, {"a": [jnp.ones(2), leaf()]}, [])
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_saved_is_refused_before_anything_is_written(two):
    with pytest.raises(ValueError, match="already holds checkpoint 5, so 5 would not"):
        checkpoints.save(two, 5, state_of(5), [])
    with pytest.raises(ValueError, match="number is -1"):
        checkpoints.save(two, -1, state_of(5), [])
    with pytest.raises(ValueError, match="nothing to save"):
        checkpoints.save(two, 6, {"a": jnp.zeros((0, 2))}, [])
    assert {path.name for path in two.iterdir()} == {"3", "5"}


SAVE_FOREVER = """
import os, sys
from pathlib import Path

sys.path[:0] = sys.argv[2:]
from experiments.harness import checkpoints
from test_checkpoints import rows_of, state_of

folder = Path(sys.argv[1])

def save_forever():
    found = checkpoints.restore(folder, state_of(0), lambda message: sys.exit(message))
    number = found.number if found else 0
    while True:
        number += 1
        checkpoints.save(folder, number, state_of(number), rows_of(number))
        print(number, flush=True)

# Each time on a copy of this process, which has paid for the imports but has not used JAX yet.
for line in sys.stdin:
    child = os.fork()
    if not child:
        save_forever()
    print("child", child, flush=True)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


@pytest.mark.long
def test_killed_at_any_moment_a_run_finds_its_last_checkpoint_whole(tmp_path):
    choose = random.Random(os.getpid())
    program = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path), str(ROOT), str(ROOT / "tests")]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, stdin=pipe, stdout=pipe, text=True) as process:
        last = 0
        for _ in range(3):
            print("again", file=process.stdin, flush=True)
            said = [process.stdout.readline(), process.stdout.readline()]  # one save has returned
            time.sleep(choose.uniform(0, 0.3))
            (child,) = (int(line.split()[1]) for line in said if line.startswith("child"))
            os.kill(child, signal.SIGKILL)
            said += iter(process.stdout.readline, "killed\n")
            returned = [int(line) for line in said if not line.startswith("child")]
            assert returned == list(range(last + 1, last + 1 + len(returned)))
            found = checkpoints.restore(tmp_path, state_of(0), refuse_to_warn)
            assert found.number in (returned[-1], returned[-1] + 1)
            assert is_checkpoint(found, found.number)
            last = found.number
        process.stdin.close()


def test_between_any_two_steps_of_a_save_the_folder_holds_a_whole_checkpoint(two, tmp_path):
    steps = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
    looking, looks = threading.Lock(), []  # held by whoever looks, as copying is steps too

    def look(event: str, _) -> None:
        """Copy the folder as a process killed at this moment would leave it."""
        if event in steps and looking.acquire(blocking=False):
            looks.append(shutil.copytree(two, tmp_path / f"look{len(looks)}"))
            looking.release()

    sys.addaudithook(look)  # for good, so it is told when to stop
    try:
        checkpoints.save(two, 6, state_of(6), rows_of(6))
    finally:
        looking.acquire()
    numbers = []
    for folder in looks:
        found = checkpoints.restore(folder, state_of(0), refuse_to_warn)
        assert is_checkpoint(found, found.number)
        numbers.append(found.number)
    for folder in looks[::5]:
        checkpoints.save(folder, 7, state_of(7), rows_of(7))
        assert len(list(folder.iterdir())) == 2
    assert set(numbers) == {5, 6}
    assert numbers == sorted(numbers)


@dataclasses.dataclass(frozen=True)
class Settings:
    """A configuration that is not of one_shot."""

    rounds: int = 3
    clients: tuple[int, ...] = (1, 2)
    epochs: int = 3
    out: Path | None = None


def test_any_dataclass_can_be_written_and_refused_when_it_changes(tmp_path):
    first = Settings(out=tmp_path)
    with pytest.raises(ValueError, match=r"holds a checkpoint without a config\.json"):
        folders.grown(first, first, "checkpoint")
    folders.write_config(tmp_path, first, "run")
    command = '"command": "python -m run --rounds 3 --clients 1 2 --epochs 3 --out'
    assert command in (tmp_path / records.CONFIG).read_text()
    assert folders.grown(first, first) == first
    changed = Settings(3, (1,), epochs=4, out=tmp_path)
    with pytest.raises(ValueError, match=r"another experiment: epochs was 3, is 4\."):
        folders.grown(changed, first)
