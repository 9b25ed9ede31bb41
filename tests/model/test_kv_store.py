"""Arrays in host memory and in files: the same bits back, private files, and damage that is found out."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from segue_model.arrays import BFLOAT16, Floats
from segue_model.runner.kv_store import KvDirectory, KvStore


@pytest.fixture
def store(tmp_path: Path):
    store = KvStore(KvDirectory(tmp_path / "kv"))
    yield store
    store.close()
    assert not list((tmp_path / "kv").iterdir()), "files outlive the store"


FLOAT32 = np.dtype(np.float32)


def array(seed: int = 0, tokens: int = 20, dtype: np.dtype[np.floating] = FLOAT32) -> Floats:
    return np.random.default_rng(seed).standard_normal((2, 3, 2, tokens, 8)).astype(dtype)


def the_file(tmp_path: Path) -> Path:
    (path,) = [p for p in (tmp_path / "kv").rglob("*") if p.is_file() and p.name != "lock"]
    return path


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_an_array_comes_back_from_disk_bit_for_bit(store: KvStore, dtype: np.dtype[np.floating]) -> None:
    store.put(1, array(dtype=dtype))
    store.to_disk(1)
    store.settle()
    assert store.get(1) is None, "still in memory"
    assert store.host_bytes == 0
    assert store.disk_bytes == array(dtype=dtype).nbytes
    found = store.load(1)
    assert found is not None
    assert found.dtype == dtype
    assert np.array_equal(found, array(dtype=dtype))


def test_reading_ahead_tells_when_it_is_there_and_can_be_called_off(store: KvStore) -> None:
    for key in (1, 2):
        store.put(key, array(key))
        store.to_disk(key)
        store.read_ahead(key)
    store.settle()
    news = store.take_news()
    assert (news.arrived, news.failed) == ([1, 2], [])
    assert [t.to_disk for t in news.transfers] == [True, False, True, False]
    assert sum(t.size for t in news.transfers) == 4 * array().nbytes
    assert np.array_equal(store.get(1), array(1))  # type: ignore[arg-type]
    store.unread(2)
    assert store.get(2) is None
    assert store.keys() == {1, 2}


def test_files_are_private_and_their_names_are_not_the_callers(store: KvStore, tmp_path: Path) -> None:
    store.put(7, array())
    store.to_disk(7)
    store.settle()
    path = the_file(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store.drop(7)
    assert not path.exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "grow", "remove"])
def test_a_damaged_file_is_lost_and_never_read_as_kv(store: KvStore, tmp_path: Path, damage: str) -> None:
    store.put(1, array())
    store.to_disk(1)
    store.settle()
    path = the_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    {
        "flip": lambda: path.write_bytes(data),
        "cut": lambda: os.truncate(path, 100),
        "grow": lambda: path.write_bytes(path.read_bytes() + b"x"),
        "remove": path.unlink,
    }[damage]()
    store.read_ahead(1)
    store.settle()
    assert store.take_news().failed == [1]
    assert store.load(1) is None


def test_a_full_disk_loses_the_segment_and_nothing_else(store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store.put(1, array())
    with monkeypatch.context() as patch:
        patch.setattr("segue_model.runner.kv_store._write_file", full)
        store.to_disk(1)
        store.settle()
    assert store.take_news().failed == [1]
    store.put(2, array(2))
    store.to_disk(2)
    assert np.array_equal(store.load(2), array(2))  # type: ignore[arg-type]


def test_an_array_dropped_on_its_way_leaves_no_file(store: KvStore, tmp_path: Path) -> None:
    store.put(1, array(tokens=4000))
    store.to_disk(1)
    store.drop(1)
    store.settle()
    assert not [p for p in (tmp_path / "kv").rglob("*") if p.is_file() and p.name != "lock"]


def test_what_a_killed_process_left_behind_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    left = tmp_path / "segue-kv-killed"
    left.mkdir()
    (left / "lock").touch()
    (left / "0001").write_bytes(b"conversation")
    living = KvDirectory(tmp_path)
    assert not left.exists()
    other = KvDirectory(tmp_path)
    assert living.path.exists()
    other.close()
    living.close()
