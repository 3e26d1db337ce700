"""The template library: round trip, versions, pointer, gate, retention, refusals of what is not a library."""

from __future__ import annotations

import dataclasses
import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.domain.errors import PublicationRefused, StorageFault, UnknownName
from coral_tasks.domain.models import LatencySlo
from coral_tasks.domain.names import LatencySplit, ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.storage import library
from coral_tasks.storage.library import (
    POINTER,
    find_part,
    find_problems,
    publish_version,
    read_current,
    read_tighter,
    read_version,
    remove_old,
    write_part,
    write_version,
)
from coral_tasks.storage.manifest import SCHEMA_VERSION
from coral_tasks.storage.objects import FolderStore
from coral_tasks.storage.regression import RegressionLimits, compare_libraries, compare_sets, reasons_against
from coral_tasks.storage.template_files import from_parquet, to_parquet

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
DATA = Path(__file__).parents[2] / "data"


def make_set(
    throughput=(0.1 + 0.2, 1e-300, 1 / 3), *, model="toy", phase=Phase.DECODE, version="v1", slo_step=1.0
) -> TemplateSet:
    """One node of each of two kinds, and a two-stage pair; as many rows as throughputs."""
    rows = len(throughput)
    return TemplateSet(
        model=ModelId(model),
        phase=phase,
        slo=LatencySlo(ttft_s=1.0, tpot_s=0.05).times(slo_step),
        latency_split=LatencySplit.FREE,
        num_layers=4,
        total_quanta=60,
        configurations=(NodeConfigurationId("A10Gx1"), NodeConfigurationId("L4x2")),
        sources=(ProfileSource.ANALYTIC, ProfileSource.DATABASE),
        provenance=("made up", "made up too"),
        profile_version=version,
        node_counts=np.array([[1, 0], [0, 1], [1, 1]], np.int16)[:rows],
        throughput=np.array(throughput),
        runtime=np.array([0, 0, 1], np.uint8)[:rows],
        limited_by=np.array([1, 2, 3], np.uint8)[:rows],
        num_stages=np.array([1, 1, 2], np.uint8)[:rows],
        slot_stage=np.array([[0, -1], [0, -1], [1, 0]], np.int8)[:rows],
        stage_layers=np.array([[4, 0], [4, 0], [1, 3]], np.int16)[:rows],
        stage_quanta=np.array([[60, 0], [30, 0], [20, 40]], np.int16)[:rows],
    )


def publish(store, sets, *, tighter=(), keys=None, now=NOW, judge=None, force=False):
    """Write and publish a version of these sets; ``keys`` name those of ``sets``, then those of ``tighter``."""
    parts = []
    for number, one in enumerate((*sets, *tighter)):
        key = keys[number] if keys else f"{one.model}{one.phase}{number}"
        write_part(store, key, one, {"num_kept": len(one)})
        parts.append(find_part(store, key))
    manifest = write_version(store, parts[: len(sets)], {"max_nodes": "6"}, tighter=parts[len(sets) :])
    publish_version(store, manifest, now=now, judge=judge, force=force)
    return manifest


def assert_same(one: TemplateSet, other: TemplateSet) -> None:
    """Every field equal, arrays bit by bit and in type."""
    for field in dataclasses.fields(TemplateSet):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), field.name
        else:
            assert a == b, field.name


def test_a_set_survives_the_file_bit_by_bit() -> None:
    """Throughput and everything else come back exactly; the same set gives the same bytes."""
    one = make_set()
    assert_same(one, from_parquet(to_parquet(one), "here"))
    assert to_parquet(one) == to_parquet(make_set())


def test_an_empty_set_survives_the_file() -> None:
    """A model that fits nowhere has a set without rows."""
    one = make_set(())
    assert_same(one, from_parquet(to_parquet(one), "here"))


