"""Finished chunks of unfinished template sets, so that an interrupted build goes on where it stopped.

Owns their names and bytes; a damaged chunk counts as absent.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from coral_tasks.storage.library import WORK
from coral_tasks.storage.objects import ObjectStore


class StoredChunks:
    """Chunks as arrays by name, under ``work/<key>/``."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def load(self, key: str, first: int, last: int) -> dict[str, NDArray[np.generic]] | None:
        """Arrays of a kept chunk; None if it is absent or damaged."""
        data = self._store.get(_name(key, first, last))
        if data is None:
            return None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile):
            return None

    def save(self, key: str, first: int, last: int, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Keep a finished chunk."""
        sink = io.BytesIO()
        np.savez(sink, allow_pickle=False, **dict(arrays))
        self._store.put(_name(key, first, last), sink.getvalue())

    def forget(self, key: str) -> None:
        """Delete all chunks of a finished set."""
        for info in self._store.list(f"{WORK}{key}/"):
            self._store.delete(info.key)


def _name(key: str, first: int, last: int) -> str:
    return f"{WORK}{key}/{first}-{last}.npz"
