"""Reading one CSV file of the catalogue, cell by cell, with messages that name file, row and rule.

Owns the form of the files; what their cells mean belongs to ``tables`` and ``prices``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation


class Row:
    """One line of a file; collects what is wrong with its cells in ``violations``."""

    def __init__(self, file: str, line: int, cells: dict[str, str], violations: list[Violation]) -> None:
        self.file, self.line = file, line
        self._cells, self._violations = cells, violations

    def reject(self, rule: str, value: str = "") -> None:
        """Note that this row breaks ``rule``."""
        self._violations.append(Violation(table=self.file, row=f"line {self.line}", value=value, rule=rule))

    def text(self, column: str) -> str:
        """A cell that must not be empty."""
        value = self._cells[column].strip()
        if not value:
            self.reject(f"{column} must not be empty")
        return value

    def optional_text(self, column: str) -> str:
        """A cell that may be empty."""
        return self._cells[column].strip()

    def number(self, column: str) -> float:
        """A finite number above zero; a broken cell reads as 1 so that reading can go on to the next fault."""
        text = self._cells[column].strip()
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and value > 0:
            return value
        self.reject(f"{column} must be a finite number above zero", repr(text))
        return 1.0

    def optional_number(self, column: str) -> float | None:
        """A finite number above zero, or None where the cell is blank."""
        return self.number(column) if self._cells[column].strip() else None

    def count(self, column: str) -> int:
        """A whole number above zero."""
        value = self.number(column)
        if not value.is_integer():
            self.reject(f"{column} must be a whole number", repr(value))
        return int(value)

    def optional_count(self, column: str) -> int | None:
        """A whole number above zero, or None where the cell is blank."""
        return self.count(column) if self._cells[column].strip() else None

    def choice(self, column: str, allowed: Sequence[str]) -> str:
        """One of ``allowed``; a broken cell reads as the first."""
        value = self._cells[column].strip()
        if value in allowed:
            return value
        self.reject(f"{column} must be one of {', '.join(allowed)}", repr(value))
        return allowed[0]


class Table:
    """All rows of one file. ``raise_if_any`` raises every fault found so far, in one go."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.name = path.name
        self._violations: list[Violation] = []
        self.rows = [
            Row(self.name, line, cells, self._violations)
            for line, cells in enumerate(_read(path, columns, self._violations), start=2)
        ]
        self.raise_if_any()

    def unique(self, keys: Sequence[object]) -> None:
        """The keys of the rows, in row order, must differ."""
        seen: dict[object, int] = {}
        for row, key in zip(self.rows, keys, strict=True):
            if key in seen:
                row.reject(f"repeats line {seen[key]}", repr(key))
            seen.setdefault(key, row.line)

    def raise_if_any(self) -> None:
        """Raise ValidationFailed with every violation found, if there is one."""
        if self._violations:
            raise ValidationFailed(self._violations)


def _read(path: Path, columns: Sequence[str], violations: list[Violation]) -> list[dict[str, str]]:
    """Cells by column. Raises StorageFault if the file cannot be read as UTF-8 text (a mark at its start is fine)."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        message = f"catalogue file {path.name} cannot be read: {error}"
        raise StorageFault(message) from error
    header = lines[0] if lines else []
    if sorted(header) != sorted(columns):
        rule = f"columns must be {', '.join(columns)}"
        violations.append(Violation(table=path.name, row="line 1", value=", ".join(header), rule=rule))
        return []
    if len(lines) == 1:
        violations.append(Violation(table=path.name, row="", value="", rule="must hold at least one row"))
    cells = []
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            rule = f"must have {len(header)} cells"
            violations.append(Violation(table=path.name, row=f"line {number}", value=str(len(line)), rule=rule))
        cells.append(dict(zip(header, line, strict=False)))
    return cells
