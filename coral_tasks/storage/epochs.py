"""Epochs from an object store: the counter that controllers on several machines share. See ``dispatch.epochs``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from coral_tasks.domain.errors import StaleInput, StorageFault
from coral_tasks.storage.objects import ObjectStore

_KEY: Final = "epochs.json"
_TRIES: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEpochs:
    """Counter in one object, moved on by conditional writes only."""

    store: ObjectStore

    def newest(self) -> tuple[int, str]:
        """The newest epoch given out and for what; (0, "") if there was none. Raises StorageFault."""
        found = self.store.get_with_token(_KEY)
        return (0, "") if found is None else (self._newest(found[0]), str(json.loads(found[0]).get("plan", "")))

    def next_epoch(self, plan: str, *, at_least: int = 0, expected: int | None = None) -> int:
        """A number above all given out before and above ``at_least``. Raises StorageFault.

        ``expected``: the newest epoch as the caller saw it; StaleInput if another one was taken since.
        """
        for _ in range(_TRIES):
            found = self.store.get_with_token(_KEY)
            newest = 0 if found is None else self._newest(found[0])
            if expected is not None and newest != expected:
                message = f"epoch {newest} was taken since epoch {expected} was seen to be the newest"
                raise StaleInput(message)
            epoch = max(newest, at_least) + 1
            data = json.dumps({"epoch": epoch, "plan": plan}).encode()
            if self.store.put_if(_KEY, data, None if found is None else found[1]):
                return epoch
        message = f"no epoch to be had from {self.store.address}: {_TRIES} times another controller was quicker"
        raise StorageFault(message)

    def _newest(self, data: bytes) -> int:
        """Raises StorageFault for content that is no counter: starting again at 1 would lock every controller out."""
        try:
            epoch = json.loads(data)["epoch"]
        except (ValueError, TypeError, KeyError) as error:
            message = f"{_KEY} in {self.store.address} is no epoch counter: {error}"
            raise StorageFault(message) from error
        if not isinstance(epoch, int) or epoch < 0:
            message = f"{_KEY} in {self.store.address} is no epoch counter: {epoch!r}"
            raise StorageFault(message)
        return epoch
