"""Epochs: a number that only grows, one for each dispatch. Owns the counter in the controller's store.

An epoch belongs to one controller process: agents refuse a second owner of the same epoch and every older epoch. So
each dispatch, a retry too, takes a new one. The counter must live in one place that all controllers share.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from coral_tasks.domain.errors import StorageFault


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochStore:
    """Counter in an SQLite file. ``path``: shared by all controllers of one fleet."""

    path: Path

    def next_epoch(self, plan: str, *, at_least: int = 0) -> int:
        """A number above all given out before and above ``at_least``. Raises StorageFault.

        ``at_least``: newest epoch seen on agents, so that a lost store cannot lock its controller out for ever.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, timeout=30.0, isolation_level=None)
            try:
                return self._take(database, plan, at_least)
            finally:
                database.close()
        except (sqlite3.Error, OSError) as error:
            raise StorageFault(f"epoch store {self.path}: {error}") from error

    @staticmethod
    def _take(database: sqlite3.Connection, plan: str, at_least: int) -> int:
        database.execute("BEGIN IMMEDIATE")
        database.execute("CREATE TABLE IF NOT EXISTS epochs (epoch INTEGER PRIMARY KEY, plan TEXT NOT NULL)")
        newest = database.execute("SELECT COALESCE(MAX(epoch), 0) FROM epochs").fetchone()[0]
        epoch = max(int(newest), at_least) + 1
        database.execute("INSERT INTO epochs (epoch, plan) VALUES (?, ?)", (epoch, plan))
        database.execute("COMMIT")
        return epoch
