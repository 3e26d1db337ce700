"""Quarantine: refused batches with their reports, and the releases that people signed.

Owns the folder ``quarantine/<batch id>/`` (batch, report.json, report.html, origin.json, release.json, used-*.json). A
batch's id is table and hash of its bytes: the same bad batch is kept once. A release counts for one run. Nothing is
ever deleted here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed, Violation
from coral_tasks.storage.runs import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """All refused batches under one folder."""

    root: Path

    def keep(
        self,
        *,
        table: str,
        data: bytes,
        suffix: str,
        report: Mapping[str, Any],
        page: str,
        origin: Mapping[str, Any],
    ) -> str:
        """Keep a batch with its report; its id. Raises StorageFault."""
        name = f"{table}-{_digest(data)}"
        folder = self.root / name
        files = {
            f"batch{suffix}": data,
            "report.json": _json(report),
            "report.html": page.encode(),
            "origin.json": _json(origin),
        }
        try:
            for file, content in files.items():
                write_whole(folder / file, content)
        except OSError as error:
            message = f"quarantine {folder}: {error.strerror or error}"
            raise StorageFault(message) from error
        return name

    def ids(self) -> list[str]:
        """Ids of all kept batches, sorted."""
        if not self.root.is_dir():
            return []
        return sorted(path.name for path in self.root.iterdir() if (path / "report.json").is_file())

    def report(self, batch: str) -> dict[str, Any]:
        """Report of a batch. Raises UnknownName or StorageFault."""
        return self._read(batch, "report.json")

    def origin(self, batch: str) -> dict[str, Any]:
        """Run and source that a batch came from. Raises UnknownName or StorageFault."""
        return self._read(batch, "origin.json")

    def folder(self, batch: str) -> Path:
        """Folder of a batch. Raises UnknownName with the known ones."""
        if batch not in self.ids():
            raise UnknownName(kind="quarantined batch", name=batch, known=self.ids())
        return self.root / batch

    def release(self, batch: str, *, by: str, reason: str, at: datetime) -> Path:
        """Sign a batch's release: the next run that meets these very bytes lets them in, once, with warnings.

        Raises UnknownName, or ValidationFailed if nobody and nothing is named or the report says that no judgement
        can let it in (unreadable, missing, not a number).
        """
        folder, report = self.folder(batch), self.report(batch)
        bad = [] if report["releasable"] else [_not_releasable(one) for one in report["findings"] if _blocks(one)]
        bad += [
            Violation(table="release", row=batch, value=repr(text), rule=f"a release needs {name}")
            for name, text in (("a name (--by)", by), ("a reason (--reason)", reason))
            if not text.strip()
        ]
        if bad:
            raise ValidationFailed(bad)
        write_whole(folder / "release.json", _json({"by": by, "reason": reason, "at": at.isoformat()}))
        return folder / "release.json"

    def release_of(self, data: bytes) -> dict[str, Any] | None:
        """The signed release of these bytes, None if there is none: by, reason, at, batch, used_by (a run or "")."""
        digest = _digest(data)
        for batch in self.ids():
            if batch.endswith(f"-{digest}") and (self.root / batch / "release.json").is_file():
                return {**self._read(batch, "release.json"), "batch": batch, "used_by": self.used_by(batch)}
        return None

    def state(self, batch: str) -> str:
        """In words: "", "by ann", or "by ann, used by run r3". Raises UnknownName or StorageFault."""
        if not (self.folder(batch) / "release.json").is_file():
            return ""
        used = self.used_by(batch)
        return f"by {self._read(batch, 'release.json')['by']}" + (f", used by run {used}" if used else "")

    def used_by(self, batch: str) -> str:
        """Run that planned on the release in force, "" if none did. Raises UnknownName or StorageFault."""
        mark = self._mark(batch)
        return str(self._read(batch, mark.name)["run"]) if mark.is_file() else ""

    def use(self, batch: str, run: str) -> None:
        """Note that ``run`` takes the release in force; again for the same run is fine.

        Raises StorageFault if another run took it before.
        """
        mark = self._mark(batch)
        try:
            with mark.open("xb") as file:
                file.write(_json({"run": run}))
        except FileExistsError as error:
            if self.used_by(batch) != run:
                message = f"the release of {batch} was used by run {self.used_by(batch)} before"
                raise StorageFault(message) from error
        except OSError as error:
            message = f"{mark}: {error.strerror or error}"
            raise StorageFault(message) from error

    def _mark(self, batch: str) -> Path:
        """File that says who used the release in force; a new release has a new one."""
        signed = self.folder(batch) / "release.json"
        try:
            return signed.with_name(f"used-{_digest(signed.read_bytes())}.json")
        except FileNotFoundError:
            return signed.with_name("used-none.json")
        except OSError as error:
            message = f"{signed} cannot be read: {error.strerror or error}"
            raise StorageFault(message) from error

    def _read(self, batch: str, file: str) -> dict[str, Any]:
        path = self.folder(batch) / file
        try:
            content: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            message = f"{path} cannot be read: {error}"
            raise StorageFault(message) from error
        return content


def _blocks(finding: Mapping[str, Any]) -> bool:
    return finding["severity"] == "critical" and not finding["releasable"]


def _not_releasable(finding: Mapping[str, Any]) -> Violation:
    rule = f"{finding['text']}: no release can overrule this"
    return Violation(table=finding["table"], row=finding["row"], value=finding["value"], rule=rule)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, sort_keys=True, indent=1, default=str) + "\n").encode()
