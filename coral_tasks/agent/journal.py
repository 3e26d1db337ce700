"""The agent's journal: slots, fence, outcomes and jobs in SQLite. Owns durability, not meaning.

One row per slot and outcome, JSON inside. WAL with synchronous=NORMAL: a killed agent loses nothing; after a power
failure the last writes may be gone, but then so are the engines, and commands of the run before are refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace as with_

from coral_tasks.domain.errors import StorageFault
from coral_tasks.protocol.agent_machine import MAX_OUTCOMES, Changes, FenceState, Slot
from coral_tasks.protocol.messages import JobResult, Outcome

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS slots (node TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS outcomes (number INTEGER PRIMARY KEY, command TEXT UNIQUE NOT NULL, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (job TEXT PRIMARY KEY, body TEXT NOT NULL);
"""


class Journal:
    """Journal of one agent in a folder that no other agent may use at the same time."""

    def __init__(self, folder: Path) -> None:
        """Open or create. Raises StorageFault if the folder is in use, not writable or its journal is corrupt."""
        self._written: dict[str, Slot] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(folder / "agent.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageFault(f"another agent uses {folder}") from error
        except OSError as error:
            raise StorageFault(f"cannot use {folder}: {error}") from error
        try:
            self._database = sqlite3.connect(folder / "journal.sqlite", timeout=5.0)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            os.close(self._lock)
            raise StorageFault(f"journal in {folder}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close and let others use the folder."""
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        os.close(self._lock)

    def write(self, changes: Changes) -> None:
        """Write all of ``changes`` or nothing. Raises StorageFault, for example on a full disk."""
        slots = [slot for slot in changes.slots if self._written.get(slot.node) != durable(slot)]
        if not slots and changes.fence is None and changes.outcome is None:
            return
        try:
            with self._database:
                for slot in slots:
                    self._put("slots", "node", slot.node, msgspec.json.encode(durable(slot)).decode())
                if changes.fence is not None:
                    self._put("meta", "name", "fence", msgspec.json.encode(changes.fence).decode())
                if changes.outcome is not None:
                    self._put_outcome(changes.outcome)
        except sqlite3.Error as error:
            raise StorageFault(f"journal: {error}") from error
        self._written.update({slot.node: durable(slot) for slot in slots})

    def _put(self, table: str, key: str, name: str, body: str) -> None:
        # table and key are constants of this module
        statement = f"INSERT INTO {table} ({key}, body) VALUES (?, ?) ON CONFLICT ({key}) DO UPDATE SET body = ?"  # noqa: S608
        self._database.execute(statement, (name, body, body))

    def _put_outcome(self, outcome: Outcome) -> None:
        body = msgspec.json.encode(outcome).decode()
        self._database.execute("INSERT OR IGNORE INTO outcomes (command, body) VALUES (?, ?)", (outcome.command, body))
        self._database.execute(
            "DELETE FROM outcomes WHERE number <= (SELECT MAX(number) FROM outcomes) - ?", (MAX_OUTCOMES,)
        )

    def write_job(self, result: JobResult) -> None:
        """Keep the result of a profiling job. Raises StorageFault."""
        try:
            with self._database:
                self._put("jobs", "job", result.job, msgspec.json.encode(result).decode())
        except sqlite3.Error as error:
            raise StorageFault(f"journal: {error}") from error

    def read_job(self, job: str) -> JobResult | None:
        """The result of ``job`` if it ended here."""
        rows = self._select("SELECT body FROM jobs WHERE job = ?", job)
        return msgspec.json.decode(rows[0], type=JobResult) if rows else None

    def read_slots(self) -> dict[str, Slot]:
        """Slots as last written."""
        slots = [msgspec.json.decode(body, type=Slot) for body in self._select("SELECT body FROM slots")]
        self._written = {slot.node: slot for slot in slots}
        return {slot.node: slot for slot in slots}

    def read_fence(self) -> FenceState:
        """The fence as last written."""
        rows = self._select("SELECT body FROM meta WHERE name = 'fence'")
        return msgspec.json.decode(rows[0], type=FenceState) if rows else FenceState()

    def read_outcomes(self) -> dict[str, Outcome]:
        """First outcomes, oldest first."""
        bodies = self._select("SELECT body FROM outcomes ORDER BY number")
        outcomes = [msgspec.json.decode(body, type=Outcome) for body in bodies]
        return {outcome.command: outcome for outcome in outcomes}

    def _select(self, statement: str, *values: str) -> list[str]:
        try:
            return [str(row[0]) for row in self._database.execute(statement, values)]
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise StorageFault(f"journal: {error}") from error


def durable(slot: Slot) -> Slot:
    """The part of a slot that must survive: what health checks change each second is left out."""
    return with_(
        slot,
        deadline_s=0.0,
        ready_since_s=0.0,
        healthy_at_s=0.0,
        idle_since_s=None,
        in_flight=None,
        excluded_until_s=0.0,
    )
