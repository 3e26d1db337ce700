"""Small helpers with which domain types check themselves. Owns no rule of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from coral_tasks.domain.errors import ValidationFailed, Violation


class Checks:
    """Collects violations of one object and raises them together.

    ``table`` and ``row`` name the object in messages.
    """

    def __init__(self, table: str, row: str = "") -> None:
        self._table, self._row = table, row
        self._found: list[Violation] = []

    def require(self, condition: bool, rule: str, value: object = "") -> None:
        """Note a violation of ``rule`` unless ``condition`` holds."""
        if not condition:
            shown = value if isinstance(value, str) else repr(value)
            self._found.append(Violation(table=self._table, row=self._row, value=shown, rule=rule))

    def positive(self, **numbers: float) -> None:
        """Each number must be finite and above zero."""
        for name, value in numbers.items():
            self.require(math.isfinite(value) and value > 0, f"{name} must be finite and above zero", value)

    def not_negative(self, **numbers: float) -> None:
        """Each number must be finite and not below zero."""
        for name, value in numbers.items():
            self.require(math.isfinite(value) and value >= 0, f"{name} must be finite and not negative", value)

    def named(self, **texts: str) -> None:
        """Each text must be non-empty and free of blanks at its ends."""
        for name, value in texts.items():
            self.require(bool(value) and value == value.strip(), f"{name} must be a non-empty text", value)

    def unique(self, name: str, values: Iterable[object]) -> None:
        """``values`` must hold nothing twice."""
        seen: set[object] = set()
        for value in values:
            self.require(value not in seen, f"{name} is listed twice", value)
            seen.add(value)

    def extend(self, violations: Sequence[Violation]) -> None:
        """Take over violations found elsewhere."""
        self._found.extend(violations)

    def raise_if_any(self) -> None:
        """Raise ValidationFailed with everything collected, if anything was."""
        if self._found:
            raise ValidationFailed(self._found)
