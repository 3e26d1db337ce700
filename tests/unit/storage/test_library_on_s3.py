"""The template library on a local S3 server: published, read, raced for and cleaned like on a folder."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from coral_tasks.domain.errors import StorageFault
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.storage import library
from coral_tasks.storage.chunks import StoredChunks
from coral_tasks.storage.objects import S3Store, open_store


@pytest.fixture
def store(monkeypatch):
    """An empty prefix of a bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3").create_bucket(Bucket="templates")
    yield open_store("s3://templates/coral")
    server.stop()


def _set(throughput: float) -> TemplateSet:
    one = np.ones((1, 1))
    return TemplateSet(
        model=ModelId("toy"),
        phase=Phase.DECODE,
        slo=LatencySlo(ttft_s=1.0, tpot_s=0.05),
        latency_split=LatencySplit.FREE,
        num_layers=4,
        total_quanta=60,
        configurations=(NodeConfigurationId("L4x1"),),
        sources=(ProfileSource.ANALYTIC,),
        provenance=("made up",),
        profile_version="v1",
        node_counts=one.astype(np.int16),
        throughput=np.array([throughput]),
        runtime=np.zeros(1, np.uint8),
        limited_by=np.ones(1, np.uint8),
        num_stages=np.ones(1, np.uint8),
        slot_stage=np.zeros((1, 1), np.int8),
        stage_layers=(4 * one).astype(np.int16),
        stage_quanta=(60 * one).astype(np.int16),
    )


def _publish(store: S3Store, throughput: float, judge=None) -> str:
    key = f"k{throughput}"
    library.write_part(store, key, _set(throughput), {})
    manifest = library.write_version(store, [library.find_part(store, key)], {})
    library.publish_version(store, manifest, now=datetime.now(UTC), judge=judge)
    return manifest.version


def test_a_library_lives_on_s3(store: S3Store) -> None:
    """Two versions are published, the current one is read exactly, a race is noticed, old versions are removed."""
    with pytest.raises(StorageFault, match="s3://templates/coral/ holds no published template library"):
        library.read_current(store)
    first = _publish(store, 0.1 + 0.2)
    assert library.read_current(store).sets[0].throughput.tobytes() == np.array([0.1 + 0.2]).tobytes()

    calls = []

    def meddling(current, _new):
        calls.append(current.version)
        if len(calls) == 1:
            _publish(store, 2.0)
        return ()

    last = _publish(store, 3.0, judge=meddling)
    history = [one.version for one in library.current_pointer(store).history]
    assert history[0] == last
    assert history[2] == first
    assert calls == [first, history[1]]
    assert library.find_problems(store) == ()

    later = datetime.now(UTC) + timedelta(days=2)
    library.remove_old(store, keep_versions=1, now=later, grace=timedelta(days=1))
    assert library.read_current(store).version == last
    with pytest.raises(StorageFault, match=f"has no version {first}"):
        library.read_version(store, first)


def test_chunks_are_kept_on_s3(store: S3Store) -> None:
    """A chunk comes back as it was, a damaged one counts as absent, forgetting removes all of a set."""
    chunks = StoredChunks(store)
    assert chunks.load("key", 1, 5) is None
    chunks.save("key", 1, 5, {"throughput": np.array([1.5, 2.5])})
    assert chunks.load("key", 1, 5)["throughput"].tolist() == [1.5, 2.5]
    store.put("work/key/1-5.npz", b"PK nonsense")
    assert chunks.load("key", 1, 5) is None
    chunks.forget("key")
    assert store.list("work/") == ()
