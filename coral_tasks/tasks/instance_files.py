"""Case files of the allocation's reference solver: read and checked for form, before anything is computed with them.

Owns which JSON is an instance: every field, list and number at fault is named, all at once. What the numbers mean is
``allocation.instances``' matter.

API::

    read_case(path) -> (instance, expected)
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from coral_tasks.allocation.problem import LARGEST
from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation

MODES: Final = ("regional", "paper")
PHASES: Final = ("prefill", "decode", "aggregated")
STATUSES: Final = ("optimal", "infeasible")
NAMES: Final = ("regions", "configs", "models")
VECTORS: Final = ("demand", "prompt_tokens", "output_tokens", "shortfall_weight")
MOST_NODES: Final = 32_767
MOST_COUNT: Final = 2**31 - 1
MAX_TOLD: Final = 1000
"""Violations that an error message holds."""

Rule = Callable[[object], str]
"""What a value must be, or "" if it is that."""


def read_case(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """An instance and what is expected of it ({} for a bare instance).

    Raises StorageFault (no JSON), ValidationFailed (no such instance; with everything that is wrong).
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        message = f"{path} cannot be read as JSON: {error}"
        raise StorageFault(message) from error
    form = _Form(str(path))
    form.require(isinstance(data, dict), "", data, "must be an object")
    form.raise_if_any()
    instance, expected = data.get("instance", data), data.get("expected") or {}
    form.require(isinstance(instance, dict), "instance", instance, "must be an object")
    form.require(isinstance(expected, dict), "expected", expected, "must be an object")
    form.raise_if_any()
    _check_instance(form, instance)
    _check_expected(form, expected)
    form.raise_if_any()
    return instance, expected


@dataclass(frozen=True, slots=True)
class _Form:
    """Collects what is wrong with a file."""

    name: str
    found: list[Violation] = field(default_factory=list)

    def refuse(self, row: str, value: object, rule: str) -> None:
        self.found.append(Violation(table=self.name, row=row, value=repr(value)[:200], rule=rule))

    def require(self, holds: bool, row: str, value: object, rule: str) -> None:
        if not holds:
            self.refuse(row, value, rule)

    def each(self, row: str, values: Sequence[object], rule: Rule) -> None:
        """The rule for every value of a list."""
        for place, value in enumerate(values):
            if broken := rule(value):
                self.refuse(f"{row}[{place}]", value, broken)

    def raise_if_any(self) -> None:
        if self.found:
            more = len(self.found) - MAX_TOLD
            rest = [Violation(table=self.name, row="", value="", rule=f"and {more} more violations")]
            raise ValidationFailed([*self.found[:MAX_TOLD], *(rest if more > 0 else [])])