def test_what_is_published_is_read(tmp_path: Path) -> None:
    """The current version holds the published sets; models and phases can be picked, unknown models are named."""
    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set(), make_set(model="other", phase=Phase.PREFILL)])
    current = read_current(store)
    assert current.version == manifest.version
    assert [one.model for one in current.sets] == ["other", "toy"]
    assert_same(current.sets[1], make_set())
    assert [one.model for one in read_current(store, models=[ModelId("toy")]).sets] == ["toy"]
    assert [one.model for one in read_current(store, phases=[Phase.PREFILL]).sets] == ["other"]
    with pytest.raises(UnknownName, match="known: other, toy"):
        read_current(store, models=[ModelId("absent")])
    assert find_problems(store) == ()


def test_the_same_inputs_are_the_same_version(tmp_path: Path) -> None:
    """Building the same again, in any order, changes no byte and adds no publication."""
    store = FolderStore(tmp_path)
    sets = [make_set(), make_set(model="other")]
    first = publish(store, sets, keys=["a", "b"])
    before = {info.key: (store.get(info.key), info.modified) for info in store.list("versions/")}
    pointer = store.get(POINTER)
    second = publish(store, sets[::-1], keys=["b", "a"], now=NOW + timedelta(days=1))
    assert first == second
    assert store.get(POINTER) == pointer
    assert before == {info.key: (store.get(info.key), info.modified) for info in store.list("versions/")}


def test_a_change_of_one_set_is_another_version(tmp_path: Path) -> None:
    """Another throughput gives another version; the old one can still be read."""
    store = FolderStore(tmp_path)
    first = publish(store, [make_set((1.0, 2.0, 3.0))], keys=["a"])
    second = publish(store, [make_set((1.0, 2.0, 3.1))], keys=["b"])
    assert first.version != second.version
    assert read_current(store).sets[0].throughput[2] == 3.1
    assert read_version(store, first.version).sets[0].throughput[2] == 3.0


def test_a_set_is_found_in_the_version_when_its_part_is_gone(tmp_path: Path) -> None:
    """What did not change need not be rebuilt, even after the build's leftovers were removed."""
    store = FolderStore(tmp_path)
    publish(store, [make_set()], keys=["a"])
    for info in store.list("parts/"):
        store.delete(info.key)
    entry, data = find_part(store, "a")
    assert_same(from_parquet(data, "here"), make_set())
    assert entry.key == "a"
    assert find_part(store, "b") is None


def test_a_damaged_part_counts_as_absent(tmp_path: Path) -> None:
    """A part whose bytes are not those of its entry is built again."""
    store = FolderStore(tmp_path)
    write_part(store, "a", make_set(), {})
    store.put("parts/a.parquet", b"PAR1 nonsense")
    assert find_part(store, "a") is None


# Refusals --------------------------------------------------------------------------------------------------------


def _edit(store: FolderStore, key: str, **changes) -> None:
    document = json.loads(store.get(key))
    document.update(changes)
    store.put(key, json.dumps(document).encode())


def test_an_empty_store_is_no_library(tmp_path: Path) -> None:
    """Reading where nothing was published says so."""
    with pytest.raises(StorageFault, match="holds no published template library"):
        read_current(FolderStore(tmp_path))


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    """A folder of something else is named as such, for reading and for building."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StorageFault, match=r"is no template library: .* holds thesis.tex"):
        read_current(FolderStore(tmp_path))
    with pytest.raises(StorageFault, match="is no template library"):
        find_part(FolderStore(tmp_path), "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "corrupt: not JSON"),
        (b"{", "corrupt: not JSON"),
        (b"[]", "does not belong to a template library"),
        (b'{"format": "something-else"}', "does not belong to a template library"),
        (b'{"format": "coral-template-library", "schema_version": 0}', "corrupt: schema_version 0"),
        (b'{"format": "coral-template-library", "schema_version": 1, "history": []}', "it names no version"),
        (b'{"format": "coral-template-library", "schema_version": 1}', "is corrupt"),
        (b'{"format": "coral-template-library", "schema_version": 99}', "written by a newer Coral .schema 99"),
    ],
)
def test_a_broken_pointer_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Each way in which the pointer can be wrong has its own message, and a build does not replace it."""
    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set()])
    store.put(POINTER, content)
    with pytest.raises(StorageFault, match=message):
        read_current(store)
    with pytest.raises(StorageFault, match=message):
        publish_version(store, manifest, now=NOW)
    assert store.get(POINTER) == content
    assert len(find_problems(store)) == 1


