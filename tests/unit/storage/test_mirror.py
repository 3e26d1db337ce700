"""A folder and its copy in a store: what moves which way, who wins, and what a lost race says."""

from __future__ import annotations

import os
import threading

import pytest

from coral_tasks.domain.errors import StaleInput, StorageFault
from coral_tasks.storage.epochs import SharedEpochs
from coral_tasks.storage.mirror import Mirror, Seen
from coral_tasks.storage.objects import FolderStore, open_store

NOTHING = Seen(tokens={}, digests={})


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path, monkeypatch):
    """An empty store of each kind."""
    if request.param == "folder":
        yield FolderStore(tmp_path / "store")
        return
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3").create_bucket(Bucket="shared")
    yield open_store(f"s3://shared/{tmp_path.name}")
    server.stop()


def _mirror(store, folder) -> Mirror:
    return Mirror(store=store, folder=folder)


def _write(folder, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_what_one_machine_wrote_the_next_one_reads(store, tmp_path) -> None:
    """New and changed files go to the store and come to another folder; others stay where they are."""
    one, two = _mirror(store, tmp_path / "one"), _mirror(store, tmp_path / "two")
    seen = one.pull(["runs/r/"])
    _write(one.folder, "runs/r/a/b.json", "1")
    _write(one.folder, "runs/other/c.json", "not asked for")
    assert one.push(["runs/r/"], seen) == ("runs/r/a/b.json",)
    seen = two.pull(["runs/r/"])
    assert (two.folder / "runs/r/a/b.json").read_text(encoding="utf-8") == "1"
    assert not (two.folder / "runs/other").exists()
    assert two.push(["runs/r/"], seen) == ()
    _write(two.folder, "runs/r/a/b.json", "2")
    assert two.push(["runs/r/"], seen) == ("runs/r/a/b.json",)
    one.pull(["runs/r/"])
    assert (one.folder / "runs/r/a/b.json").read_text(encoding="utf-8") == "2"


def test_debris_of_killed_work_gives_way_to_the_store(store, tmp_path) -> None:
    """A file that was written here but never handed over is replaced by what the retry elsewhere made."""
    dead, retry = _mirror(store, tmp_path / "dead"), _mirror(store, tmp_path / "retry")
    dead.pull(["current/"])
    _write(dead.folder, "current/plan.json", "of the killed task")
    _write(retry.folder, "current/plan.json", "of the retry")
    retry.push(["current/"], NOTHING)
    dead.pull(["current/"])
    assert (dead.folder / "current/plan.json").read_text(encoding="utf-8") == "of the retry"


def test_what_killed_work_had_finished_is_handed_over_by_the_next(store, tmp_path) -> None:
    """A whole file that the store lacks goes there with ``strays``; else it stays, since it may be deleted there."""
    mirror = _mirror(store, tmp_path / "home")
    _write(mirror.folder, "runs/r/plan.json", "finished, then killed")
    _write(mirror.folder, "dispatch/1.json", "deleted in the store long ago")
    seen_run, seen_state = mirror.pull(["runs/r/"], strays=True), mirror.pull(["dispatch/"])
    assert mirror.push(["runs/r/"], seen_run) == ("runs/r/plan.json",)
    assert mirror.push(["dispatch/"], seen_state) == ()
    assert store.get("runs/r/plan.json") == b"finished, then killed"


def test_an_onlooker_leaves_files_of_live_work_alone(store, tmp_path) -> None:
    """What changed here after its object stays; what is missing or older comes."""
    mirror = _mirror(store, tmp_path / "home")
    for name in ("a", "b", "c"):
        store.put(f"runs/r/{name}.json", b"from the store")
    _write(mirror.folder, "runs/r/a.json", "of live work")
    _write(mirror.folder, "runs/r/b.json", "of long ago")
    os.utime(mirror.folder / "runs/r/a.json", (4e9, 4e9))
    os.utime(mirror.folder / "runs/r/b.json", (1e9, 1e9))
    mirror.pull(["runs/r/"], keep_newer=True)
    found = {path.name: path.read_text(encoding="utf-8") for path in (mirror.folder / "runs/r").iterdir()}
    assert found == {"a.json": "of live work", "b.json": "from the store", "c.json": "from the store"}


def test_two_changes_of_one_file_are_not_merged_silently(store, tmp_path) -> None:
    """The second to hand over is told so by name; the first one's content stays; other files still arrive."""
    first, second = _mirror(store, tmp_path / "first"), _mirror(store, tmp_path / "second")
    seen = {one: one.pull(["current/"]) for one in (first, second)}
    _write(first.folder, "current/x.json", "first")
    _write(second.folder, "current/x.json", "second")
    _write(second.folder, "current/y.json", "mine alone")
    first.push(["current/"], seen[first])
    with pytest.raises(StorageFault, match=r"changed elsewhere since this work began: current/x\.json in"):
        second.push(["current/"], seen[second])
    assert store.get("current/x.json") == b"first"
    assert store.get("current/y.json") == b"mine alone"


def test_the_same_content_twice_is_no_conflict(store, tmp_path) -> None:
    """A task that runs twice on two machines writes the same bytes, which is fine."""
    first, second = _mirror(store, tmp_path / "first"), _mirror(store, tmp_path / "second")
    for one in (first, second):
        _write(one.folder, "runs/r/plan.json", "same")
        one.push(["runs/r/"], NOTHING)
    assert store.get("runs/r/plan.json") == b"same"


def test_a_plan_is_not_shipped_when_its_company_was_lost(store, tmp_path) -> None:
    """Who sees a plan or a manifest finds all that belongs to it, so they go last or not at all."""
    mirror = _mirror(store, tmp_path / "home")
    store.put("current/plan.html", b"somebody else's")
    _write(mirror.folder, "current/plan.html", "mine")
    _write(mirror.folder, "current/plan.json", "mine")
    with pytest.raises(StorageFault, match="changed elsewhere"):
        mirror.push(["current/"], NOTHING)
    assert store.get("current/plan.json") is None


def test_half_written_files_databases_and_locks_stay_at_home(store, tmp_path) -> None:
    """Temporary names, dot files and SQLite files are never shared."""
    mirror = _mirror(store, tmp_path / "home")
    for name in ("dispatch/epochs.sqlite", "dispatch/epochs.sqlite-wal", "dispatch/.1.json.77.tmp", "dispatch/1.json"):
        _write(mirror.folder, name, "x")
    assert mirror.push(["dispatch/"], NOTHING) == ("dispatch/1.json",)


def test_an_object_outside_the_folder_is_refused(tmp_path) -> None:
    """A key that climbs out of the store's folder is an error, never a file elsewhere."""
    with pytest.raises(StorageFault, match="not a key inside the store"):
        FolderStore(tmp_path / "store").get_with_token("../secret")


def test_epochs_only_grow_and_are_never_given_twice(store) -> None:
    """Many controllers at once get different numbers; a store that lost its counter starts above what agents saw."""
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda: taken.append(SharedEpochs(store=store).next_epoch("plan"))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == [1, 2, 3, 4, 5, 6]
    assert SharedEpochs(store=store).next_epoch("plan", at_least=40) == 41
    assert SharedEpochs(store=store).next_epoch("other") == 42


def test_an_epoch_is_refused_to_who_saw_an_older_one(store) -> None:
    """Who decided on the fleet of epoch 1 must not act after epoch 2 was taken."""
    epochs = SharedEpochs(store=store)
    assert epochs.newest() == (0, "")
    assert epochs.next_epoch("a", expected=0) == 1
    assert epochs.next_epoch("b", expected=1) == 2
    with pytest.raises(StaleInput, match="epoch 2 was taken since epoch 1"):
        epochs.next_epoch("c", expected=1)
    assert epochs.newest() == (2, "b")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"epoch": "7"}', b'{"epoch": -1}', b"\xff"])
def test_a_broken_counter_is_an_error(tmp_path, content) -> None:
    """Starting again at 1 would have every agent refuse every later controller."""
    store = FolderStore(tmp_path)
    store.put("epochs.json", content)
    with pytest.raises(StorageFault, match="is no epoch counter"):
        SharedEpochs(store=store).next_epoch("plan")
