"""Placement case files against our search: what ``coral verify placement`` calls.

Owns reading the reference's file format and naming every difference. The cases' own placements are checked by the
rules spelt out here, not by the search.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import UnknownName, ValidationFailed, Violation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Table = NDArray[np.float64]

REL_TOL: Final = 1e-9
MODES: Final = ("equal", "free")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementVerdict:
    """One case file: how many cases it has, and every difference as (case, text)."""

    file: str
    num_cases: int
    differences: tuple[tuple[str, str], ...]


def verify_placement_file(path: Path) -> PlacementVerdict:
    """Recompute every case of a file. Raises ValidationFailed for a file that is not such a case file."""
    data = _read(path)
    tables = {name: _table(path, name, entry) for name, entry in data["tables"].items()}
    found: list[tuple[str, str]] = []
    cases, library_cases = data.get("cases", []), data.get("library_cases", [])
    for case in cases:
        found += [(str(case["id"]), text) for text in _case_differences(case, tables[case["table"]])]
    for case in library_cases:
        memory = data["tables"][case["table"]].get("memory")
        found += [(str(case["id"]), text) for text in _library_differences(case, tables[case["table"]], memory)]
    return PlacementVerdict(file=str(path), num_cases=len(cases) + len(library_cases), differences=tuple(found))


# Reading ---------------------------------------------------------------------------------------------------------


def _refused(path: Path, rule: str, *, row: str = "", value: object = "") -> ValidationFailed:
    return ValidationFailed([Violation(table=str(path), row=row, value=str(value) if value != "" else "", rule=rule)])


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise _refused(path, f"cannot be read as JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("tables"), dict):
        raise _refused(path, "is no placement case file: it needs an object with tables and cases")
    if data.get("format", 1) != 1:
        raise _refused(path, "unknown format of case files; known: 1", value=data.get("format"))
    _check_cases(path, data)
    return data


def _check_cases(path: Path, data: dict[str, Any]) -> None:
    """Fields of every case, before anything is computed."""
    needs = {
        "cases": ("id", "table", "mode", "nodes", "throughput", "placement"),
        "library_cases": ("id", "table", "mode", "n_max", "memory_limit", "positive", "irreducible"),
    }
    violations = []
    for kind, names in needs.items():
        for number, case in enumerate(data.get(kind, [])):
            row = f"{kind} {number}"
            missing = [name for name in names if not isinstance(case, dict) or name not in case]
            if missing:
                violations.append(Violation(table=str(path), row=row, value="", rule=f"needs {', '.join(missing)}"))
            elif case["table"] not in data["tables"]:
                violations.append(Violation(table=str(path), row=row, value=case["table"], rule="unknown table"))
            elif case["mode"] not in MODES:
                rule = f"mode must be one of {', '.join(MODES)}"
                violations.append(Violation(table=str(path), row=row, value=str(case["mode"]), rule=rule))
    if violations:
        raise ValidationFailed(violations)


def _table(path: Path, name: str, entry: dict[str, Any]) -> Table:
    import numpy as np

    from coral_tasks.placement.reference_tables import make_table, table_digest

    try:
        if "steps" in entry:
            table = _decode(entry["steps"], int(entry["L"]), int(entry["Q"]))
        else:
            table = make_table(configs=tuple(entry["configs"]), **entry["generator"])
    except (KeyError, TypeError, ValueError, IndexError, UnknownName) as error:
        raise _refused(path, f"cannot be decoded: {error!r}", row=f"table {name}") from error
    broken = not np.isfinite(table).all() or (table < 0).any()
    if broken or (np.diff(table, axis=1) > 0).any() or (np.diff(table, axis=2) < 0).any():
        raise _refused(path, "must be finite, not negative, falling in layers, rising in quanta", row=f"table {name}")
    if "digest" in entry and table_digest(table) != entry["digest"]:
        raise _refused(path, "does not match its fingerprint", row=f"table {name}", value=entry["digest"])
    return table


def _decode(steps: list[Any], num_layers: int, num_quanta: int) -> Table:
    """Per configuration and layer count a flat [q, value, …]: from q quanta on the throughput is value."""
    import numpy as np

    table = np.zeros((len(steps), num_layers, num_quanta))
    for c, rows in enumerate(steps):
        for j, flat in enumerate(rows):
            for q, value in zip(flat[::2], flat[1::2], strict=True):
                table[c, j, int(q) - 1 :] = value
    return table


# Comparing -------------------------------------------------------------------------------------------------------


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= REL_TOL * max(abs(one), abs(other))


def _case_differences(case: dict[str, Any], table: Table) -> list[str]:
    expected = float(case["throughput"])
    try:
        best = _optimum(table, case["nodes"], case["mode"])
    except (IndexError, TypeError, ValueError) as error:
        return [f"cannot be solved: {error}"]
    found = [] if _close(best, expected) else [f"optimum is {best!r}, the file says {expected!r}"]
    if case["placement"] is None:
        return found if expected == 0 else [*found, "a throughput above zero needs a placement"]
    rule = broken_rule(table, case["nodes"], case["placement"], case["mode"])
    if rule is not None:
        return [*found, f"placement in the file: {rule}"]
    reached = placement_throughput(table, case["placement"])
    return found if _close(reached, expected) else [*found, f"placement in the file reaches {reached!r}"]


def _optimum(table: Table, nodes: list[int], mode: str) -> float:
    """Optimum of one node list, its own placement checked on the way."""
    import numpy as np

    from coral_tasks.domain.names import LatencySplit
    from coral_tasks.placement.check import check_solutions
    from coral_tasks.placement.combinations import build_tree
    from coral_tasks.placement.search import Solutions, complete_placements, solve_tree

    tree = build_tree(
        max_nodes=len(nodes),
        num_configurations=len(table),
        max_counts=np.bincount(np.array(nodes, dtype=np.int64), minlength=len(table)),
    )
    found = solve_tree(table, tree, LatencySplit(mode))
    complete_placements(table, tree, found)
    row = tree.id_of(nodes)
    if found.throughput[row] > 0:
        one = Solutions(**{name: column[row : row + 1] for name, column in found.arrays().items()})  # type: ignore[arg-type]
        check_solutions(table, tree.slots[row : row + 1], one, equal_shares=mode == "equal")
    return float(found.throughput[row])


def placement_throughput(table: Table, placement: list[dict[str, Any]]) -> float:
    """Least stage throughput of a placement in the file's form; nodes are added in configuration order."""
    return min(
        sum((float(table[c, stage["layers"] - 1, stage["quanta"] - 1]) for c in sorted(stage["nodes"])), 0.0)
        for stage in placement
    )


