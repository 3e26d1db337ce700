"""Profiling jobs: request file in, configured command, rows file out. Owns the files; the command is configured.

The agent never imports the profiler: it runs as a child process with its own environment.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from coral_tasks.agent.config import AgentConfig
from coral_tasks.agent.engines import Launch, profile_launch
from coral_tasks.agent.journal import Journal
from coral_tasks.protocol.agent_machine import Slot
from coral_tasks.protocol.messages import JobResult

_MAX_ROWS_BYTES = 900_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRunner:
    """Jobs of one agent, each in a folder of its own below the state folder."""

    config: AgentConfig

    def folder(self, job: str) -> Path:
        """Where request and rows of ``job`` lie."""
        return self.config.state / "jobs" / hashlib.sha256(job.encode()).hexdigest()[:16]

    def launch(self, slot: Slot) -> Launch:
        """Write the request and build the command. Raises EngineFault if none is configured, OSError on a full disk."""
        folder = self.folder(slot.job)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "rows.json").unlink(missing_ok=True)
        (folder / "request.json").write_text(slot.request, encoding="utf-8")
        return profile_launch(self.config, folder / "request.json", folder / "rows.json")

    def finish(self, journal: Journal, slot: Slot, how: str) -> None:
        """Keep the result of a job whose process ended. Raises StorageFault if it cannot be kept."""
        rows = self.folder(slot.job) / "rows.json"
        try:
            text = rows.read_text(encoding="utf-8") if rows.is_file() else ""
        except (OSError, UnicodeDecodeError) as error:
            text, how = "", f"{how}; rows cannot be read: {error}"
        if len(text.encode()) > _MAX_ROWS_BYTES:
            text, how = "", f"{how}; rows exceed {_MAX_ROWS_BYTES} bytes"
        status = "succeeded" if text and how.endswith("code 0") else "failed"
        result = JobResult(request="-", job=slot.job, status=status, rows=text, detail=how[:4000])
        journal.write_job(result)

    def result(self, journal: Journal, request: str, job: str, *, running: bool) -> JobResult:
        """State of ``job`` as asked for by ``request``."""
        kept = journal.read_job(job)
        if running:
            return JobResult(request=request, job=job, status="running")
        if kept is None:
            return JobResult(request=request, job=job, status="unknown")
        return JobResult(request=request, job=job, status=kept.status, rows=kept.rows, detail=kept.detail)
