"""Clients of AWS, and what their failures mean. The one module that imports boto3 and botocore.

Owns time limits, back-off, and that a call which ends without a whole answer becomes one fault with a short message.
botocore lets out whatever a broken answer makes its parsers raise: ResponseParserError for half an XML document,
AttributeError for a JSON list, ValueError for a word in place of a count, RecursionError for deep nesting. So every
exception counts, and none of them ends a run in a traceback. Must not know what any service's answer means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Final

from coral_tasks.domain.errors import CoralError, CoralFault, Unavailable

MAX_REASON: Final = 500
"""Characters of a reason: the parsers' messages hold the whole answer."""

_MAKING: Final = Lock()
"""boto3 makes clients from one session, which several threads must not do at once; the clients themselves may be."""


def make_client(
    service: str,
    region: str | None,
    fault: type[CoralFault],
    *,
    endpoint_url: str | None = None,
    connect_s: float = 5.0,
    read_s: float = 20.0,
    tries: int = 4,
) -> Any:
    """A boto3 client with time limits and at most ``tries`` tries with back-off (429 and 5xx are tried again).

    ``region`` and ``endpoint_url`` None: from boto3's usual settings, as credentials always are. Raises ``fault`` for
    settings that make no client (no region, an address that is none).
    """
    import boto3
    from botocore.config import Config

    with aws_call(f"aws {service}: no client", fault):
        config = Config(
            connect_timeout=connect_s, read_timeout=read_s, retries={"mode": "standard", "total_max_attempts": tries}
        )
        with _MAKING:
            return boto3.client(service, region_name=region, endpoint_url=endpoint_url, config=config)


@contextmanager
def aws_call(
    doing: str, fault: type[CoralFault], *, quiet: Collection[str] = (), unavailable: Collection[str] = ()
) -> Iterator[None]:
    """Guard around calls and the reading of their answers. ``doing``: begins the message.

    Whatever goes wrong inside raises ``fault``; AWS's error codes in ``unavailable`` raise Unavailable, those in
    ``quiet`` end the block. Our own errors pass through.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except CoralError:
        raise
    except ClientError as error:
        code = _code(error.response)
        if code in unavailable:
            raise Unavailable(_message(doing, error)) from error
        if code not in quiet:
            raise fault(_message(doing, error)) from error
    except (BotoCoreError, ResponseParserError, OSError) as error:
        raise fault(_message(doing, error)) from error
    except Exception as error:
        raise fault(_message(doing, error, f"the answer is not whole: {type(error).__name__}: ")) from error


def _code(response: Any) -> str:
    """AWS's error code; "" where the answer holds none."""
    found = response.get("Error") if isinstance(response, dict) else None
    return str(found.get("Code", "")) if isinstance(found, dict) else ""


def _message(doing: str, error: Exception, reason: str = "") -> str:
    return f"{doing}: {reason}{str(error)[:MAX_REASON]}"


def aws_entries(client: Any, operation: str, key: str, fault: type[CoralFault], **arguments: Any) -> list[Any]:
    """Entries under ``key`` of all pages. Raises ``fault`` if a call fails or hangs, or a page lacks its list."""
    pages = aws_pages(client, operation, key, f"aws {operation}", fault, **arguments)
    with aws_call(f"aws {operation}", fault):
        return [entry for page in pages for entry in page[key]]


def aws_pages(
    client: Any, operation: str, mark: str, doing: str, fault: type[CoralFault], **arguments: Any
) -> list[Any]:
    """All pages of a listing. ``mark``: a field that every page of a whole answer has.

    A page that fails in the middle fails the whole: half a listing raises ``fault`` and is never a shorter one.
    """
    with aws_call(doing, fault):
        pages = list(client.get_paginator(operation).paginate(**arguments))
        lost = [number for number, page in enumerate(pages, start=1) if mark not in page]
    if lost:
        raise fault(f"{doing}: page {lost[0]} of {len(pages)} came without {mark}")
    return pages