def broken_rule(table: Table, nodes: list[int], placement: list[dict[str, Any]], mode: str) -> str | None:
    """First rule that a placement in the file's form breaks; None if it keeps them all."""
    num_layers, num_quanta = table.shape[1:]
    shares = [stage["quanta"] for stage in placement]
    layers = [stage["layers"] for stage in placement]
    in_range = all(1 <= j <= num_layers for j in layers) and all(1 <= q <= num_quanta for q in shares)
    used = sorted(c for stage in placement for c in stage["nodes"])
    rules = (
        (used == sorted(nodes), "the stages do not use exactly the given nodes"),
        (all(stage["nodes"] for stage in placement), "a stage has no node"),
        (in_range, "layers or quanta out of range"),
        (mode != "equal" or all(q * len(placement) == num_quanta for q in shares), "latency shares are not equal"),
        (sum(layers) == num_layers, "layers do not add up"),
        (sum(shares) <= num_quanta, "latency shares exceed the budget"),
    )
    return next((text for kept, text in rules if not kept), None)


def _library_differences(case: dict[str, Any], table: Table, memory: list[float] | None) -> list[str]:
    import numpy as np

    from coral_tasks.domain.names import LatencySplit
    from coral_tasks.placement.combinations import build_tree
    from coral_tasks.placement.search import solve_tree
    from coral_tasks.templates.build import irreducible_ids

    limit = case["memory_limit"]
    tree = build_tree(
        max_nodes=int(case["n_max"]),
        num_configurations=len(table),
        node_memory=None if limit is None or memory is None else np.array(memory, dtype=np.float64),
        memory_limit=np.inf if limit is None else float(limit),
    )
    values = solve_tree(table, tree, LatencySplit(case["mode"])).throughput
    kept = {
        tuple(int(c) for c in tree.slots[row] if c >= 0): float(values[row]) for row in irreducible_ids(tree, values)
    }
    want = {tuple(sorted(nodes)): float(throughput) for nodes, throughput in case["irreducible"]}
    found = []
    positive = int((values > 0).sum())
    if positive != case["positive"]:
        found.append(f"{positive} combinations have a throughput, the file says {case['positive']}")
    found += [f"{list(nodes)} is kept, the file drops it" for nodes in sorted(set(kept) - set(want))]
    found += [f"{list(nodes)} is dropped, the file keeps it" for nodes in sorted(set(want) - set(kept))]
    shared = sorted(set(kept) & set(want))
    found += [
        f"{list(nodes)}: {kept[nodes]!r}, the file says {want[nodes]!r}"
        for nodes in shared
        if not _close(kept[nodes], want[nodes])
    ]
    return found
