"""The exception tree of the project. Owns every exception class that crosses a package; holds no logic.

::

    CoralError
    ├── ExpectedOutcome                 a well-formed answer that is "no": never retried by Airflow
    │   ├── ValidationFailed            input broke its rules; carries every violation, not only the first
    │   │   └── UnknownName             a name that no catalogue or table holds; lists the known ones
    │   ├── StaleInput                  input too old, or older than what was used before
    │   ├── Unavailable                 a node, region or configuration cannot be had
    │   ├── Infeasible                  no plan or placement exists, with the reason
    │   │   └── SloUnreachable          even one lone request misses the latency limit
    │   ├── PublicationRefused          the regression gate, or a newer epoch, forbids publishing
    │   └── ApprovalMissing             a person did not approve the change
    └── CoralFault                      something broke: Airflow may retry
        ├── StorageFault                file system or object store failed, or its content is corrupt
        ├── SourceFault                 an outside source hung, refused or answered half
        ├── SolverFault                 the solver ended in a status that is not named acceptable
        │   └── PlanRejected            the independent check refused a plan: a bug, never dispatched
        ├── ProtocolFault               a message or peer broke the protocol
        └── EngineFault                 an engine process failed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class CoralError(Exception):
    """Root of the tree; never raised itself."""


class ExpectedOutcome(CoralError):
    """A well-formed answer that is "no". Airflow must not retry it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule: where (table, row), what (value) and which rule.

    ``row`` is a row number, a key or "" when the rule concerns the whole table.
    """

    table: str
    row: str
    value: str
    rule: str

    def __str__(self) -> str:
        where = f"{self.table}, {self.row}" if self.row else self.table
        return f"{where}: {self.rule} (found {self.value})" if self.value else f"{where}: {self.rule}"


class ValidationFailed(ExpectedOutcome):
    """Input broke its rules. ``violations`` holds every one of them, in the order found."""

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations: tuple[Violation, ...] = tuple(violations)
        count = len(self.violations)
        lines = "\n".join(f"  {violation}" for violation in self.violations)
        super().__init__(f"{count} violation{'' if count == 1 else 's'}\n{lines}")


class UnknownName(ValidationFailed):
    """A name that no catalogue or table holds."""

    def __init__(self, *, kind: str, name: str, known: Sequence[str], table: str = "", row: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        rule = f"unknown {kind}; known: {', '.join(self.known) or 'none'}"
        super().__init__([Violation(table=table or kind, row=row, value=repr(name), rule=rule)])


class StaleInput(ExpectedOutcome):
    """Input is older than its limit, or older than what was used before."""


class Unavailable(ExpectedOutcome):
    """A node, region or configuration cannot be had now."""


class Infeasible(ExpectedOutcome):
    """No plan or placement exists; the message says why."""


class SloUnreachable(Infeasible):
    """Even one lone request misses its latency limit."""


class PublicationRefused(ExpectedOutcome):
    """The regression gate, or a newer version or epoch, forbids publishing."""


class ApprovalMissing(ExpectedOutcome):
    """A person did not approve the change in time, or rejected it."""


class CoralFault(CoralError):
    """Something broke. Airflow may retry."""


class StorageFault(CoralFault):
    """A file system or object store failed, or what it holds is corrupt or foreign."""


class SourceFault(CoralFault):
    """An outside source hung, refused, or answered only half."""


class SolverFault(CoralFault):
    """The solver ended in a status that is not named acceptable."""


class PlanRejected(SolverFault):
    """The independent check refused a plan. It is never returned or dispatched."""


class ProtocolFault(CoralFault):
    """A message or a peer broke the protocol."""


class EngineFault(CoralFault):
    """An engine process failed."""
