"""Named byte objects in a folder or in an S3 bucket, with atomic and conditional writes.

Owns atomicity: a reader sees the old bytes or the new ones, never half; ``put_if`` writes only over the state that
the caller saw. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final

from coral_tasks.cloud.aws import aws_call, aws_pages, make_client
from coral_tasks.domain.errors import StorageFault

TEMPORARY_PREFIX: Final = ".tmp-"
"""Names of files being written; listings leave them out."""

LOCK_NAME: Final = ".lock"

MOST_TRIES: Final = 100
"""Tries to make a file in a folder that others remove, before what goes wrong counts."""

S3_READ_S: Final = 60.0
"""Longest silence of S3: a library's files are large, and S3 answers a put only when it has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object. ``modified``: UTC. ``token``: its state, "" where the listing does not say."""

    key: str
    size_bytes: int
    modified: datetime
    token: str = ""


class ObjectStore(ABC):
    """Objects by key (relative path with ``/``). Every method raises StorageFault if the store fails."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where it is, for messages."""

    @abstractmethod
    def get_with_token(self, key: str) -> tuple[bytes, str] | None:
        """Bytes and a token that names this state of the object; None if there is none."""

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Write or replace."""

    @abstractmethod
    def put_if(self, key: str, data: bytes, token: str | None) -> bool:
        """Write only if the object is still in the state of ``token`` (None: absent). False if it is not."""

    @abstractmethod
    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        """Objects whose key starts with ``prefix``, sorted by key."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove; an absent object is no error."""

    def get(self, key: str) -> bytes | None:
        """Bytes of an object, None if there is none."""
        found = self.get_with_token(key)
        return None if found is None else found[0]

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        return any(info.key == key for info in self.list(key))


def _check_key(key: str) -> None:
    parts = PurePosixPath(key).parts
    if not parts or key.startswith("/") or ".." in parts:
        message = f"not a key inside the store: {key!r}"
        raise StorageFault(message)


