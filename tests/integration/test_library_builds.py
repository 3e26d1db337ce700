"""Builds of the template library in processes of their own: killed in the middle, and two at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coral_tasks.storage.library import current_manifest
from coral_tasks.storage.objects import open_store
from coral_tasks.tasks.library import verify_library

pytestmark = pytest.mark.integration

# Six sets of 12 single nodes and 78 pairs: 1 + 4 chunks each. Ends itself without warning after so many chunks.
BUILD = """
import os, signal, sys
from coral_tasks.storage.chunks import StoredChunks
from coral_tasks.tasks import library
from coral_tasks.templates import pool

pool.CHUNK_SIZE = 20
keep, kept = StoredChunks.save, []

def keep_and_count(self, *chunk):
    keep(self, *chunk)
    kept.append(chunk[:3])
    if len(kept) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

StoredChunks.save = keep_and_count
tables, options = library.profile_tables("core"), library.default_options(max_nodes=2, memory_ratio=None)
library.build_library(sys.argv[1], tables, options, publication=library.Publication())
print(len(kept))
"""
NUM_CHUNKS = 6 * 5


def start(address: Path, *, kill_after: int = 0) -> subprocess.Popen[str]:
    """A build in a process of its own; it prints how many chunks it solved."""
    words = [sys.executable, "-c", BUILD, str(address), str(kill_after)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(build: subprocess.Popen[str]) -> int:
    """The chunks it solved."""
    out, err = build.communicate(timeout=100)
    assert build.returncode == 0, err
    return int(out)


def files(folder: Path) -> dict[str, bytes]:
    """Every file of the versions of a library; the pointer holds times and is left out."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("versions/**/*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, bytes]:
    """Files of a build that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert end(start(folder)) == NUM_CHUNKS
    assert len(files(folder)) >= 7
    return files(folder)


def test_a_killed_build_loses_only_the_chunk_in_work(undisturbed, tmp_path: Path) -> None:
    """Killed after 13 chunks there is no version; the rerun solves the other 17 and writes the very same files."""
    killed = start(tmp_path, kill_after=13)
    killed.communicate(timeout=100)
    assert killed.returncode == -signal.SIGKILL
    assert current_manifest(open_store(str(tmp_path))) is None
    assert end(start(tmp_path)) == NUM_CHUNKS - 13
    assert files(tmp_path) == undisturbed
    assert verify_library(str(tmp_path)) == ()


def test_two_builds_at_once_do_not_harm_each_other(undisturbed, tmp_path: Path) -> None:
    """Both end well, and the library is the one that either would have built alone."""
    both = [start(tmp_path), start(tmp_path)]
    assert all(end(build) <= NUM_CHUNKS for build in both)
    assert files(tmp_path) == undisturbed
    assert verify_library(str(tmp_path)) == ()
