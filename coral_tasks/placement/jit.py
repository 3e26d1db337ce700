"""Compilation of the search kernels by numba, cached on disk. Owns where the cache lies, and nothing of the search.

numba caches beside the source. Where that cannot be written (a package in a read-only image) the user's cache
folder is taken, and without a home a folder of this user under the system's temporary folder, so that neither
import nor the first call fails. ``NUMBA_CACHE_DIR`` overrides all of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numba
from numba.core import config as _numba_config


def _writable(folder: Path) -> bool:
    """Whether a file can really be made there; permission bits alone mislead for root and read-only mounts."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def cache_folder(package: Path) -> Path | None:
    """Folder for compiled code, None for numba's own choice beside the source in ``package``."""
    if _writable(package / "__pycache__"):
        return None
    home_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "coral" / "numba"
    if _writable(home_cache):
        return home_cache
    return Path(tempfile.gettempdir()) / f"coral-numba-{os.getuid()}"


config: Any = _numba_config
if not config.CACHE_DIR:
    chosen = cache_folder(Path(__file__).parent)
    if chosen is not None:
        config.CACHE_DIR = str(chosen)


def compiled[Function: Callable[..., object]](function: Function) -> Function:
    """Compile on first call, keep the machine code on disk. No fast-math: sums stay exactly as written."""
    return cast("Function", numba.njit(cache=True, nogil=True, error_model="numpy")(function))