def test_a_pointer_to_a_missing_version_is_refused(tmp_path: Path) -> None:
    """A version without its manifest does not exist."""
    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set()])
    store.delete(f"versions/{manifest.version}/_manifest.json")
    with pytest.raises(StorageFault, match=f"has no version {manifest.version}"):
        read_current(store)


def test_a_version_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    """A version written by a newer Coral is not half understood."""
    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set()])
    _edit(store, f"versions/{manifest.version}/_manifest.json", schema_version=SCHEMA_VERSION + 1, novelty=True)
    with pytest.raises(StorageFault, match="written by a newer Coral"):
        read_current(store)


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    """The pointer holds the manifest's hash; another manifest is not the published one."""
    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set()])
    _edit(store, f"versions/{manifest.version}/_manifest.json", parameters={"max_nodes": "7"})
    with pytest.raises(StorageFault, match="is not the one that was published"):
        read_current(store)


def test_a_damaged_or_missing_file_is_found(tmp_path: Path) -> None:
    """Reading and verifying name the file whose bytes are wrong, missing or too many."""
    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set(), make_set(model="other")])
    first, second = (f"versions/{manifest.version}/{entry.path}" for entry in manifest.sets)
    store.put(first, store.get(first)[:-1] + b"?")
    store.delete(second)
    store.put(f"versions/{manifest.version}/extra.parquet", b"x")
    with pytest.raises(StorageFault, match="is corrupt: its hash is not the manifest's"):
        read_current(store)
    problems = find_problems(store)
    assert len(problems) == 3
    assert "is corrupt" in problems[0]
    assert "is missing" in problems[1]
    assert "is not in the manifest" in problems[2]


def test_building_again_repairs_a_damaged_version(tmp_path: Path) -> None:
    """A version whose files were damaged is whole again after the same build."""
    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set()], keys=["a"])
    store.put(f"versions/{manifest.version}/{manifest.sets[0].path}", b"?")
    store.delete("parts/a.json")
    assert find_part(store, "a") is None
    publish(store, [make_set()], keys=["a"])
    assert find_problems(store) == ()


@pytest.mark.parametrize("data", [b"", b"not parquet", to_parquet(make_set())[:-30]])
def test_a_file_that_is_no_template_file_is_refused(data: bytes) -> None:
    """Foreign or truncated bytes are refused with the file's name."""
    with pytest.raises(StorageFault, match=r"this.parquet is not a template file"):
        from_parquet(data, "this.parquet")


def test_a_parquet_file_of_another_table_is_refused(tmp_path: Path) -> None:
    """Parquet alone is not enough."""
    import pandas as pd

    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(StorageFault, match="is not a template file"):
        from_parquet((tmp_path / "x.parquet").read_bytes(), "x.parquet")


def test_two_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    """A version holds each set once, and at least one; the same holds for tighter sets, apart from those."""
    store = FolderStore(tmp_path)
    write_part(store, "a", make_set(), {})
    part = find_part(store, "a")
    with pytest.raises(StorageFault, match="needs at least one template set"):
        write_version(store, [], {}, tighter=[part])
    for sets, tighter in (([part, part], []), ([part], [part, part])):
        with pytest.raises(StorageFault, match=r"each template set only once: model=toy/phase=decode/50ms-a\.parquet"):
            write_version(store, sets, {}, tighter=tighter)


# A tighter SLO beside it -------------------------------------------------------------------------------------------


TIGHT = {"slo_step": 0.8}


