"""A folder of this machine and its copy in an object store, brought together before and after a piece of work.

Owns what is copied which way. The store wins when work begins: a file that differs here is debris of work that was
killed before it could hand over. When work ends, what it changed goes to the store, each object only over the state
that the work began with. Knows nothing of what the files mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from coral_tasks.domain.errors import StorageFault
from coral_tasks.storage.objects import ObjectInfo, ObjectStore
from coral_tasks.storage.runs import write_whole

_AT_ONCE: Final = 8
"""Requests to the store at the same time; most objects are small, so the time is that of the round trips."""

_SHIPPED_LAST: Final = frozenset({"manifest.json", "plan.json"})
"""Who sees one of these finds everything that it speaks of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Both sides as work began. ``tokens``: state of each object; ``digests``: of each file here."""

    tokens: Mapping[str, str]
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    """``folder`` and ``store`` have the same names in them."""

    store: ObjectStore
    folder: Path

    def pull(self, prefixes: Iterable[str], *, keep_newer: bool = False, strays: bool = False) -> Seen:
        """Bring every object under the prefixes here, as far as it is not here yet; raises StorageFault.

        ``keep_newer``: files here that changed after their object stay, for onlookers beside live work. ``strays``:
        files here that the store lacks count as new, so that ``push`` hands over what killed work had finished.
        """
        listed = [
            info
            for prefix in prefixes
            for info in self.store.list(prefix)
            if _is_whole(info.key) and not (keep_newer and self._is_newer(info))
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = dict(zip((info.key for info in listed), pool.map(self._fetch, listed), strict=True))
        present = {key: token for key, token in found.items() if token}
        names = [key for key in self._names(prefixes) if key in present or not strays]
        return Seen(tokens=present, digests={key: self._digest(key) for key in names})

    def _is_newer(self, info: ObjectInfo) -> bool:
        try:
            return (self.folder / info.key).stat().st_mtime > info.modified.timestamp()
        except OSError:
            return False

    def _fetch(self, info: ObjectInfo) -> str:
        """Token of the object as it is here now; "" if it went away meanwhile."""
        path = self.folder / info.key
        # S3's token of a plainly encrypted object is its MD5; others are fetched again, which is right too
        if info.token and path.is_file() and info.token == f'"{self._digest(info.key)}"':
            return info.token
        got = self.store.get_with_token(info.key)
        if got is None:
            return ""
        data, token = got
        try:
            write_whole(path, data)
        except OSError as error:
            message = f"{path} cannot be written: {error.strerror or error}"
            raise StorageFault(message) from error
        return token

    def push(self, prefixes: Iterable[str], seen: Seen) -> tuple[str, ...]:
        """Write what changed here since ``seen``; names of it.

        Raises StorageFault, after everything else was written, for objects that somebody else changed meanwhile to
        something else: the work has to be done again on the new state.
        """
        changed = [key for key in self._names(prefixes) if self._digest(key) != seen.digests.get(key)]
        early = [key for key in changed if PurePosixPath(key).name not in _SHIPPED_LAST]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            shipped = zip(early, pool.map(lambda key: self._ship(key, seen), early), strict=True)
            lost = [key for key, good in shipped if not good]
        lost += [key for key in changed if key not in early and not lost and not self._ship(key, seen)]
        if lost:
            message = f"changed elsewhere since this work began: {', '.join(sorted(lost))} in {self.store.address}"
            raise StorageFault(message)
        return tuple(changed)

    def _ship(self, key: str, seen: Seen) -> bool:
        data = self._read(key)
        if self.store.put_if(key, data, seen.tokens.get(key)):
            return True
        return self.store.get(key) == data

    def _names(self, prefixes: Iterable[str]) -> list[str]:
        """Whole files under the prefixes, each of which names a folder."""
        found = [path for prefix in prefixes for path in (self.folder / prefix).rglob("*") if path.is_file()]
        names = {path.relative_to(self.folder).as_posix() for path in found}
        return sorted(name for name in names if _is_whole(name))

    def _digest(self, key: str) -> str:
        return hashlib.md5(self._read(key), usedforsecurity=False).hexdigest()

    def _read(self, key: str) -> bytes:
        try:
            return (self.folder / key).read_bytes()
        except OSError as error:
            message = f"{self.folder / key} cannot be read: {error.strerror or error}"
            raise StorageFault(message) from error


def _is_whole(key: str) -> bool:
    """Not a file that is being written, a lock or a database: names that begin with a point, and SQLite's."""
    return not any(part.startswith(".") for part in PurePosixPath(key).parts) and ".sqlite" not in key
