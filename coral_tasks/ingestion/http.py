"""One HTTP GET that ends: deadline on the whole answer, size limit, retries with back-off on 429 and 5xx.

Owns transport faults: everything that is not a whole 2xx answer becomes SourceFault with the address and the reason.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from coral_tasks.domain.errors import SourceFault

RETRY_STATUS: Final = frozenset({408, 429, 500, 502, 503, 504})
MAX_BYTES: Final = 64 * 1024 * 1024
_CHUNK: Final = 65_536


class _Again(Exception):
    """The try failed in a way that a later try may not; ``wait_s``: what the server asked for, if it did."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        self.reason, self.wait_s = reason, wait_s
        super().__init__(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Seconds for one try and for all together; tries in all; first pause, doubled after each try."""

    try_s: float = 10.0
    total_s: float = 30.0
    tries: int = 3
    first_pause_s: float = 0.5


def get_json(
    base: str,
    path: str,
    query: Mapping[str, str],
    limits: HttpLimits,
    *,
    token: str = "",
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """GET ``base`` + ``path`` and read JSON. Raises SourceFault.

    ``token``: sent as bearer token to ``base`` only, not to where it may redirect, and never part of a message.
    """
    url = f"{base.rstrip('/')}{path}?{urllib.parse.urlencode(query)}"
    if not url.startswith(("http://", "https://")):
        message = f"{base}: only http and https addresses are read"
        raise SourceFault(message)
    end = clock() + limits.total_s
    pause = limits.first_pause_s
    reason = ""
    for number in range(1, limits.tries + 1):
        try:
            body = _get(url, min(limits.try_s, end - clock()), token)
            return _parse(base, path, body)
        except _Again as again:
            reason = again.reason
            wait = pause if again.wait_s is None else again.wait_s
            if number == limits.tries or clock() + wait >= end:
                break
            sleep(wait)
            pause *= 2
    message = f"{base}{path}: {reason} (tried {number} times)"
    raise SourceFault(message)


def _parse(base: str, path: str, body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"{base}{path}: the answer is not whole JSON: {str(error)[:200]}"
        raise SourceFault(message) from error


def _get(url: str, seconds: float, token: str) -> bytes:
    if seconds <= 0:
        raise _Again("no answer in time")
    deadline = _Deadline(seconds)
    try:
        request = urllib.request.Request(url, headers={"Accept": "application/json"})  # noqa: S310  scheme checked
        if token:
            request.add_unredirected_header("Authorization", f"Bearer {token}")
        with deadline:
            return _answer(deadline.opener(), request, seconds)
    except (_Again, OSError, http.client.HTTPException) as error:
        late = deadline.passed or isinstance(error, TimeoutError)
        raise _Again(f"no whole answer within {seconds:.3g} s") if late else _again(error) from error
    except ValueError as error:
        # an address that is none, a host name that no name server can be asked for
        message = f"{url.partition('?')[0]}: not an address that can be read: {error}"
        raise SourceFault(message) from error


def _again(error: Exception) -> _Again:
    if isinstance(error, _Again):
        return error
    if isinstance(error, OSError):
        return _Again(f"not reachable ({error})")
    return _Again(f"the answer was cut off ({type(error).__name__})")


def _answer(opener: urllib.request.OpenerDirector, request: urllib.request.Request, seconds: float) -> bytes:
    try:
        with opener.open(request, timeout=seconds) as answer:
            return _read(answer)
    except urllib.error.HTTPError as error:
        with error:
            return _refused(error)


class _Deadline:
    """Ends every connection of one try after ``seconds``: a socket's own limit is per packet, so headers could drip."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._open: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.passed = True
        for one in self._open:
            # already closed is as good
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def opener(self) -> urllib.request.OpenerDirector:
        """The standard one opener (proxies, redirects), its connections watched."""
        watched = self._open

        class Plain(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                watched.append(self.sock)

        class Encrypted(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                watched.append(self.sock)

        class OpenPlain(urllib.request.HTTPHandler):
            def http_open(self, request: urllib.request.Request) -> Any:
                return self.do_open(Plain, request)

        class OpenEncrypted(urllib.request.HTTPSHandler):
            def https_open(self, request: urllib.request.Request) -> Any:
                return self.do_open(Encrypted, request)

        return urllib.request.build_opener(OpenPlain, OpenEncrypted)


def _read(answer: Any) -> bytes:
    """Read to the end, with a size limit."""
    parts: list[bytes] = []
    total = 0
    while chunk := answer.read1(_CHUNK):
        parts.append(chunk)
        total += len(chunk)
        if total > MAX_BYTES:
            message = f"{answer.url}: the answer is larger than {MAX_BYTES} bytes"
            raise SourceFault(message)
    expected = answer.headers.get("Content-Length", "")
    if expected.isdecimal() and total < int(expected):
        raise _Again(f"the answer was cut off after {total} of {expected} bytes")
    return b"".join(parts)


def _refused(error: urllib.error.HTTPError) -> bytes:
    if error.code in RETRY_STATUS:
        raise _Again(f"HTTP {error.code} {error.reason}", _retry_after(error.headers.get("Retry-After")))
    detail = error.read(500).decode(errors="replace").strip()
    message = f"{error.url}: HTTP {error.code} {error.reason}: {detail}"
    raise SourceFault(message)


def _retry_after(text: str | None) -> float | None:
    """Seconds that the server asks for; a date, or nonsense, counts as not asked."""
    try:
        wait = float(text) if text else None
    except ValueError:
        return None
    return wait if wait is not None and 0 <= wait < 3600 else None
