"""CURVE key files and allow-lists in one folder. Owns file names, modes and their check; makes no keys itself.

``<role>-<name>.key``: public and secret key, mode 0600. ``<role>-<name>.pub``: public key. A public key listed as
``<role>-<name>@<n>.pub`` is an older one, still accepted until the rotation is finished. Whoever is not listed here
gets nothing.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed, Violation

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.]*(-[A-Za-z0-9_.]+)*\Z")
# The alphabet of Z85, ZeroMQ's text form of 32 bytes.
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z")


class Role(StrEnum):
    """Which side a key belongs to."""

    CONTROLLER = "controller"
    AGENT = "agent"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair in Z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def secret_path(folder: Path, role: Role, name: str) -> Path:
    """File of the secret key. Raises ValidationFailed for a name that is no file name."""
    return folder / f"{role.value}-{checked_name(name)}.key"


def public_path(folder: Path, role: Role, name: str) -> Path:
    """File of the public key. Raises ValidationFailed for a name that is no file name."""
    return folder / f"{role.value}-{checked_name(name)}.pub"


def checked_name(name: str) -> str:
    """``name`` if it is letters, digits, dots, dashes and underscores, else ValidationFailed."""
    if not _NAME.match(name) or len(name) > 100:
        rule = "a key's name has letters, digits, dots, dashes and underscores only"
        raise ValidationFailed([Violation(table="keys", row="", value=repr(name), rule=rule)])
    return name


def write_key_pair(folder: Path, role: Role, name: str, pair: KeyPair) -> None:
    """Write both files; the secret one is never readable by others, not even for a moment."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(secret_path(folder, role, name), f"{pair.public}\n{pair.secret}\n", 0o600)
    _write(public_path(folder, role, name), f"{pair.public}\n", 0o644)


def _write(path: Path, text: str, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_key_pair(folder: Path, role: Role, name: str) -> KeyPair:
    """The pair of ``name``. Raises UnknownName if absent, StorageFault if malformed or readable by others."""
    path = secret_path(folder, role, name)
    if not path.is_file():
        raise UnknownName(kind=f"{role.value} key", name=name, known=list(list_public_keys(folder, role)))
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise StorageFault(f"{path.name} may be read by others (mode {mode:04o}); chmod 600 it")
    lines = path.read_text(encoding="ascii", errors="replace").split()
    if len(lines) != 2 or not all(_KEY.match(line) for line in lines):
        raise StorageFault(f"{path.name} does not hold a key pair")
    return KeyPair(public=lines[0], secret=lines[1])


def read_public_key(folder: Path, role: Role, name: str) -> str:
    """Public key of ``name``. Raises UnknownName if absent, StorageFault if malformed."""
    path = public_path(folder, role, name)
    if not path.is_file():
        raise UnknownName(kind=f"{role.value} key", name=name, known=list(list_public_keys(folder, role)))
    return _read_public(path)


def _read_public(path: Path) -> str:
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not _KEY.match(text):
        raise StorageFault(f"{path.name} does not hold a public key")
    return text


def list_public_keys(folder: Path, role: Role) -> dict[str, str]:
    """Public keys of one side by name (older ones as ``name@n``): its allow-list. Malformed files are skipped.

    A broken file must not lock the others out; ``coral keys list`` names it.
    """
    found: dict[str, str] = {}
    for path in sorted(folder.glob(f"{role.value}-*.pub")):
        try:
            found[path.stem.removeprefix(f"{role.value}-")] = _read_public(path)
        except (StorageFault, OSError):
            continue
    return found


def keep_old_public_key(folder: Path, role: Role, name: str) -> None:
    """List the present public key as an older one, so that it is still accepted while a rotation runs."""
    present = public_path(folder, role, name)
    number = 1 + max((_number(path) for path in folder.glob(f"{role.value}-{name}@*.pub")), default=0)
    _write(folder / f"{role.value}-{name}@{number}.pub", f"{_read_public(present)}\n", 0o644)


def drop_old_public_keys(folder: Path, role: Role, name: str) -> int:
    """End a rotation: older keys of ``name`` are no longer accepted. Returns how many went."""
    old = list(folder.glob(f"{role.value}-{checked_name(name)}@*.pub"))
    for path in old:
        path.unlink()
    return len(old)


def _number(path: Path) -> int:
    tail = path.stem.rpartition("@")[2]
    return int(tail) if tail.isdigit() else 0
