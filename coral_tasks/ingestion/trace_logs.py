"""Request logs that were rotated: one file, all logs of a folder, or those that a pattern names, read as one log.

Owns which files belong to a log, their order, and that no request counts twice. A file that repeats another one, or its
beginning or end (a packed copy, a copy that is still being made, lines that stand in both), counts once, with a note.
Other requests that stand in two files are for the caller to refuse (``twice``): which of them is right is unknown.
Files that are too old to matter are not read. A time of more than an interval between two files, without any request,
is a hole: a file may be missing there.
"""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISDIR
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation
from coral_tasks.domain.names import ModelId
from coral_tasks.ingestion.files import TEMPORARY
from coral_tasks.ingestion.trace_file import RequestLog, first_told, read_log
from data_contracts.files import MAX_BYTES, shown_path

KINDS: Final = (".csv", ".parquet")
"""What the name of a log in a folder holds: requests.csv, requests.csv.1, requests.csv-20261130.gz, part-0.parquet."""

TRIES: Final = 3
"""Readings before it is said that files come and go; a rotation is over in a moment."""

NO_MODEL: Final = "the log has no column `model` and the source names none: whose requests these are is unknown"
TWO_MODELS: Final = "the log has a column `model` and the source names one too: which of them holds is unknown"
_MICRO: Final = 1_000_000


class Wanted(NamedTuple):
    """What of the logs is needed.

    ``span_s``: how long before the last request (or ``now``, if that is earlier). ``interval_s``: longest time without
    a request between two files that is no hole. ``model``, ``model_names``, ``start``: see ``TraceSource``.
    """

    now_s: float
    span_s: float
    interval_s: float
    model: str
    model_names: Mapping[str, ModelId]
    start: datetime | None


class _Listed(NamedTuple):
    """``place``: device and number, the same for a file and a link to it. ``modified_ns``: last change."""

    path: Path
    place: tuple[int, int]
    size: int
    modified_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One file's requests in its own order; ``micros``: times in microseconds since 1970. ``skip``: first ones that
    stand in another file.
    """

    path: Path
    log: RequestLog
    models: NDArray[np.object_]
    micros: NDArray[np.int64]
    skip: int = 0

    @property
    def resolution(self) -> int:
        """Microseconds that all times are whole multiples of: a second, a millisecond or one."""
        return next(unit for unit in (_MICRO, 1000, 1) if not bool((self.micros % unit).any()))

    def equals(self, mine: slice, other: _Part, theirs: slice, unit: int) -> bool:
        """Whether two runs of rows are the same requests, their times taken in whole ``unit``s."""
        return (
            np.array_equal(self.micros[mine] // unit, other.micros[theirs] // unit)
            and np.array_equal(self.log.prompt_tokens[mine], other.log.prompt_tokens[theirs])
            and np.array_equal(self.log.output_tokens[mine], other.log.output_tokens[theirs])
            and bool(np.all(self.models[mine] == other.models[theirs]))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLogs:
    """Requests of all files, file by file in the order of their beginnings: arrays of shape (N,).

    ``file``, ``row``: number of the file in ``names`` and row in it from 0. ``modified_s``: last change of that file.
    ``holes``: end of one file and beginning of the next, in seconds since 1970.
    """

    names: tuple[str, ...]
    at_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    models: NDArray[np.object_]
    file: NDArray[np.int64]
    row: NDArray[np.int64]
    modified_s: NDArray[np.float64]
    holes: tuple[tuple[float, float], ...]
    notes: tuple[str, ...] = field(default=())

    def violation(self, position: int, value: str, rule: str) -> Violation:
        """A broken rule of the request at a position."""
        name = self.names[self.file[position]]
        return Violation(table=name, row=f"row {self.row[position] + 1}", value=value, rule=rule)

    def twice(self, from_s: float) -> list[Violation]:
        """Requests from a moment on that stand in two files: each row of a later file that repeats one of another."""
        mine = np.flatnonzero(self.at_s >= from_s) if len(self.names) > 1 else np.array([], dtype=np.int64)
        codes = np.unique(self.models[mine].astype(str), return_inverse=True)[1]
        keys = (codes, self.output_tokens[mine], self.prompt_tokens[mine], self.at_s[mine])
        # the last key is the first to sort by; positions break ties, so files of equal rows stand in order
        order = np.lexsort((mine, *keys))
        same = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
        place = mine[order]
        found = np.flatnonzero(same & (self.file[place][1:] != self.file[place][:-1]))
        rule = "stands in {} too: a request that two files hold would count twice"
        return [
            self.violation(int(place[k + 1]), str(self.models[place[k + 1]]), rule.format(self._where(int(place[k]))))
            for k in found
        ]

    def _where(self, position: int) -> str:
        return f"{self.names[self.file[position]]}, row {self.row[position] + 1},"


def read_logs(path: Path, wanted: Wanted) -> RequestLogs:
    """Read a log: one file, a folder of them or those that a pattern (``*``, ``?``, ``[…]``) names.

    Raises StorageFault (nothing there, not to be read, rotated again and again) or ValidationFailed (every bad row).
    """
    if not _is_many(path):
        return _joined([_part(path, wanted, name="", maybe_cut=False)], wanted)
    for _ in range(TRIES):
        before = _listed(path)
        try:
            parts = _parts(before, wanted)
        except (StorageFault, ValidationFailed):
            if _is_calm(before, _listed(path)):
                raise
            continue
        if _is_calm(before, _listed(path)):
            return _joined(parts, wanted)
    message = f"{shown_path(path)}: files came, went or became shorter while they were read, {TRIES} times"
    raise StorageFault(message)


def _is_many(path: Path) -> bool:
    return path.is_dir() or (not os.path.lexists(path) and glob.has_magic(str(path)))


def _listed(path: Path) -> list[_Listed]:
    """Files of the log, the one changed last first. Raises StorageFault if there is none."""
    try:
        names = sorted(path.iterdir() if path.is_dir() else _matching(path))
        found: dict[tuple[int, int], _Listed] = {}
        for one in names:
            about = one.stat() if one.exists() else one.lstat()
            if _is_meant(one, is_folder=S_ISDIR(about.st_mode), any_kind=not path.is_dir()):
                file = _Listed(one, (about.st_dev, about.st_ino), about.st_size, about.st_mtime_ns)
                # a link beside the file that it points to is that file
                found.setdefault(file.place, file)
    except OSError as error:
        message = f"{shown_path(path)} cannot be read: {error.strerror or error}"
        raise StorageFault(message) from error
    if not found:
        message = f"{shown_path(path)}: no request log there; demand is unknown, not zero"
        raise StorageFault(message)
    return sorted(found.values(), key=lambda file: (-file.modified_ns, file.path))


def _matching(pattern: Path) -> list[Path]:
    """Files that a pattern names; its folders may hold marks too."""
    # Path.glob needs a folder to start from
    return [Path(one) for one in glob.glob(str(pattern), recursive=True)]  # noqa: PTH207


def _is_meant(path: Path, *, is_folder: bool, any_kind: bool) -> bool:
    """Whether a name is a log's: temporaries are not, nor what a folder holds besides."""
    name = path.name.lower()
    if name.startswith((".", "_")) or name.endswith((*TEMPORARY, "~")):
        return False
    return any(kind in name for kind in KINDS) or (any_kind and not is_folder)