def test_tighter_sets_are_read_apart(tmp_path: Path) -> None:
    """What plans are made of holds no tighter set, and those are read whole, by model, with their own limits."""
    store = FolderStore(tmp_path)
    tight, none = make_set((0.5, 0.25), **TIGHT), make_set((), model="other", **TIGHT)
    manifest = publish(store, [make_set(), make_set(model="other")], tighter=[tight, none])
    current = read_current(store)
    assert [(one.model, one.slo.tpot_s) for one in current.sets] == [("other", 0.05), ("toy", 0.05)]
    other, toy = read_tighter(store, manifest.version)
    assert_same(toy, tight)
    assert (len(other), other.slo) == (0, LatencySlo(ttft_s=0.8, tpot_s=0.04))
    assert [one.model for one in read_tighter(store, manifest.version, models=[ModelId("toy")])] == ["toy"]
    assert find_problems(store) == ()


def test_a_version_without_tighter_sets_has_none(tmp_path: Path) -> None:
    """Building them is a choice: without them nothing is found, and their folder does not exist."""
    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set()])
    assert read_tighter(store, manifest.version) == ()
    assert not (tmp_path / "tighter").exists()


def test_tighter_sets_are_part_of_the_version(tmp_path: Path) -> None:
    """Without, with, and with other tighter sets are three versions; the same again is the same, whatever the order."""
    store = FolderStore(tmp_path)
    sets = [make_set(), make_set(model="other")]
    tight, slow = (make_set((value, value), **TIGHT) for value in (0.5, 0.4))
    other = make_set(model="other", **TIGHT)
    versions = [
        publish(store, sets, keys=["a", "b"]).version,
        publish(store, sets, tighter=[tight, other], keys=["a", "b", "c", "d"]).version,
        publish(store, sets, tighter=[slow, other], keys=["a", "b", "e", "d"]).version,
    ]
    assert len(set(versions)) == 3
    again = publish(store, sets[::-1], tighter=[other, tight], keys=["b", "a", "d", "c"])
    assert again.version == versions[1]


def test_a_set_may_be_tighter_in_one_version_and_planned_on_in_the_next(tmp_path: Path) -> None:
    """Its key is found in the version where it lies aside, also when its part is gone, and it is not built again."""
    store = FolderStore(tmp_path)
    tight = make_set((0.5, 0.25), **TIGHT)
    first = publish(store, [make_set()], tighter=[tight], keys=["a", "c"])
    for info in store.list("parts/"):
        store.delete(info.key)
    second = write_version(store, [find_part(store, "c")], {}, tighter=[find_part(store, "a")])
    publish_version(store, second, now=NOW)
    assert_same(read_current(store).sets[0], tight)
    assert_same(read_tighter(store, second.version)[0], make_set())
    assert_same(read_version(store, first.version).sets[0], make_set())
    assert find_problems(store) == ()


def test_a_damaged_missing_or_foreign_tighter_file_is_found(tmp_path: Path) -> None:
    """Verifying names it, plans do not need it, and the same build repairs it."""
    store = FolderStore(tmp_path)
    sets = {"tighter": [make_set((0.5, 0.25), **TIGHT), make_set(model="other", **TIGHT)], "keys": ["a", "c", "d"]}
    manifest = publish(store, [make_set()], **sets)
    other, toy = (f"tighter/{manifest.version}/{entry.path}" for entry in manifest.tighter)
    store.put(other, b"?")
    store.delete(toy)
    store.put(f"tighter/{manifest.version}/extra.parquet", b"x")
    problems = find_problems(store)
    assert ["is corrupt" in problems[0], "is missing" in problems[1], "is not in" in problems[2]] == [True] * 3
    assert read_current(store).version == manifest.version
    with pytest.raises(StorageFault, match="is corrupt"):
        read_tighter(store, manifest.version)
    store.delete(f"tighter/{manifest.version}/extra.parquet")
    assert publish(store, [make_set()], **sets) == manifest
    assert find_problems(store) == ()


