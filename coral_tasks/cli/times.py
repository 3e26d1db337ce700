"""Reads moments given on the command line. Owns the message for a time without a zone."""

from __future__ import annotations

from datetime import UTC, datetime

import typer


def parse_moment(text: str) -> datetime:
    """ISO 8601 with a zone as UTC; "" is now. Raises typer.BadParameter."""
    if not text:
        return datetime.now(UTC)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        message = f"{text!r} is not an ISO 8601 time"
        raise typer.BadParameter(message) from error
    if moment.tzinfo is None:
        message = f"{text!r} needs a time zone, such as Z or +01:00"
        raise typer.BadParameter(message)
    return moment.astimezone(UTC)
