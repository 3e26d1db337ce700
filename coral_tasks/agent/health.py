"""Health of an engine over HTTP: /health, then requests in flight from /metrics (vLLM's metric names).

Plain asyncio streams instead of an HTTP library: an agent checks every second and should stay small.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

_MAX_BODY_BYTES = 4 << 20
_GAUGE = re.compile(rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})?\s+([0-9.eE+]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """``in_flight``: requests running and waiting, None if the engine does not tell."""

    healthy: bool
    in_flight: int | None


async def check_health(endpoint: str, *, timeout_s: float) -> Health:
    """Ask the engine at ``endpoint``. Never raises for what the engine does or does not answer."""
    try:
        async with asyncio.timeout(timeout_s):
            status, _ = await http_get(f"{endpoint}/health")
            if status != 200:
                return Health(healthy=False, in_flight=None)
            status, body = await http_get(f"{endpoint}/metrics")
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return Health(healthy=False, in_flight=None)
    return Health(healthy=True, in_flight=requests_in_flight(body) if status == 200 else None)


def requests_in_flight(metrics: bytes) -> int | None:
    """Sum of running and waiting requests over all of the engine's ranks, None if it is not told."""
    found = _GAUGE.findall(metrics)
    try:
        return round(sum(float(value) for value in found)) if found else None
    except (ValueError, OverflowError):
        return None


async def http_get(url: str) -> tuple[int, bytes]:
    """Status and body of a GET. Raises OSError or ValueError if the server does not speak HTTP."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        writer.write(f"GET {parts.path or '/'} HTTP/1.0\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        words = head.split(b" ", 2)
        if len(words) < 2 or not words[1].isdigit():
            raise ValueError("not an HTTP answer")
        return int(words[1]), await _read_body(reader, head)
    finally:
        writer.close()


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """As long as announced, else until the server closes."""
    announced = re.search(rb"(?i)\r\ncontent-length:\s*(\d+)", head)
    if announced is not None and int(announced[1]) <= _MAX_BODY_BYTES:
        return await reader.readexactly(int(announced[1]))
    return await reader.read(_MAX_BODY_BYTES)
