"""Log lines with the ids they belong to: one JSON object a line, or plain text. Owns format and context, no message.

Every logger of the project lies under ``coral`` or ``coral_tasks``. Ids come from two sides: what a piece of work sets
with ``context`` (run, task, plan, epoch), and what a line itself carries in ``extra`` (command, node, agent …). Times
are UTC. A line is never refused: what JSON does not know is written as text.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

LOGGERS: Final = ("coral", "coral_tasks")

IDS: Final = (
    "run",
    "task",
    "plan",
    "epoch",
    "round",
    "command",
    "kind",
    "status",
    "agent",
    "node",
    "instance",
    "table",
    "seconds",
)
"""Fields besides time, level, logger and message that a line may have."""

_context: ContextVar[dict[str, str]] = ContextVar("coral_log_context", default={})  # noqa: B039 - never changed in place


@contextmanager
def context(**ids: str | None) -> Iterator[None]:
    """Within this block every line of this thread carries ``ids`` (names of ``IDS``; None leaves one out)."""
    given = {name: value for name, value in ids.items() if value is not None}
    token = _context.set({**_context.get(), **given})
    try:
        yield
    finally:
        _context.reset(token)


def current() -> dict[str, str]:
    """Ids that lines carry now."""
    return dict(_context.get())


def ids_of(record: logging.LogRecord) -> dict[str, object]:
    """Ids of a line: its own ones win over those of the context."""
    own = {name: getattr(record, name) for name in IDS if getattr(record, name, None) not in {None, ""}}
    return {**_context.get(), **own}


class JsonFormatter(logging.Formatter):
    """One JSON object a line, whatever the message holds."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, ids, and the traceback if there is one."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **ids_of(record),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """For people: the same ids after the message, line breaks of the message kept out."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, then ``name=value`` for each id."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="seconds")
        ids = "".join(f" {name}={value}" for name, value in ids_of(record).items())
        line = f"{moment} {record.levelname} {record.name} {record.getMessage()}{ids}".replace("\n", " | ")
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _Handler(logging.StreamHandler[TextIO]):
    """Marks our own handler, so that a second call replaces it."""


def configure(kind: Literal["text", "json"], stream: TextIO | None = None) -> None:
    """Send the project's lines, from INFO up, to ``stream`` (standard error) and nowhere else."""
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [one for one in logger.handlers if not isinstance(one, _Handler)] + [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