def _is_calm(before: Sequence[_Listed], after: Sequence[_Listed]) -> bool:
    """Whether nothing was renamed, removed, added or made shorter: a rotation moves requests from file to file."""
    sizes = {(file.path, file.place): file.size for file in after}
    there = {(file.path, file.place): file.size for file in before}
    return sizes.keys() == there.keys() and all(sizes[key] >= there[key] for key in there)


def _parts(files: Sequence[_Listed], wanted: Wanted) -> list[_Part]:
    """The files that matter, read from the one changed last on. Raises ValidationFailed with the bad rows of all."""
    paths = {file.path for file in files}
    parts: list[_Part] = []
    bad: list[Violation] = []
    num_bytes = 0
    for file in files:
        if _is_older(file, parts, wanted):
            break
        try:
            part = _part(file.path, wanted, name=shown_path(file.path), maybe_cut=True)
        except ValidationFailed as refused:
            bad += refused.violations
            continue
        _require_original(part, paths)
        parts.append(part)
        num_bytes += part.log.num_bytes
        if num_bytes > MAX_BYTES:
            message = f"{shown_path(file.path)}: the files that are needed hold more than {MAX_BYTES} bytes together"
            raise StorageFault(message)
    if bad:
        raise ValidationFailed(first_told(bad))
    return parts


def _is_older(file: _Listed, parts: Sequence[_Part], wanted: Wanted) -> bool:
    """Whether a file cannot hold a request that matters: it was last changed before the time that does.

    The first such file is read all the same if the others do not reach back so far: it says that the log lived then.
    """
    times = [part.log.at_s for part in parts if len(part.log.at_s)]
    if not times:
        return False
    oldest = min(max(float(one.max()) for one in times), wanted.now_s) - wanted.span_s
    return file.modified_ns / 1e9 < oldest and min(float(one.min()) for one in times) <= oldest


def _require_original(part: _Part, paths: set[Path]) -> None:
    """A packed file that was begun and says nothing yet must be one that is made from a file beside it."""
    if part.log.is_cut and not len(part.micros) and part.path.with_suffix("") not in paths:
        _fail_cut(part)


def _fail_cut(part: _Part) -> None:
    message = f"{shown_path(part.path)} cannot be read: it has no end, and what it holds stands in no other file"
    raise StorageFault(message)


