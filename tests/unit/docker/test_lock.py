"""The lock: exact versions, no addresses, all that pyproject.toml asks for, and what is installed fits together.

What works without a network. Known vulnerabilities need one: docs/security.md says how they are looked up.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from coral_tasks.tasks.local_airflow import PROJECT

LOCKS = ("requirements.lock", "requirements-vllm.lock")
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LEFT_OUT = {"vllm"}
"""Extras with an environment of their own."""


def _lines(name: str) -> list[str]:
    text = (PROJECT / "docker" / name).read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _pinned() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in _lines("requirements.lock"):
        one = Requirement(line)
        found.setdefault(canonicalize_name(one.name), []).append(one)
    return found


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


@pytest.mark.parametrize("name", LOCKS)
def test_every_line_is_an_exact_version_and_no_address(name) -> None:
    """Nothing floats, and no line names a host, a path or a repository from which code would come."""
    for line in _lines(name):
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!_-]+( ?; .+)?", line), line
        assert "://" not in line, line
        assert "@" not in line, line


def test_the_lock_holds_what_the_project_asks_for() -> None:
    """Each requirement of each extra is pinned within its bounds: the lock is not older than pyproject.toml."""
    pinned = _pinned()
    extras = PYPROJECT["optional-dependencies"]
    wanted = [
        *PYPROJECT["dependencies"],
        *(line for name, part in extras.items() if name not in LEFT_OUT for line in part),
    ]
    for line in wanted:
        requirement = Requirement(line)
        pins = [one for one in pinned.get(canonicalize_name(requirement.name), []) if _applies(one)]
        assert pins, f"{line} is not in the lock: make lock"
        for pin in pins:
            (exact,) = pin.specifier
            assert requirement.specifier.contains(exact.version, prereleases=True), f"{line}, but the lock has {pin}"


def test_one_version_of_each_package_applies_here() -> None:
    """Two lines for one package are for different Pythons, never both for this one."""
    for name, pins in _pinned().items():
        assert sum(_applies(pin) for pin in pins) <= 1, name


def test_what_is_installed_is_what_is_locked() -> None:
    """A package that came in beside the lock would be missing, or of another version, elsewhere."""
    installed = {canonicalize_name(one.name): one.version for one in importlib.metadata.distributions()}
    other = {
        name: (version, str(pin))
        for name, pins in _pinned().items()
        for pin in pins
        if _applies(pin) and (version := installed.get(name)) is not None
        for exact in pin.specifier
        if Version(exact.version) != Version(version)
    }
    assert other == {}


def test_installed_packages_agree_with_each_other() -> None:
    """What `pip check` looks for: every requirement of every locked package is met."""
    pinned = _pinned()
    installed = {canonicalize_name(one.name): one for one in importlib.metadata.distributions()}
    broken = []
    for name in sorted(pinned.keys() & installed.keys()):
        for line in installed[name].requires or ():
            requirement = Requirement(line)
            if not _applies(requirement):
                continue
            found = installed.get(canonicalize_name(requirement.name))
            if found is None or not requirement.specifier.contains(found.version, prereleases=True):
                broken.append(f"{name} needs {line}, found {found and found.version}")
    assert broken == []


def test_celery_executor_can_be_imported(tmp_path) -> None:
    """celery 5.7 satisfies the provider's own bounds and breaks it at import."""
    code = "from airflow.providers.celery.executors.celery_executor import CeleryExecutor"
    environment = {**os.environ, "AIRFLOW_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