def test_retention_takes_tighter_sets_with_their_version(tmp_path: Path) -> None:
    """They go with the version they belong to and stay with those that are kept; what has no manifest goes too."""
    store = FolderStore(tmp_path)
    old, new = (
        publish(
            store, [make_set((speed, 1.0))], tighter=[make_set((speed / 2,), **TIGHT)], keys=[name, f"{name}t"]
        ).version
        for name, speed in (("a", 1.0), ("b", 2.0))
    )
    store.put("tighter/halfway/model=toy/phase=decode/x.parquet", b"x")
    later = datetime.now(UTC) + timedelta(hours=2)
    removed = remove_old(store, keep_versions=1, now=later, grace=timedelta(hours=1))
    assert {key.split("/")[1] for key in removed if key.startswith("tighter/")} == {old, "halfway"}
    assert [info.key.split("/")[1] for info in store.list("tighter/")] == [new]
    assert find_problems(store) == ()


def test_an_interrupted_first_version_with_tighter_sets_is_no_foreign_folder(tmp_path: Path) -> None:
    """A store that holds nothing yet but tighter files of a build that died can be built into."""
    store = FolderStore(tmp_path)
    store.put("tighter/halfway/model=toy/phase=decode/x.parquet", b"x")
    assert find_part(store, "a") is None
    publish(store, [make_set()])
    assert find_problems(store) == ()


def test_the_gate_does_not_judge_tighter_sets(tmp_path: Path) -> None:
    """Losing every tighter template is no reason to stop plans; the comparison can still be made and says so."""
    store = FolderStore(tmp_path)
    full, empty = make_set((0.5, 0.5), **TIGHT), make_set((), **TIGHT)
    before = publish(store, [make_set()], tighter=[full], keys=["a", "c"], judge=judge)
    after = publish(store, [make_set()], tighter=[empty], keys=["a", "d"], judge=judge)
    assert read_current(store).version == after.version
    sides = [read_tighter(store, one.version) for one in (before, after)]
    (one,) = compare_sets(*sides, tighter=True)
    assert (one.name, one.tighter) == (("toy", "decode", "40ms"), True)
    assert (one.num_before, one.num_after, one.num_lost) == (2, 0, 2)


def test_a_library_of_schema_1_is_read_and_built_upon(tmp_path: Path) -> None:
    """Bytes that an older Coral wrote are whole and hold no tighter set; a new version takes their sets over."""
    shutil.copytree(DATA / "library_schema_1", tmp_path / "library")
    store = FolderStore(tmp_path / "library")
    old = read_current(store)
    assert (old.manifest.schema_version, old.manifest.tighter) == (1, ())
    assert_same(old.sets[0], make_set((1.0, 2.0, 3.0)))
    assert read_tighter(store, old.version) == ()
    assert find_problems(store) == ()
    write_part(store, "c", make_set((0.5,), **TIGHT), {})
    new = write_version(store, [find_part(store, "a")], {"max_nodes": "6"}, tighter=[find_part(store, "c")])
    publish_version(store, new, now=NOW, judge=judge)
    assert (new.schema_version, library.current_pointer(store).history[1].version) == (2, old.version)
    assert_same(read_version(store, old.version).sets[0], read_current(store).sets[0])


# Gate, races, retention ------------------------------------------------------------------------------------------


def judge(current, new):
    """The gate with its default limits."""
    return () if current is None else reasons_against(compare_libraries(current, new), RegressionLimits())


def test_the_gate_refuses_and_is_overruled(tmp_path: Path) -> None:
    """A version that halves throughput is refused, the current one stays; with force it is published as such."""
    store = FolderStore(tmp_path)
    first = publish(store, [make_set((2.0, 2.0, 2.0))], keys=["a"], judge=judge)
    with pytest.raises(PublicationRefused, match=r"throughput with A10G moved by -50.0% in the median"):
        publish(store, [make_set((1.0, 1.0, 1.0))], keys=["b"], judge=judge)
    assert read_current(store).version == first.version
    second = publish(store, [make_set((1.0, 1.0, 1.0))], keys=["b"], judge=judge, force=True)
    assert read_current(store).version == second.version
    assert library.current_pointer(store).current.forced


