"""``coral verify placement``: agreeing files pass, every kind of difference is named, other files are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.placement.reference_tables import make_table, table_digest
from coral_tasks.tasks.verify import verify_placement_file

DATA = json.loads((Path(__file__).parents[2] / "data" / "placement_cases.json").read_text())
SMALL = "small-ties-5x60"


def small() -> dict:
    """The cases of one small table."""
    kept = {kind: [case for case in DATA[kind] if case["table"] == SMALL] for kind in ("cases", "library_cases")}
    return copy.deepcopy({"format": 1, "tables": {SMALL: DATA["tables"][SMALL]}, **kept})


def verdict(tmp_path: Path, data: object):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(data))
    return verify_placement_file(path)


def test_the_small_cases_agree(tmp_path: Path) -> None:
    """The reference's own answers are found again, library cases included."""
    found = verdict(tmp_path, small())
    assert (found.num_cases, found.differences) == (5, ())


def _first(data: dict) -> dict:
    return data["cases"][0]


def _library(data: dict) -> dict:
    return data["library_cases"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: _first(d).update(throughput=5.5), "optimum is 5.0, the file says 5.5"),
        (lambda d: _first(d).update(placement=None), "needs a placement"),
        (lambda d: _first(d)["placement"][0].update(layers=1), "layers do not add up"),
        (lambda d: _first(d)["placement"][0].update(quanta=19), "latency shares are not equal"),
        (lambda d: _first(d)["placement"][0].update(nodes=[1]), "do not use exactly the given nodes"),
        (lambda d: _first(d)["placement"][0].update(layers=99), "layers or quanta out of range"),
        (lambda d: _first(d).update(nodes=[0, 1, 77]), "cannot be solved"),
        (lambda d: _library(d).update(positive=1), "combinations have a throughput, the file says 1"),
        (lambda d: _library(d)["irreducible"].pop(), "is kept, the file drops it"),
        (lambda d: _library(d)["irreducible"].append([[2, 2, 2, 2, 2], 1.0]), "is dropped, the file keeps it"),
        (lambda d: _library(d)["irreducible"][0].__setitem__(1, 0.5), "the file says 0.5"),
    ],
)
def test_a_difference_is_named(tmp_path: Path, change, message: str) -> None:
    """Whatever is wrong in a case is reported with its kind."""
    data = small()
    change(data)
    found = verdict(tmp_path, data)
    assert any(message in text for _, text in found.differences), found.differences


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "is no placement case file"),
        ({"cases": []}, "is no placement case file"),
        ({"format": 2, "tables": {}}, "unknown format of case files"),
        ({"tables": {}, "cases": [{"id": "x"}]}, "needs table, mode, nodes, throughput, placement"),
        (
            {
                "tables": {},
                "cases": [dict.fromkeys(("id", "mode", "nodes", "throughput", "placement"), "") | {"table": "t"}],
            },
            "unknown table",
        ),
        ({"tables": {"t": {"steps": [[[1, -5.0]]], "L": 1, "Q": 2}}}, "must be finite, not negative"),
        ({"tables": {"t": {"steps": [[[1, 5.0], [1, 6.0]]], "L": 2, "Q": 2}}}, "falling in layers"),
        ({"tables": {"t": {"steps": [[[1, 5.0]]], "L": 1, "Q": 2, "digest": "0"}}}, "does not match its fingerprint"),
        ({"tables": {"t": {"L": 1, "Q": 2}}}, "cannot be decoded"),
        (
            {"tables": {"t": {"configs": ["TPUx1"], "generator": {"model": "phi4-14b", "phase": "decode"}}}},
            "cannot be decoded",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, data: object, message: str) -> None:
    """Files that are no case files, or hold broken tables, are refused before anything is compared."""
    with pytest.raises(ValidationFailed, match=message):
        verdict(tmp_path, data)


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    """A missing file and one that is no JSON are refused by name."""
    with pytest.raises(ValidationFailed, match="cannot be read as JSON"):
        verify_placement_file(tmp_path / "absent.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValidationFailed, match="cannot be read as JSON"):
        verify_placement_file(tmp_path / "binary.json")


@pytest.mark.parametrize("name", sorted(name for name in DATA["tables"] if "source" in DATA["tables"][name]))
def test_the_generator_makes_the_reference_tables(name: str) -> None:
    """A table made from its generator arguments has the fingerprint that the reference states."""
    entry = DATA["tables"][name]
    assert table_digest(make_table(configs=entry["configs"], **entry["source"])) == entry["digest"]
