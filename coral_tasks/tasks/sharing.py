"""Workers on several machines share one state: what a task needs comes from the store, what it made goes there.

Owns the decorator ``shared`` around the work of each task, the shared counter of epochs, and what the page's machine
fetches. With ``CORAL_SHARED`` empty, ``CORAL_HOME`` is all there is and nothing here does anything. Secrets (``keys/``)
and configuration files are never copied: they are deployed to each machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import CoralError
from coral_tasks.settings import Settings
from coral_tasks.tasks import observing

if TYPE_CHECKING:
    from coral_tasks.dispatch.epochs import Epochs
    from coral_tasks.storage.mirror import Mirror

AREAS: Final = ("current", "dispatch", "measurements", "quarantine", "routing")
"""Folders of ``CORAL_HOME`` that several runs write and the page shows, besides ``runs/<run id>``."""

PAGE_RUNS: Final = 300
"""Newest runs that the page looks at (``views.MAX_RUNS``)."""


def shared[**P, R](*areas: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a task's work: its run (first argument: the id, or a mapping with ``run``) and ``areas`` are shared.

    Around it, see ``observing.task``: log lines with the run's id, and how long it took.

    The work runs on the newest state and hands over what it wrote, also when it fails. Work on the same area waits for
    its turn on one machine; on different machines the second to hand over a change of the same file raises
    StorageFault, and Airflow's retry does it again on the new state.
    """

    def wrap(work: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(work)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            settings, run_id = Settings(), _run_of(args)
            frame = observing.task(settings, work.__name__, run_id, _part_of(args))
            with _on_newest_state(settings, run_id, areas), frame:
                return work(*args, **kwargs)

        run.shared_areas = areas  # type: ignore[attr-defined]
        return run

    return wrap


def _run_of(args: Sequence[Any]) -> str | None:
    first = args[0] if args else None
    if isinstance(first, Mapping):
        return str(first["run"]) if "run" in first else None
    return first if isinstance(first, str) else None


def _part_of(args: Sequence[Any]) -> str:
    """A name for what else than its run a task was given: tells the parts of a mapped task apart."""
    rest = args[1:] if args and isinstance(args[0], str) else args
    return hashlib.sha256(repr(rest).encode()).hexdigest()[:12] if rest else ""


@contextlib.contextmanager
def _on_newest_state(settings: Settings, run_id: str | None, areas: Sequence[str]) -> Iterator[None]:
    if not settings.shared:
        yield
        return
    mirror = _mirror(settings)
    state, run = [f"{area}/" for area in areas], [f"runs/{run_id}/"] if run_id else []
    with _alone(settings.home, areas):
        seen_state, seen_run = mirror.pull(state), mirror.pull(run, strays=True)
        try:
            yield
        except BaseException:
            # gate reports and quarantined batches of a refused run are what a person needs to see
            with contextlib.suppress(CoralError):
                mirror.push(run, seen_run)
                mirror.push(state, seen_state)
            raise
        mirror.push(run, seen_run)
        mirror.push(state, seen_state)


def _mirror(settings: Settings) -> Mirror:
    from coral_tasks.storage.mirror import Mirror
    from coral_tasks.storage.objects import open_store

    return Mirror(store=open_store(settings.shared), folder=settings.home)


@contextlib.contextmanager
def _alone(home: Path, areas: Sequence[str]) -> Iterator[None]:
    """Hold this machine's lock of each area: files of live work must not be taken for debris."""
    with contextlib.ExitStack() as stack:
        for area in sorted(areas):
            path = home / "locks" / f"{area}.lock"
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(path.open("wb"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def epochs(path: Path) -> Epochs:
    """Where dispatches take their epochs: the shared counter, or the one in ``path`` if nothing is shared."""
    settings = Settings()
    if settings.shared:
        from coral_tasks.storage.epochs import SharedEpochs
        from coral_tasks.storage.objects import open_store

        return SharedEpochs(store=open_store(settings.shared))
    from coral_tasks.dispatch.epochs import EpochStore

    return EpochStore(path=path)


def pull_for_page(settings: Settings) -> int:
    """Bring here what the page shows: state and the newest runs; number of runs. Does nothing if nothing is shared.

    Waits for nobody: on a machine that works too, files newer than the store's are left as they are.
    """
    if not settings.shared:
        return 0
    mirror = _mirror(settings)
    newest: dict[str, Any] = {}
    for info in mirror.store.list("runs/"):
        run_id = info.key.split("/")[1]
        newest[run_id] = max(info.modified, newest.get(run_id, info.modified))
    runs = sorted(newest, key=lambda one: (newest[one], one), reverse=True)[:PAGE_RUNS]
    prefixes = [*(f"{area}/" for area in AREAS), *(f"runs/{run_id}/" for run_id in runs)]
    mirror.pull(prefixes, keep_newer=True)
    return len(runs)


def forget(prefixes: Sequence[str]) -> None:
    """Delete what begins so (``runs/<id>/``, ``dispatch/7.json``) from the shared store; files are the caller's."""
    settings = Settings()
    if not settings.shared:
        return
    store = _mirror(settings).store
    for prefix in prefixes:
        for info in store.list(prefix):
            store.delete(info.key)
