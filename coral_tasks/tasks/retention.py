"""What is kept of the past: the newest run folders, dispatch results and task logs; older ones are removed.

Owns which go. Never raises: a full disk or a file in use must not fail the run that tidies up.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from coral_tasks.domain.errors import CoralError

if TYPE_CHECKING:
    from coral_tasks.settings import Settings


def remove_old(settings: Settings) -> tuple[str, ...]:
    """Keep ``keep_runs`` of each kind, the plan in force's run always; what went, relative to ``home``, sorted."""
    from coral_tasks.tasks import sharing

    home, keep = settings.home, settings.keep_runs
    runs = [one for one in _older(_folders(home / "runs"), keep) if one.name != _in_force(home)]
    results = _older((one for one in (home / "dispatch").glob("*.json") if one.stem.isdigit()), keep)
    logs = [one for dag in (home / "airflow" / "logs").glob("dag_id=*") for one in _older(dag.glob("run_id=*"), keep)]
    for path in (*runs, *results, *logs):
        _remove(path)
    names = [f"runs/{one.name}/" for one in runs] + [f"dispatch/{one.name}" for one in results]
    with contextlib.suppress(CoralError):
        sharing.forget(names)
    return tuple(sorted([*names, *(str(one.relative_to(home)) for one in logs)]))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def _folders(root: Path) -> list[Path]:
    return [one for one in root.glob("*") if one.is_dir() and not one.name.startswith(".")]


def _older(paths: Iterable[Path], keep: int) -> list[Path]:
    """All but the ``keep`` that changed last. By time of change, not by name: a backfill's name lies in the past."""
    return [path for _, path in sorted(((_changed_at(one), one) for one in paths), reverse=True)[keep:]]


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another run may tidy up at the same time
        return 0.0


def _in_force(home: Path) -> str:
    try:
        found = json.loads((home / "current" / "run.json").read_bytes())
        return str(found.get("run", ""))
    except (OSError, ValueError, AttributeError):
        return ""
