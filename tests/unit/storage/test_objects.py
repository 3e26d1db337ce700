"""Object stores: atomic and conditional writes, in a folder and against a local S3 server."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coral_tasks.domain.errors import StorageFault
from coral_tasks.storage.objects import TEMPORARY_PREFIX, FolderStore, ObjectStore, S3Store, open_store


@pytest.fixture(scope="module")
def s3_server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path: Path, monkeypatch) -> ObjectStore:
    """A fresh store of each kind."""
    if request.param == "folder":
        return open_store(tmp_path / "store")
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", request.getfixturevalue("s3_server"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"bucket-{tmp_path.name}".replace("_", "-").lower()[:60]
    boto3.client("s3").create_bucket(Bucket=bucket)
    return open_store(f"s3://{bucket}/some/library")


def test_what_is_put_is_got(store: ObjectStore) -> None:
    """Bytes come back; an absent object is None; listing names keys below a prefix, in order."""
    assert store.get("a/b.txt") is None
    store.put("a/b.txt", b"one")
    store.put("a/a.txt", b"two")
    store.put("ab.txt", b"three")
    assert store.get("a/b.txt") == b"one"
    assert [info.key for info in store.list("a/")] == ["a/a.txt", "a/b.txt"]
    assert [info.key for info in store.list("a")] == ["a/a.txt", "a/b.txt", "ab.txt"]
    assert store.list("a/")[1].size_bytes == 3
    assert store.exists("ab.txt")
    assert not store.exists("ab")


def test_put_if_writes_only_over_the_state_seen(store: ObjectStore) -> None:
    """A conditional write fails if the object has appeared, changed or vanished meanwhile."""
    assert store.put_if("pointer", b"1", None)
    assert not store.put_if("pointer", b"2", None)
    _, token = store.get_with_token("pointer")
    assert store.put_if("pointer", b"2", token)
    assert not store.put_if("pointer", b"3", token)
    assert store.get("pointer") == b"2"
    _, token = store.get_with_token("pointer")
    store.delete("pointer")
    assert not store.put_if("pointer", b"3", token)
    assert store.get("pointer") is None
    store.delete("pointer")  # an absent object is no error


def test_of_many_writers_exactly_one_wins_each_round(store: ObjectStore) -> None:
    """Counting up by conditional writes from several threads loses no step."""
    store.put("counter", b"0")

    def count_up() -> None:
        for _ in range(5):
            while True:
                data, token = store.get_with_token("counter")
                if store.put_if("counter", str(int(data) + 1).encode(), token):
                    break

    threads = [threading.Thread(target=count_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("counter") == b"15"


@pytest.mark.parametrize("key", ["", "/etc/passwd", "../outside", "a/../../b"])
def test_keys_outside_the_store_are_refused(store: ObjectStore, key: str) -> None:
    """No key leads out of the store."""
    with pytest.raises(StorageFault, match="not a key inside the store"):
        store.put(key, b"x")


def test_half_written_files_are_never_listed(tmp_path: Path) -> None:
    """A temporary file left by a killed writer is no object."""
    store = FolderStore(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"{TEMPORARY_PREFIX}left").write_bytes(b"half")
    store.put("a/whole", b"x")
    assert [info.key for info in store.list("")] == ["a/whole"]


def test_writers_and_removers_of_one_folder_do_not_harm_each_other(tmp_path: Path) -> None:
    """Several put, list and delete in the same folders, which come and go with their files: no fault, nothing left."""
    store = FolderStore(tmp_path)

    def come_and_go(number: int) -> None:
        for round_number in range(150):
            key = f"work/deep/{number}"
            store.put(key, b"x")
            assert key in {info.key for info in store.list("work/")}
            assert store.get(key) == b"x"
            store.delete(key)
            store.delete(f"work/deep/never-{round_number}")

    with ThreadPoolExecutor(max_workers=4) as pool:
        for done in [pool.submit(come_and_go, number) for number in range(4)]:
            done.result()
    assert store.list("") == ()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_a_fault(tmp_path: Path) -> None:
    """Writing below a file is a storage fault that names it."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageFault, match="cannot write a in"):
        FolderStore(tmp_path / "file").put("a", b"x")


def test_a_missing_bucket_is_a_fault(store: ObjectStore) -> None:
    """Reading from a bucket that does not exist is a fault, not an absent object."""
    if not isinstance(store, S3Store):
        pytest.skip("folders have no buckets")
    with pytest.raises(StorageFault, match="NoSuchBucket"):
        open_store("s3://no-such-bucket-here/x").get("a")


@pytest.mark.parametrize("address", ["ftp://host/x", "s3:///x"])
def test_an_unknown_kind_of_address_is_refused(address: str) -> None:
    """Only folders and S3 are stores."""
    with pytest.raises(StorageFault, match=r"no store for|no bucket in"):
        open_store(address)


@pytest.mark.parametrize("address", ["", " "])
def test_no_address_is_no_folder(address: str) -> None:
    """An empty setting does not mean the folder that the process happens to stand in."""
    with pytest.raises(StorageFault, match="no address of a store"):
        open_store(address)