def _number(value: object, most: float = LARGEST) -> str:
    """Not negative and finite; true and false are no numbers."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if plain and 0 <= value <= most else f"must be a number from 0 to {most:g}"  # type: ignore[operator]


def _weight(value: object) -> str:
    """A number, or null where unserved load is forbidden."""
    return "" if value is None or value == math.inf else _number(value)


def _whole(value: object, most: int = MOST_COUNT) -> str:
    good = not _number(value, most) and float(value).is_integer()  # type: ignore[arg-type]
    return "" if good else f"must be a whole number from 0 to {most}"


def _name(value: object) -> str:
    return "" if isinstance(value, str) and value else "must be a name"


def _check_instance(form: _Form, data: Mapping[str, Any]) -> None:
    needed = (*NAMES, "mode", "price", "available", *VECTORS, "init_factor", "templates")
    missing = [name for name in needed if name not in data]
    form.require(not missing, "instance", ", ".join(missing), "fields are missing")
    form.raise_if_any()
    for name in NAMES:
        _check_names(form, name, data[name])
    lists = [name for name in ("templates", *VECTORS) if not isinstance(data[name], list)]
    for name in lists:
        form.refuse(name, data[name], "must be a list")
    form.require(isinstance(data.get("current", []), list), "current", data.get("current"), "must be a list")
    # lengths and indices mean nothing before these hold
    form.raise_if_any()
    form.require(data["mode"] in MODES, "mode", data["mode"], f"must be one of {', '.join(MODES)}")
    form.require(not (broken := _number(data["init_factor"])), "init_factor", data["init_factor"], broken)
    for name in VECTORS:
        _check_vector(form, name, data[name], len(data["models"]), _weight if name == "shortfall_weight" else _number)
    for name, rule in (("price", _number), ("available", _whole)):
        _check_table(form, name, data[name], (len(data["regions"]), len(data["configs"])), rule)
    for place, template in enumerate(data["templates"]):
        _check_template(form, f"templates[{place}]", template, data)
    for place, entry in enumerate(data.get("current", [])):
        _check_current(form, f"current[{place}]", entry, data)


def _check_names(form: _Form, name: str, values: object) -> None:
    if not isinstance(values, list):
        form.refuse(name, values, "must be a list of names")
        return
    before = len(form.found)
    form.each(name, values, _name)
    if len(form.found) == before:
        form.require(len(set(values)) == len(values), name, values, "names must not be repeated")


def _check_vector(form: _Form, name: str, values: Sequence[object], length: int, rule: Rule) -> None:
    form.require(len(values) == length, name, len(values), f"must have {length} numbers, one for each model")
    form.each(name, values, rule)


def _check_table(form: _Form, name: str, rows: object, shape: tuple[int, int], rule: Rule) -> None:
    """One list for each region, or one list of all; ``shape``: regions, configurations."""
    if not isinstance(rows, list):
        form.refuse(name, rows, "must be a list with a list for each region")
        return
    if any(isinstance(row, list) for row in rows):
        form.require(len(rows) == shape[0], name, len(rows), f"must have {shape[0]} lists, one for each region")
        for place, row in enumerate(rows):
            good = isinstance(row, list) and len(row) == shape[1]
            form.require(good, f"{name}[{place}]", row, f"must be a list of {shape[1]} numbers")
            form.each(f"{name}[{place}]", row if isinstance(row, list) else [], rule)
        return
    form.require(len(rows) == shape[0] * shape[1], name, len(rows), f"must have {shape[0]} times {shape[1]} numbers")
    form.each(name, rows, rule)


def _check_template(form: _Form, row: str, template: object, data: Mapping[str, Any]) -> None:
    fields = ("model", "phase", "nodes", "throughput")
    if not isinstance(template, dict) or not set(fields) <= set(template):
        form.refuse(row, template, f"must be an object with {', '.join(fields)}")
        return
    _check_index(form, f"{row}.model", template["model"], len(data["models"]), "models")
    form.require(template["phase"] in PHASES, f"{row}.phase", template["phase"], f"must be one of {', '.join(PHASES)}")
    form.require(not (rule := _number(template["throughput"])), f"{row}.throughput", template["throughput"], rule)
    nodes = template["nodes"]
    if not isinstance(nodes, dict):
        form.refuse(f"{row}.nodes", nodes, "must be an object: configuration, number of nodes")
        return
    for name, count in nodes.items():
        form.require(name in data["configs"], f"{row}.nodes", name, "unknown configuration")
        form.require(not (rule := _whole(count, MOST_NODES)), f"{row}.nodes.{name}", count, rule)
    form.require(any(count != 0 for count in nodes.values()), f"{row}.nodes", nodes, "needs at least one node")


def _check_current(form: _Form, row: str, entry: object, data: Mapping[str, Any]) -> None:
    fields = ("template", "region", "count")
    if not isinstance(entry, dict) or not set(fields) <= set(entry):
        form.refuse(row, entry, f"must be an object with {', '.join(fields)}")
        return
    _check_index(form, f"{row}.template", entry["template"], len(data["templates"]), "templates")
    _check_index(form, f"{row}.region", entry["region"], len(data["regions"]), "regions")
    form.require(not (rule := _whole(entry["count"])), f"{row}.count", entry["count"], rule)


def _check_index(form: _Form, row: str, value: object, length: int, of: str) -> None:
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < length
    form.require(known, row, value, f"must be the index of one of the {length} {of}")


def _check_expected(form: _Form, expected: Mapping[str, Any]) -> None:
    if not expected:
        return
    status, objective = expected.get("status"), expected.get("objective")
    form.require(status in STATUSES, "expected.status", status, f"must be one of {', '.join(STATUSES)}")
    if status == "optimal":
        form.require(not (rule := _number(objective)), "expected.objective", objective, rule)
