"""Run store: everything a run read and wrote, under its run id, each file written whole or not at all.

Owns the folder ``runs/<run id>/`` and its manifest. A file once written keeps its bytes: writing the same again is
fine (tasks may run twice), writing something else under the same name is refused unless asked for.

API::

    RunStore(root).open(run_id) -> Run           # makes the folder
    run.put(name, data), .put_json(name, value), .get(name), .names(), .seal(), .verify()
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed, Violation
from coral_tasks.domain.names import RunId

RUN_ID: Final = re.compile(r"[A-Za-z0-9_.~:+-]{1,200}")
"""What Airflow allows as a run id."""

NAME: Final = re.compile(r"[A-Za-z0-9_~:+-][A-Za-z0-9_.~:+-]*(/[A-Za-z0-9_~:+-][A-Za-z0-9_.~:+-]*)*")
MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run's folder."""

    id: RunId
    folder: Path

    def path(self, name: str) -> Path:
        """Where ``name`` lies or would lie. Raises ValidationFailed for a name that leaves the folder."""
        if NAME.fullmatch(name) is None:
            rule = "a name is words joined by / that do not start with a point"
            raise ValidationFailed([Violation(table="run", row=self.id, value=name, rule=rule)])
        return self.folder / name

    def put(self, name: str, data: bytes, *, replace: bool = False) -> Path:
        """Write ``data`` under ``name``, whole or not at all; the path.

        Raises StorageFault if other bytes are there already (unless ``replace``) or the disk refuses.
        """
        path = self.path(name)
        try:
            if not replace and path.exists():
                return self._same(path, data)
            write_whole(path, data)
        except OSError as error:
            message = f"run {self.id}: {name} cannot be written: {error.strerror or error}"
            raise StorageFault(message) from error
        return path

    def _same(self, path: Path, data: bytes) -> Path:
        if path.read_bytes() == data:
            return path
        message = f"run {self.id}: {path.name} is there already with other content"
        raise StorageFault(message)

    def put_json(self, name: str, value: Any, *, replace: bool = False) -> Path:
        """Write JSON with sorted keys; NaN and infinity are refused (ValueError)."""
        text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False)
        return self.put(name, f"{text}\n".encode(), replace=replace)

    def get(self, name: str) -> bytes:
        """Bytes of ``name``. Raises StorageFault if it is not there or cannot be read."""
        try:
            return self.path(name).read_bytes()
        except OSError as error:
            message = f"run {self.id}: {name} cannot be read: {error.strerror or error}"
            raise StorageFault(message) from error

    def get_json(self, name: str) -> Any:
        """JSON content of ``name``. Raises StorageFault."""
        try:
            return json.loads(self.get(name))
        except ValueError as error:
            message = f"run {self.id}: {name} is not JSON: {error}"
            raise StorageFault(message) from error

    def names(self) -> tuple[str, ...]:
        """Names of all whole files but the manifest, sorted."""
        return tuple(sorted(name for name in self._all() if name != MANIFEST))

    def _all(self) -> Iterator[str]:
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and NAME.fullmatch(name):
                yield name

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file, by name."""
        return {name: hashlib.sha256(self.get(name)).hexdigest() for name in self.names()}

    def seal(self) -> Path:
        """Write the manifest: name, size and SHA-256 of every file."""
        files = {
            name: {"sha256": digest, "bytes": self.path(name).stat().st_size} for name, digest in self.digests().items()
        }
        return self.put_json(MANIFEST, {"run": self.id, "files": files}, replace=True)

    def _stated(self) -> dict[str, str]:
        """SHA-256 by name as the manifest has it. Raises StorageFault if it is no manifest."""
        content = self.get_json(MANIFEST)
        try:
            return {str(name): str(entry["sha256"]) for name, entry in content["files"].items()}
        except (TypeError, KeyError, AttributeError) as error:
            message = f"run {self.id}: {MANIFEST} is not a manifest ({type(error).__name__}: {error})"
            raise StorageFault(message) from error

    def verify(self) -> None:
        """Compare every file with the manifest. Raises StorageFault naming each difference."""
        stated = self._stated()
        found = self.digests()
        wrong = [f"{name} is missing" for name in stated if name not in found]
        wrong += [f"{name} has changed" for name in stated if name in found and found[name] != stated[name]]
        wrong += [f"{name} was added" for name in found if name not in stated]
        if wrong:
            message = f"run {self.id} differs from its manifest: {'; '.join(sorted(wrong))}"
            raise StorageFault(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStore:
    """All runs under one folder."""

    root: Path

    def open(self, run_id: str) -> Run:
        """The run's folder, made if it is not there. Raises ValidationFailed (bad id) or StorageFault."""
        run = Run(id=RunId(run_id), folder=self.root / self._checked(run_id))
        try:
            run.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"run folder {run.folder} cannot be made: {error.strerror or error}"
            raise StorageFault(message) from error
        return run

    def find(self, run_id: str) -> Run:
        """An existing run. Raises UnknownName with the newest known ones."""
        folder = self.root / self._checked(run_id)
        if not folder.is_dir():
            raise UnknownName(kind="run", name=run_id, known=self.ids()[-20:])
        return Run(id=RunId(run_id), folder=folder)

    def ids(self) -> list[str]:
        """Ids of all runs, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and not path.name.startswith("."))

    def _checked(self, run_id: str) -> str:
        if RUN_ID.fullmatch(run_id) is None or run_id.startswith("."):
            rule = "a run id has 1 to 200 of A-Z a-z 0-9 _ . ~ : + - and does not start with a point"
            raise ValidationFailed([Violation(table="run", row="", value=repr(run_id), rule=rule)])
        return run_id


def write_whole(path: Path, data: bytes) -> None:
    """Write beside, flush to disk, rename: a reader sees the old bytes or the new ones, never a part.

    Raises OSError; the temporary file is removed then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