def test_the_gate_names_lost_templates_and_sets(tmp_path: Path) -> None:
    """Losing a set, or most templates of one, is named; gaining and small shifts pass."""
    store = FolderStore(tmp_path)
    publish(store, [make_set((1.0, 1.0, 1.0)), make_set(model="other")], keys=["a", "b"], judge=judge)
    with pytest.raises(PublicationRefused, match="other decode 50ms: all 3 templates are gone"):
        publish(store, [make_set((1.0, 1.0, 1.0))], keys=["a"], judge=judge)
    with pytest.raises(PublicationRefused, match="67% of the templates are lost, more than 50%"):
        publish(store, [make_set((1.0,)), make_set(model="other")], keys=["c", "b"], judge=judge)
    publish(store, [make_set((1.1, 0.9, 1.0)), make_set(model="other")], keys=["d", "b"], judge=judge)


def test_a_difference_counts_what_changed(tmp_path: Path) -> None:
    """Gained, lost and shifted templates are counted by set and GPU type."""
    before = publish(FolderStore(tmp_path), [make_set((1.0, 2.0))], keys=["a"])
    after = publish(FolderStore(tmp_path), [make_set((1.5, 2.0, 3.0))], keys=["b"])
    store = FolderStore(tmp_path)
    (one,) = compare_libraries(read_version(store, before.version), read_version(store, after.version))
    assert (one.num_before, one.num_after, one.num_gained, one.num_lost) == (2, 3, 1, 0)
    assert one.gained == ("toy/decode/50ms/1*A10Gx1+1*L4x2/hybrid",)
    assert [(shift.gpu_type, shift.median) for shift in one.shifts] == [("A10G", 1.5), ("L4", 1.0)]
    assert one.changed


def test_a_build_that_loses_the_race_is_judged_again(tmp_path: Path) -> None:
    """If another build publishes meanwhile, the gate is asked against that one, and both end up in the history."""
    store = FolderStore(tmp_path)
    publish(store, [make_set((1.0, 1.0, 1.0))], keys=["a"])
    seen = []

    def meddling(current, new):
        seen.append(current.version)
        if len(seen) == 1:
            publish(store, [make_set((1.2, 1.0, 1.0))], keys=["c"])
        return ()

    mine = publish(store, [make_set((1.1, 1.0, 1.0))], keys=["b"], judge=meddling)
    history = [one.version for one in library.current_pointer(store).history]
    assert len(seen) == 2
    assert seen[1] == history[1]
    assert history[0] == mine.version
    assert len(set(history)) == 3


def test_retention_keeps_the_newest_and_what_is_in_work(tmp_path: Path) -> None:
    """Old versions and leftovers go once they are older than the grace time; the current one never does."""
    store = FolderStore(tmp_path)
    versions = [publish(store, [make_set((1.0 + n, 1.0, 1.0))], keys=[f"k{n}"]).version for n in range(4)]
    later = datetime.now(UTC)
    assert remove_old(store, keep_versions=2, now=later, grace=timedelta(hours=1)) == ()
    removed = remove_old(store, keep_versions=2, now=later + timedelta(hours=2), grace=timedelta(hours=1))
    assert any(key.startswith("parts/") for key in removed)
    for gone in versions[:2]:
        with pytest.raises(StorageFault, match="has no version"):
            read_version(store, gone)
    assert read_version(store, versions[2]).version == versions[2]
    assert find_problems(store) == ()
    remove_old(store, keep_versions=0, now=later + timedelta(hours=2), grace=timedelta(0))
    assert read_current(store).version == versions[3]


