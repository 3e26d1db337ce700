"""The demo's moment repeats within a day and never lies ahead of the clock."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from coral_tasks.tasks.demo import last_noon


@pytest.mark.parametrize(
    ("now", "noon"),
    [
        (datetime(2026, 11, 30, 0, 28, tzinfo=UTC), datetime(2026, 11, 29, 12, tzinfo=UTC)),
        (datetime(2026, 11, 29, 12, tzinfo=UTC), datetime(2026, 11, 29, 12, tzinfo=UTC)),
        (datetime(2026, 11, 29, 23, 59, tzinfo=UTC), datetime(2026, 11, 29, 12, tzinfo=UTC)),
    ],
)
def test_the_last_noon_is_not_ahead_of_the_clock(now: datetime, noon: datetime) -> None:
    """A moment ahead would make the gate refuse the scheduled runs that follow as stepping back."""
    assert last_noon(now) == noon
