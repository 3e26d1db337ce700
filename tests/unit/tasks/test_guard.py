"""A plan is sent while it is young and nobody else dispatched since its run began; else it is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coral_tasks.dispatch.epochs import EpochStore
from coral_tasks.domain.errors import StaleInput
from coral_tasks.settings import Settings
from coral_tasks.storage.runs import Run, RunStore
from coral_tasks.tasks import guard


def begun(home: Path, name: str, *, ago: timedelta = timedelta(0)) -> Run:
    """A run that began some time ago."""
    run = RunStore(root=home / "runs").open(name)
    guard.pin_basis(Settings(home=home), run, datetime.now(UTC) - ago)
    return run


def store(home: Path) -> EpochStore:
    """The counter of a home."""
    return EpochStore(path=home / "dispatch" / "epochs.sqlite")


def test_a_run_may_dispatch_again_as_long_as_it_is_the_newest(tmp_path: Path) -> None:
    """A retry, or a cleared task, of the same run takes a new epoch each time."""
    settings, run = Settings(home=tmp_path), begun(tmp_path, "a")
    assert not guard.has_begun(settings, run, "p")
    assert [guard.take_epoch(settings, run, "p") for _ in range(3)] == [1, 2, 3]
    assert guard.has_begun(settings, run, "p")


def test_an_older_run_is_refused_after_a_newer_one_was_sent(tmp_path: Path) -> None:
    """Clearing yesterday's dispatch must not bring yesterday's fleet back; the message names who came between."""
    settings = Settings(home=tmp_path)
    old, new = begun(tmp_path, "old"), begun(tmp_path, "new")
    guard.take_epoch(settings, old, "p1")
    later = begun(tmp_path, "later")
    with pytest.raises(StaleInput, match="p1 of run old"):
        guard.take_epoch(settings, new, "p2")
    assert guard.take_epoch(settings, later, "p3") == 2
    with pytest.raises(StaleInput, match="p3 of run later"):
        guard.take_epoch(settings, old, "p1")
    assert not guard.has_begun(settings, old, "p1")


def test_the_same_plan_of_another_run_is_another_dispatch(tmp_path: Path) -> None:
    """Plan ids are hashes and repeat; what counts is the run."""
    settings = Settings(home=tmp_path)
    first, second = begun(tmp_path, "first"), begun(tmp_path, "second")
    guard.take_epoch(settings, first, "p")
    with pytest.raises(StaleInput, match="run first"):
        guard.take_epoch(settings, second, "p")


def test_a_dispatch_by_hand_makes_a_waiting_run_stale(tmp_path: Path) -> None:
    """Whatever took an epoch counts, the command line too."""
    run = begun(tmp_path, "a")
    store(tmp_path).next_epoch("plan-by-hand")
    with pytest.raises(StaleInput, match="plan-by-hand"):
        guard.take_epoch(Settings(home=tmp_path), run, "p")


def test_a_plan_that_is_too_old_is_refused(tmp_path: Path) -> None:
    """A run that was paused over night does not send its plan in the morning; the limit is a setting."""
    run = begun(tmp_path, "a", ago=timedelta(seconds=700))
    with pytest.raises(StaleInput, match=r"CORAL_PLAN_MAX_AGE_S \(600 s\)"):
        guard.take_epoch(Settings(home=tmp_path, plan_max_age_s=600.0), run, "p")
    assert guard.take_epoch(Settings(home=tmp_path, plan_max_age_s=800.0), run, "p") == 1


def test_two_at_once_do_not_both_get_through(tmp_path: Path) -> None:
    """Between looking and taking, another may take: the counter itself refuses then."""
    counter = store(tmp_path)
    counter.next_epoch("a")
    with pytest.raises(StaleInput, match="epoch 1 was taken since epoch 0"):
        counter.next_epoch("b", expected=0)
    assert counter.newest() == (1, "a")
    assert counter.next_epoch("b", expected=1) == 2
    assert EpochStore(path=tmp_path / "none.sqlite").newest() == (0, "")