def test_a_version_is_invisible_until_it_is_whole(tmp_path: Path, monkeypatch) -> None:
    """A build that dies while writing leaves the current version as it was, and the next build completes it."""
    store = FolderStore(tmp_path)
    first = publish(store, [make_set((1.0, 1.0, 1.0))], keys=["a"])
    write_part(store, "b", make_set((2.0, 1.0, 1.0)), {})
    part = find_part(store, "b")
    original = FolderStore.put

    def dies_at_the_manifest(self, key, data) -> None:
        if key.endswith("_manifest.json"):
            raise KeyboardInterrupt
        original(self, key, data)

    monkeypatch.setattr(FolderStore, "put", dies_at_the_manifest)
    with pytest.raises(KeyboardInterrupt):
        write_version(store, [part], {})
    monkeypatch.undo()
    assert read_current(store).version == first.version
    assert find_problems(store) == ()
    second = write_version(store, [part], {})
    publish_version(store, second, now=NOW)
    assert read_current(store).version == second.version


# Other teams' readers --------------------------------------------------------------------------------------------


def test_all_readers_get_the_same_rows(tmp_path: Path) -> None:
    """pandas, pyarrow, DuckDB and Polars read the version's folder as one table, with the same rows and types.

    None of them comes upon the templates of a tighter SLO, whatever pattern it looks for files by.
    """
    import duckdb
    import pandas as pd
    import polars as pl
    import pyarrow.parquet as pq
    from pyarrow.dataset import dataset

    from data_contracts.templates import CONTRACT

    store = FolderStore(tmp_path)
    sets = [make_set(), make_set(model="other", phase=Phase.PREFILL)]
    manifest = publish(store, sets, tighter=[make_set((0.5, 0.25), **TIGHT)])
    folder = tmp_path / "versions" / manifest.version
    names = sorted(CONTRACT.column_names)

    def rows(records) -> list[tuple]:
        def plain(value):
            return tuple(value) if isinstance(value, list | np.ndarray) else value

        found = [tuple((name, plain(record[name])) for name in names) for record in records]
        return sorted(found, key=repr)

    expected = rows(pq.read_table(folder).to_pylist())
    assert len(expected) == 6
    assert {row["slo_tpot_s"] for row in pq.read_table(folder).to_pylist()} == {0.05}
    assert rows(dataset(folder, partitioning="hive").to_table().to_pylist()) == expected
    assert len(list(folder.rglob("*.parquet"))) == 2
    frame = pd.read_parquet(folder)
    assert sorted(frame.columns) == names
    assert rows(frame.to_dict("records")) == expected
    with duckdb.connect() as connection:
        query = f"select * from read_parquet('{folder}/**/*.parquet', hive_partitioning = true)"
        cursor = connection.execute(query)
        columns = [one[0] for one in cursor.description]
        assert rows(dict(zip(columns, record, strict=True)) for record in cursor.fetchall()) == expected
    polars = pl.read_parquet(f"{folder}/**/*.parquet", hive_partitioning=True)
    assert rows(polars.to_dicts()) == expected
    throughput = {record["throughput"] for record in polars.to_dicts()}
    assert throughput == {0.1 + 0.2, 1e-300, 1 / 3}


def test_the_file_keeps_its_contract(tmp_path: Path) -> None:
    """The columns, types and metadata of a written version are those of the documented contract."""
    import pyarrow.parquet as pq

    from data_contracts.templates import CONTRACT, PARTITION_COLUMNS

    store = FolderStore(tmp_path)
    manifest = publish(store, [make_set()])
    schema = pq.read_schema(tmp_path / "versions" / manifest.version / manifest.sets[0].path)
    fields = [field for field in CONTRACT.schema if field.name not in PARTITION_COLUMNS]
    assert [(f.name, f.type) for f in schema] == [(f.name, f.type) for f in fields]
    assert schema.metadata[b"coral.version"] == CONTRACT.version.encode()
    assert schema.field("throughput").metadata[b"unit"] == b"by phase"
