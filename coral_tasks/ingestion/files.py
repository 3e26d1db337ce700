"""Files as sources: one file, a drop folder, an S3 prefix. Owns which file is the newest whole one.

Half-written files are the writer's temporaries: names that start with "." or "_" or end in ".tmp" or ".part" are
passed over. The content is the gate's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from coral_tasks.cloud.aws import aws_call, aws_pages
from coral_tasks.domain.errors import SourceFault
from coral_tasks.ingestion.batch import SourceBatch
from data_contracts.files import MAX_BYTES, NotReadable, read_plain, shown_path

SUFFIXES: Final = (".csv", ".parquet")
TEMPORARY: Final = (".tmp", ".part", ".crdownload")


def is_whole_name(name: str) -> bool:
    """Whether a file of that name is meant to be read."""
    return name.endswith(SUFFIXES) and not name.startswith((".", "_")) and not name.endswith(TEMPORARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """One file; its modification time is its age."""

    table: str
    path: Path

    def __call__(self, now: datetime) -> SourceBatch:
        """Read the file. Raises SourceFault if it is not there or cannot be read."""
        del now
        return _read(self.table, self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSource:
    """Newest file of a drop folder whose name starts with the table's name (``demand*.csv``, ``demand*.parquet``).

    Newest by modification time, then by name. One that cannot be read (a folder, a broken link) is an error: an older
    file in its place would be a silent guess.
    """

    table: str
    folder: Path

    def __call__(self, now: datetime) -> SourceBatch:
        """Read the newest file. Raises SourceFault if there is none."""
        del now
        try:
            names = [path for path in self.folder.iterdir() if self._wanted(path)]
            newest = max(names, key=lambda path: (path.lstat().st_mtime_ns, path.name), default=None)
        except OSError as error:
            message = f"{self.table}: drop folder {shown_path(self.folder)} cannot be read: {error.strerror or error}"
            raise SourceFault(message) from error
        if newest is None:
            message = f"{self.table}: no {self.table}*.csv or {self.table}*.parquet in {shown_path(self.folder)}"
            raise SourceFault(message)
        return _read(self.table, newest)

    def _wanted(self, path: Path) -> bool:
        return path.name.startswith(self.table) and is_whole_name(path.name)


def _read(table: str, path: Path) -> SourceBatch:
    try:
        found = read_plain(path)
    except NotReadable as error:
        message = f"{table}: {shown_path(path)} {error}"
        raise SourceFault(message) from error
    observed = datetime.fromtimestamp(found.modified_s, UTC)
    return SourceBatch(table=table, data=found.data, suffix=path.suffix, source=shown_path(path), observed_at=observed)


@dataclass(frozen=True, slots=True, kw_only=True)
class S3PrefixSource:
    """Newest object under ``prefix`` of an S3 bucket, by modification time, then by key; listed with paging.

    ``client``: a boto3 S3 client with time limits.
    """

    table: str
    bucket: str
    prefix: str
    client: Any

    def __call__(self, now: datetime) -> SourceBatch:
        """Read the newest object. Raises SourceFault if there is none, or if S3 fails or hangs."""
        del now
        newest = max(self._listed(), key=lambda one: (one.modified, one.key), default=None)
        address = f"s3://{self.bucket}/{self.prefix if newest is None else newest.key}"
        if newest is None:
            message = f"{self.table}: no CSV or Parquet object under {address}"
            raise SourceFault(message)
        if newest.size_bytes > MAX_BYTES:
            message = f"{self.table}: {address} is larger than {MAX_BYTES} bytes"
            raise SourceFault(message)
        data = self._content(newest.key)
        if len(data) != newest.size_bytes:
            message = f"{self.table}: {address} came with {len(data)} of {newest.size_bytes} bytes"
            raise SourceFault(message)
        return SourceBatch(
            table=self.table,
            data=data,
            suffix=PurePosixPath(newest.key).suffix,
            source=address,
            observed_at=newest.modified,
        )

    def _content(self, key: str) -> bytes:
        with aws_call(f"{self.table}: s3://{self.bucket}/{key}", SourceFault):
            data: bytes = self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read(MAX_BYTES + 1)
            return data

    def _listed(self) -> Sequence[_Listed]:
        doing = f"{self.table}: s3://{self.bucket}/{self.prefix}"
        listing = {"Bucket": self.bucket, "Prefix": self.prefix}
        pages = aws_pages(self.client, "list_objects_v2", "IsTruncated", doing, SourceFault, **listing)
        with aws_call(doing, SourceFault):
            found = [_listed(one) for page in pages for one in page.get("Contents", [])]
        # a key that ends in "/" is a folder of S3's console
        return [one for one in found if is_whole_name(PurePosixPath(one.key).name) and not one.key.endswith("/")]


class _Listed(NamedTuple):
    key: str
    size_bytes: int
    modified: datetime


def _listed(entry: Mapping[str, Any]) -> _Listed:
    return _Listed(key=entry["Key"], size_bytes=entry["Size"], modified=entry["LastModified"].astimezone(UTC))
