"""Hypothesis profiles (short by default, derandomised and a little longer in CI), names of cases, ports for agents."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow]
settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names bytes by their argument: they may hold a time or a salt, and processes must collect the same names."""
    return argname if isinstance(val, bytes) else None


FIRST_PORT, LAST_PORT = 10_000, 32_000
"""Below the ports that Linux gives outgoing connections (32768 and up): one of those held by any connection on the
machine when an engine wants to listen made the engine's first starts fail."""


@pytest.fixture(scope="session")
def ports_in_a_row() -> Iterator[Callable[[int], int]]:
    """Gives the first of so many ports in a row on which nobody listens, for this session alone.

    Ranges are kept apart from those of other test processes by a UDP socket on their first port, which hinders no TCP.
    """
    with contextlib.ExitStack() as held:

        def first_of(count: int) -> int:
            starts = list(range(FIRST_PORT, LAST_PORT - count, count))
            random.SystemRandom().shuffle(starts)
            for first in starts:
                with contextlib.suppress(OSError):
                    guard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
                    with contextlib.ExitStack() as unless_free:
                        unless_free.enter_context(guard).bind(("127.0.0.1", first))
                        for port in range(first, first + count):
                            with socket.socket() as probe:
                                probe.bind(("127.0.0.1", port))
                        held.enter_context(unless_free.pop_all())
                    return first
            raise AssertionError("no free ports")

        yield first_of
