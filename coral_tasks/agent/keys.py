"""Making and rotating CURVE keys. Owns the moment a key is made; files are ``protocol.keyfiles``' matter."""

from __future__ import annotations

from pathlib import Path

import zmq

from coral_tasks.domain.errors import ExpectedOutcome
from coral_tasks.protocol.keyfiles import (
    KeyPair,
    Role,
    drop_old_public_keys,
    keep_old_public_key,
    read_key_pair,
    secret_path,
    write_key_pair,
)


class KeyExists(ExpectedOutcome):
    """A key of that name is there already; rotate it instead."""


def new_key_pair() -> KeyPair:
    """A fresh CURVE pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def make_key_pair(folder: Path, role: Role, name: str) -> KeyPair:
    """Make a pair and write its files. Raises KeyExists if there is one."""
    if secret_path(folder, role, name).exists():
        raise KeyExists(f"{role.value} {name} has a key already; use rotate")
    pair = new_key_pair()
    write_key_pair(folder, role, name, pair)
    return pair


def rotate_key_pair(folder: Path, role: Role, name: str) -> KeyPair:
    """Replace a pair; the old public key stays accepted until ``finish_rotation``."""
    read_key_pair(folder, role, name)
    keep_old_public_key(folder, role, name)
    pair = new_key_pair()
    write_key_pair(folder, role, name, pair)
    return pair


def finish_rotation(folder: Path, role: Role, name: str) -> int:
    """Stop accepting older keys of ``name``. Returns how many went."""
    return drop_old_public_keys(folder, role, name)