def _part(path: Path, wanted: Wanted, *, name: str, maybe_cut: bool) -> _Part:
    log = read_log(path, start=wanted.start, name=name, maybe_cut=maybe_cut)
    if len(log.at_s) and (log.models is None) != bool(wanted.model):
        rule = NO_MODEL if log.models is None else TWO_MODELS
        raise ValidationFailed([Violation(table=log.name, row="", value=wanted.model, rule=rule)])
    stated = np.full(len(log.at_s), wanted.model, dtype=object) if log.models is None else log.models
    for other in set(stated) & set(wanted.model_names):
        stated = np.where(stated == other, str(wanted.model_names[other]), stated)
    return _Part(path=path, log=log, models=stated, micros=np.rint(log.at_s * _MICRO).astype(np.int64))


def _joined(parts: Sequence[_Part], wanted: Wanted) -> RequestLogs:
    taken: list[_Part] = []
    notes = [_open_note(part, len(parts)) for part in parts if part.log.is_open and not part.log.is_cut]
    # of files that begin at the same time the longest comes first: the others may be copies of it
    full = [part for part in parts if len(part.micros)]
    for part in sorted(full, key=lambda one: (one.micros.min(), one.log.is_cut, -len(one.micros), one.path)):
        rest, said = _without_copied(part, taken)
        notes += said
        taken += [rest] if rest.skip < len(rest.micros) else []
    holes = _holes(taken, wanted.interval_s)
    return RequestLogs(
        names=tuple(part.log.name for part in taken),
        at_s=_all([part.log.at_s[part.skip :] for part in taken], np.float64),
        prompt_tokens=_all([part.log.prompt_tokens[part.skip :] for part in taken], np.int64),
        output_tokens=_all([part.log.output_tokens[part.skip :] for part in taken], np.int64),
        models=_all([part.models[part.skip :] for part in taken], object),
        file=_all([np.full(len(part.micros) - part.skip, k) for k, part in enumerate(taken)], np.int64),
        row=_all([np.arange(part.skip, len(part.micros)) for part in taken], np.int64),
        modified_s=_all([np.full(len(part.micros) - part.skip, part.log.modified_s) for part in taken], np.float64),
        holes=tuple(hole for hole, _ in holes),
        notes=(*notes, *(said for _, said in holes)),
    )


def _all[T: np.generic](arrays: Sequence[NDArray[T]], kind: type) -> NDArray[T]:
    return np.concatenate([np.array([], dtype=kind), *arrays])


def _open_note(part: _Part, num_parts: int) -> str:
    where = f"{part.log.name}: " if num_parts > 1 else ""
    return f"{where}the last line has no end yet: left out"


def _without_copied(part: _Part, taken: Sequence[_Part]) -> tuple[_Part, list[str]]:
    """The part without its first rows that stand in another one, and what is to be said.

    Raises StorageFault for a packed file without an end that is no copy.
    """
    found = [(_repeated(part, other), other) for other in taken]
    count, other = max(found, key=lambda one: one[0], default=(0, part))
    if part.log.is_cut and count < len(part.micros):
        _fail_cut(part)
    if not count:
        return part, []
    share = "all" if count == len(part.micros) else f"the first {count}"
    note = f"{part.log.name}: {share} of its {len(part.micros)} requests stand in {other.log.name} too: counted once"
    rest = _Part(path=part.path, log=part.log, models=part.models, micros=part.micros, skip=count)
    return rest, [note]


def _repeated(part: _Part, other: _Part) -> int:
    """How many of a part's first rows another one holds, in one piece: up to its end, or all of the part."""
    unit = max(part.resolution, other.resolution)
    first = (
        (other.micros // unit == part.micros[0] // unit)
        & (other.log.prompt_tokens == part.log.prompt_tokens[0])
        & (other.log.output_tokens == part.log.output_tokens[0])
        & (other.models == part.models[0])
    )
    for start in np.flatnonzero(first):
        count = min(len(part.micros), len(other.micros) - int(start))
        if part.equals(slice(count), other, slice(start, start + count), unit):
            return count
    return 0


def _holes(parts: Sequence[_Part], longest_s: float) -> list[tuple[tuple[float, float], str]]:
    found = []
    end, before = math.inf, ""
    for part in parts:
        times = part.log.at_s[part.skip :]
        begin = float(times.min())
        if begin - end > longest_s:
            note = (
                f"no request from {utc(end).isoformat()}, where {before} ends, to {utc(begin).isoformat()}, where"
                f" {part.log.name} begins: a file may be missing, and intervals in that time are unknown"
            )
            found.append(((end, begin), note))
        last = float(times.max())
        if math.isinf(end) or last > end:
            end, before = last, part.log.name
    return found


def utc(at_s: float) -> datetime:
    """A moment from seconds since 1970."""
    return datetime.fromtimestamp(at_s, UTC)
