"""The demo's moment repeats within a day and never lies ahead of the clock."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from coral_tasks.settings import Settings
from coral_tasks.tasks.demo import RunRefused, last_noon, run_demo


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


def test_the_demo_refuses_a_mode_in_which_it_would_wait_for_ever(tmp_path) -> None:
    """Mode approve needs someone to ask; without Airflow's UI the run would never end, so it does not begin."""
    with pytest.raises(RunRefused, match="coral serve"):
        run_demo(Settings(home=tmp_path / "home", mode="approve"))
    assert not (tmp_path / "home").exists()
