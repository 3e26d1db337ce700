"""Epochs: a number that only grows, one for each dispatch. Owns the counter in the controller's store.

An epoch belongs to one controller process: agents refuse a second owner of the same epoch and every older epoch. So
each dispatch, a retry too, takes a new one. The counter must live in one place that all controllers share.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coral_tasks.domain.errors import StaleInput, StorageFault


class Epochs(Protocol):
    """Where epochs come from."""

    def newest(self) -> tuple[int, str]:
        """The newest epoch given out and for what; (0, "") if there was none. Raises StorageFault."""

    def next_epoch(self, plan: str, *, at_least: int = 0, expected: int | None = None) -> int:
        """A number above all given out before and above ``at_least``. Raises StorageFault.

        ``expected``: the newest epoch as the caller saw it; StaleInput if another one was taken since.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStore:
    """Counter in an SQLite file. ``path``: shared by all controllers of one fleet."""

    path: Path

    def newest(self) -> tuple[int, str]:
        """The newest epoch given out and for what; (0, "") if there was none. Raises StorageFault."""
        if not self.path.is_file():
            return 0, ""
        try:
            database = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            try:
                found = database.execute("SELECT epoch, plan FROM epochs ORDER BY epoch DESC LIMIT 1").fetchone()
            finally:
                database.close()
        except sqlite3.Error as error:
            raise StorageFault(f"epoch store {self.path}: {error}") from error
        return (0, "") if found is None else (int(found[0]), str(found[1]))

    def next_epoch(self, plan: str, *, at_least: int = 0, expected: int | None = None) -> int:
        """A number above all given out before and above ``at_least``. Raises StorageFault.

        ``at_least``: newest epoch seen on agents, so that a lost store cannot lock its controller out for ever.
        ``expected``: the newest epoch as the caller saw it; StaleInput if another one was taken since.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            try:
                return self._take(database, plan, at_least, expected)
            finally:
                database.close()
        except (sqlite3.Error, OSError) as error:
            raise StorageFault(f"epoch store {self.path}: {error}") from error

    @staticmethod
    def _take(database: sqlite3.Connection, plan: str, at_least: int, expected: int | None) -> int:
        database.execute("BEGIN IMMEDIATE")
        database.execute("CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, plan TEXT NOT NULL)")
        newest = database.execute("SELECT COALESCE(MAX(epoch), 0) FROM epochs").fetchone()[0]
        require_expected(int(newest), expected)
        epoch = max(int(newest), at_least) + 1
        database.execute("INSERT INTO epochs (epoch, plan) VALUES (?, ?)", (epoch, plan))
        database.execute("COMMIT")
        return epoch


def require_expected(newest: int, expected: int | None) -> None:
    """Raise StaleInput if the caller saw another epoch as the newest one."""
    if expected is not None and newest != expected:
        message = f"epoch {newest} was taken since epoch {expected} was seen to be the newest"
        raise StaleInput(message)
