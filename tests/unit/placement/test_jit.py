"""Compiled code is cached where it can be written, and the package works where its own folder cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coral_tasks.placement.jit import cache_folder

PROGRAM = """
import numpy as np
from coral_tasks.domain.names import LatencySplit
from coral_tasks.placement.combinations import build_tree
from coral_tasks.placement.search import solve_tree
tree = build_tree(max_nodes=1, num_configurations=1)
print(solve_tree(np.ones((1, 1, 1)), tree, LatencySplit.EQUAL).throughput.tolist())
"""


def test_beside_the_source_is_numbas_own_choice(tmp_path: Path) -> None:
    """Where the package's folder can be written nothing is set."""
    assert cache_folder(tmp_path) is None


def test_without_a_writable_package_the_home_cache_is_taken(tmp_path: Path, monkeypatch) -> None:
    """A package folder that cannot be written (here: it is a file) leads to the user's cache folder."""
    (tmp_path / "package").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder(tmp_path / "package") == tmp_path / "cache" / "coral" / "numba"


def test_without_a_home_the_temporary_folder_is_taken(tmp_path: Path, monkeypatch) -> None:
    """Where neither can be written, a folder of this user under the temporary folder is taken."""
    (tmp_path / "package").write_text("no folder")
    (tmp_path / "home").write_text("no folder either")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    found = cache_folder(tmp_path / "package")
    assert found is not None
    assert found.name == f"coral-numba-{os.getuid()}"


@pytest.mark.integration
def test_numba_cache_dir_is_obeyed_without_warnings(tmp_path: Path) -> None:
    """With NUMBA_CACHE_DIR set the compiled code lies there, and nothing is written to standard error."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba"), "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.stdout == "[0.0, 1.0]\n", done.stderr
    assert done.stderr == ""
    assert list((tmp_path / "numba").rglob("*.nbi"))
