"""Case files of the reference solver: whatever is wrong in one is named with its place, and nothing is computed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coral_tasks.allocation.instances import problem_from_instance
from coral_tasks.domain.errors import CoralError, StorageFault, ValidationFailed
from coral_tasks.tasks.instance_files import read_case

CASES = sorted((Path(__file__).parents[2] / "data" / "allocation_cases").glob("*.json"))
SMALL = json.loads(next(path for path in CASES if path.stem == "exact-fit").read_text(encoding="utf-8"))
SMALL["instance"]["current"] = [{"template": 0, "region": 0, "count": 1}]
GONE, AGAIN = object(), object()
VALUES = [None, "x", "", -1, float("nan"), float("inf"), True, [], {}, 0.5, 10**30, [[]], [None], GONE, AGAIN]


def written(folder: Path, data: object) -> Path:
    """A file of this JSON."""
    path = folder / "case.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_case_of_the_reference_is_read_as_it_is(path: Path) -> None:
    """Instance and expectation come back unchanged, from a case and from a bare instance."""
    data = json.loads(path.read_text(encoding="utf-8"))
    assert read_case(path) == (data["instance"], data["expected"])


def test_a_bare_instance_expects_nothing_and_lists_may_be_flat(tmp_path: Path) -> None:
    """One list for all regions, whole numbers written with a point, and no list of what runs."""
    bare = copy.deepcopy(SMALL["instance"])
    del bare["current"]
    bare |= {"price": [1.0, 2.0], "available": [40.0, 40]}
    assert read_case(written(tmp_path, bare)) == (bare, {})


def places(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value but the whole."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*at, key)
        yield from places(one, (*at, key))


def changed(at: tuple[Any, ...], value: object) -> dict[str, Any]:
    """The small case with another value in one place, without it, or with it twice."""
    data: dict[str, Any] = copy.deepcopy(SMALL)
    inner: Any = data
    for key in at[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[at[-1]]
    elif value is AGAIN:
        inner.append(inner[at[-1]]) if isinstance(inner, list) else inner.update({"more": 1})
    else:
        inner[at[-1]] = value
    return data


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value) if type(value) is not object else "")
def test_a_value_of_another_kind_anywhere_is_refused_or_means_something(tmp_path: Path, value: object) -> None:
    """No place and no value ends in another error than a refusal, here or where the instance becomes a problem."""
    refused = 0
    for at in places(SMALL):
        if at[0] == "about":
            continue
        try:
            instance, _ = read_case(written(tmp_path, changed(at, value)))
            problem_from_instance(instance)
        except CoralError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize(
    ("at", "value", "row", "rule"),
    [
        (("instance", "price", 0, 1), None, "price[0][1]", "must be a number from 0"),
        (("instance", "price", 0), [1.0], "price[0]", "must be a list of 2 numbers"),
        (("instance", "available", 0, 0), 1.5, "available[0][0]", "must be a whole number"),
        (("instance", "available", 0, 0), True, "available[0][0]", "must be a whole number"),
        (("instance", "regions"), "r", "regions", "must be a list of names"),
        (("instance", "configs"), ["n", "n"], "configs", "must not be repeated"),
        (("instance", "demand"), [1.0, 2.0], "demand", "must have 1 numbers"),
        (("instance", "mode"), "global", "mode", "must be one of regional, paper"),
        (("instance", "shortfall_weight", 0), -1, "shortfall_weight[0]", "must be a number from 0"),
        (("instance", "templates", 1, "nodes", "h"), -1, "templates[1].nodes.h", "must be a whole number"),
        (("instance", "templates", 1, "nodes"), {"z": 1}, "templates[1].nodes", "unknown configuration"),
        (("instance", "templates", 1, "nodes"), {}, "templates[1].nodes", "needs at least one node"),
        (("instance", "templates", 0, "model"), 1, "templates[0].model", "index of one of the 1 models"),
        (("instance", "current", 0, "region"), -1, "current[0].region", "index of one of the 1 regions"),
        (("expected", "status"), "maybe", "expected.status", "must be one of optimal, infeasible"),
        (("expected", "objective"), None, "expected.objective", "must be a number"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    tmp_path: Path, at: tuple[Any, ...], value: object, row: str, rule: str
) -> None:
    """File, place, value and rule."""
    path = written(tmp_path, changed(at, value))
    with pytest.raises(ValidationFailed) as caught:
        read_case(path)
    (found,) = [one for one in caught.value.violations if one.row == row]
    assert found.table == str(path)
    assert rule in found.rule


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    """Three places in one message; of very many, a thousand and their number."""
    data = copy.deepcopy(SMALL)
    data["instance"]["price"][0][0] = -1
    data["instance"]["templates"][1]["phase"] = "training"
    data["expected"]["objective"] = "30"
    with pytest.raises(ValidationFailed) as caught:
        read_case(written(tmp_path, data))
    assert [one.row for one in caught.value.violations] == ["price[0][0]", "templates[1].phase", "expected.objective"]
    data["instance"]["templates"] = [None] * 1500
    with pytest.raises(ValidationFailed, match="more violations"):
        read_case(written(tmp_path, data))


@pytest.mark.parametrize("text", ["", "{", "nonsense", "\ufeff{}", "[" * 100_000])
def test_what_is_no_json_is_a_fault(tmp_path: Path, text: str) -> None:
    """Cut, empty, nested beyond all measure: the file is named."""
    path = tmp_path / "case.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StorageFault, match=r"case\.json cannot be read as JSON"):
        read_case(path)


@pytest.mark.parametrize("data", [[], None, 3, "x", {"instance": []}, {"instance": {}}, {}])
def test_json_that_is_no_instance_is_refused(tmp_path: Path, data: object) -> None:
    """A list, a number, an object without the fields."""
    with pytest.raises(ValidationFailed, match=r"must be an object|fields are missing"):
        read_case(written(tmp_path, data))
