"""JSON that a person wrote, as a dataclass: a name that nobody knows is a mistake, not something to pass over.

Owns that rule for files of options; what a file of ours, such as a plan of a newer version, may hold is not its matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from coral_tasks.domain.errors import ValidationFailed, Violation


def decode_strictly[Kind](data: bytes, kind: type[Kind], source: str) -> Kind:
    """``data`` as ``kind``.

    Raises msgspec.DecodeError for what is no JSON or of another type, ValidationFailed with every unknown name.
    """
    found = msgspec.json.decode(data, type=kind)
    unknown = list(_unknown(json.loads(data), msgspec.to_builtins(found), ""))
    if unknown:
        rule = "unknown name: it would be passed over"
        raise ValidationFailed(Violation(table=source, row=name, value="", rule=rule) for name in unknown)
    return found


def _unknown(given: object, read: object, at: str) -> Iterator[str]:
    """Names in ``given``, at any depth, that did not come to be part of what was read."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            place = f"{at}.{name}" if at else str(name)
            if name in read:
                yield from _unknown(value, read[name], place)
            else:
                yield place
    elif isinstance(given, list) and isinstance(read, list | tuple):
        for number, (value, other) in enumerate(zip(given, read, strict=True)):
            yield from _unknown(value, other, f"{at}[{number}]")