class FolderStore(ObjectStore):
    """Objects as files of a local (or shared) folder. Writes go to a temporary name and are renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def address(self) -> str:
        """The folder."""
        return str(self._root)

    def _path(self, key: str) -> Path:
        _check_key(key)
        return self._root / key

    def get_with_token(self, key: str) -> tuple[bytes, str] | None:
        """Bytes and their hash."""
        try:
            data = self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _fault(f"cannot read {key} in {self.address}", error) from error
        return data, hashlib.sha256(data).hexdigest()

    def put(self, key: str, data: bytes) -> None:
        """Write to a temporary file beside the target, flush it to disk, rename."""
        path = self._path(key)
        try:
            handle, name = _temporary_file(path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).chmod(0o644)
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise _fault(f"cannot write {key} in {self.address}", error) from error

    def put_if(self, key: str, data: bytes, token: str | None) -> bool:
        """Compare and write under the folder's lock."""
        with self._lock():
            found = self.get_with_token(key)
            if (None if found is None else found[1]) != token:
                return False
            self.put(key, data)
            return True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._root / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _fault(f"cannot lock {self.address}", error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        """Walk the folder part of the prefix."""
        base = self._root / PurePosixPath(prefix + "x").parent
        found = []
        try:
            for path in _files_below(base):
                key = path.relative_to(self._root).as_posix()
                if key.startswith(prefix) and not path.name.startswith((TEMPORARY_PREFIX, LOCK_NAME)):
                    with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                        status = path.stat()
                        modified = datetime.fromtimestamp(status.st_mtime, UTC)
                        found.append(ObjectInfo(key=key, size_bytes=status.st_size, modified=modified))
        except OSError as error:
            raise _fault(f"cannot list {prefix} in {self.address}", error) from error
        return tuple(sorted(found, key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Remove the file and folders left empty."""
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            for parent in list(path.relative_to(self._root).parents)[:-1]:
                if not _remove_if_empty(self._root / parent):
                    break
        except OSError as error:
            raise _fault(f"cannot delete {key} in {self.address}", error) from error


def _temporary_file(folder: Path) -> tuple[int, str]:
    """A new file in a folder that is made; another process's ``delete`` may remove it, still empty, in between."""
    for _ in range(MOST_TRIES):
        # that it exists is said too when it was gone again before it was seen to be a folder
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
            return tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=folder)
    folder.mkdir(parents=True, exist_ok=True)
    return tempfile.mkstemp(prefix=TEMPORARY_PREFIX, dir=folder)


def _remove_if_empty(folder: Path) -> bool:
    """Whether the folder is gone afterwards; that another process removed or filled it meanwhile is no fault."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _files_below(folder: Path) -> Iterator[Path]:
    """Every file, none where there is no folder; what goes meanwhile is passed over, the unreadable raises OSError."""

    def unless_gone(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    for place, _, names in os.walk(folder, onerror=unless_gone):
        yield from (path for name in names if (path := Path(place, name)).is_file())


class S3Store(ObjectStore):
    """Objects under a prefix of an S3 bucket; conditional puts carry the pointer (If-Match, If-None-Match)."""

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client, self._bucket = client, bucket
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    @property
    def address(self) -> str:
        """``s3://bucket/prefix``."""
        return f"s3://{self._bucket}/{self._prefix}"

    def _name(self, key: str) -> str:
        _check_key(key)
        return self._prefix + key

    def get_with_token(self, key: str) -> tuple[bytes, str] | None:
        """Bytes and their ETag."""
        with self._call(f"cannot read {key}", quiet=("NoSuchKey", "404")):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
            return answer["Body"].read(), answer["ETag"]
        return None

    def put(self, key: str, data: bytes) -> None:
        """One request: S3 replaces objects atomically."""
        with self._call(f"cannot write {key}"):
            self._put(key, data)

    def put_if(self, key: str, data: bytes, token: str | None) -> bool:
        """Conditional put; false where S3 says that the condition failed or another write is under way."""
        condition = {"IfNoneMatch": "*"} if token is None else {"IfMatch": token}
        lost = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409", "NoSuchKey", "404")
        with self._call(f"cannot write {key}", quiet=lost):
            self._put(key, data, **condition)
            return True
        return False

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        answer = self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=data, **condition)
        # S3 names the state that it wrote; an answer without one is somebody else's, and nothing may be written
        if not answer.get("ETag"):
            message = f"cannot write {key} in {self.address}: the answer names no ETag"
            raise StorageFault(message)

    def list(self, prefix: str) -> tuple[ObjectInfo, ...]:
        """All pages of the listing."""
        doing = f"cannot list {prefix} in {self.address}"
        listing = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        pages = aws_pages(self._client, "list_objects_v2", "IsTruncated", doing, StorageFault, **listing)
        with aws_call(doing, StorageFault):
            found = [self._info(entry) for page in pages for entry in page.get("Contents", ())]
        return tuple(sorted(found, key=lambda info: info.key))

    def _info(self, entry: Any) -> ObjectInfo:
        key = str(entry["Key"])[len(self._prefix) :]
        modified, token = entry["LastModified"].astimezone(UTC), str(entry.get("ETag", ""))
        return ObjectInfo(key=key, size_bytes=int(entry["Size"]), modified=modified, token=token)

    def delete(self, key: str) -> None:
        """One request."""
        with self._call(f"cannot delete {key}"):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def _call(self, doing: str, quiet: tuple[str, ...] = ()) -> AbstractContextManager[None]:
        return aws_call(f"{doing} in {self.address}", StorageFault, quiet=quiet)


def _fault(what: str, error: Exception) -> StorageFault:
    return StorageFault(f"{what}: {error}")


def open_store(address: str | Path) -> ObjectStore:
    """Store at a folder path or ``s3://bucket/prefix``. S3 takes credentials, region and endpoint from boto3's
    usual settings (``AWS_ENDPOINT_URL_S3`` for a local server). Raises StorageFault for an address of neither kind,
    or settings that make no client.
    """
    text = str(address)
    if text.startswith("s3://"):
        bucket, _, prefix = text.removeprefix("s3://").partition("/")
        if not bucket:
            message = f"no bucket in {text!r}"
            raise StorageFault(message)
        return S3Store(make_client("s3", None, StorageFault, read_s=S3_READ_S), bucket, prefix)
    if "://" in text:
        message = f"no store for {text!r}: give a folder or s3://bucket/prefix"
        raise StorageFault(message)
    if not text.strip():
        message = "no address of a store: give a folder or s3://bucket/prefix"
        raise StorageFault(message)
    return FolderStore(Path(text))
