"""A cache around a source: fewer calls, and the last answer when the source is down, with its true age.

Owns the cache folder (one batch and its record for each name). It never makes an answer look newer than it is: the
gate's staleness rule decides whether an old answer may still be planned on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from coral_tasks.domain.errors import SourceFault
from coral_tasks.ingestion.batch import Source, SourceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSource:
    """``fresh_s``: answers up to this age are used without asking. ``keep_s``: up to this age when asking fails."""

    source: Source
    folder: Path
    name: str
    fresh_s: float
    keep_s: float

    def __call__(self, now: datetime) -> SourceBatch:
        """A kept answer that is fresh, else a new one, else a kept one that is not too old. Raises SourceFault."""
        kept = self._kept()
        # an answer from the future means that a clock stepped back: it is not trusted to be fresh
        if kept is not None and 0 <= kept.age_s(now) <= self.fresh_s:
            return replace(kept, notes=(*kept.notes, f"from the cache, {kept.age_s(now):.0f} s old"))
        try:
            batch = self.source(now)
        except SourceFault as fault:
            if kept is None or not 0 <= kept.age_s(now) <= self.keep_s:
                raise
            note = f"source failed ({fault}); answer of {kept.age_s(now):.0f} s ago used"
            return replace(kept, notes=(*kept.notes, note))
        self._keep(batch)
        return batch

    def _kept(self) -> SourceBatch | None:
        record, data = self.folder / f"{self.name}.json", self.folder / f"{self.name}.batch"
        try:
            about = json.loads(record.read_text(encoding="utf-8"))
            about["observed_at"] = datetime.fromisoformat(about["observed_at"])
            about["notes"] = tuple(about["notes"])
            batch = SourceBatch(**about, data=data.read_bytes())
        except (OSError, ValueError, TypeError, KeyError):
            # no cache, or half of one: the source is asked
            return None
        return batch if batch.observed_at.tzinfo is not None else None

    def _keep(self, batch: SourceBatch) -> None:
        about = {
            "table": batch.table,
            "suffix": batch.suffix,
            "source": batch.source,
            "observed_at": batch.observed_at.isoformat(),
            "expected": batch.expected,
            "received": batch.received,
            "notes": list(batch.notes),
        }
        record = self.folder / f"{self.name}.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # without a record the data counts as absent, so the record goes first and comes back last
            record.unlink(missing_ok=True)
            (self.folder / f"{self.name}.batch").write_bytes(batch.data)
            temporary = record.with_suffix(".tmp")
            temporary.write_text(json.dumps(about), encoding="utf-8")
            temporary.replace(record)
        except OSError as error:
            message = f"{batch.table}: the cache {self.folder} cannot be written: {error.strerror or error}"
            raise SourceFault(message) from error
