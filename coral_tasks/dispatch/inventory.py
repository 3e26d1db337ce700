"""Where agents are found: a TOML file of names and addresses. Owns its form.

::

    [agents.node-7]
    endpoint = "tcp://10.0.0.7:7400"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.validation import Checks


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    endpoint: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    agents: dict[str, _Entry]


def read_endpoints(path: Path) -> dict[str, str]:
    """Address of each agent by name. Raises ValidationFailed for a file that is missing or malformed."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValidationFailed([Violation(table="agents", row=str(path), value="", rule=str(error))]) from error
    checks = Checks("agents", str(path))
    for name, entry in found.agents.items():
        checks.require(entry.endpoint.startswith(("tcp://", "ipc://")), f"endpoint of {name} must be tcp:// or ipc://")
    checks.unique("endpoint", [entry.endpoint for entry in found.agents.values()])
    checks.raise_if_any()
    return {name: entry.endpoint for name, entry in sorted(found.agents.items())}


def write_endpoints(path: Path, endpoints: Mapping[str, str]) -> None:
    """Write the file that ``read_endpoints`` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f'[agents."{name}"]\nendpoint = "{endpoint}"\n' for name, endpoint in sorted(endpoints.items())]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("\n".join(lines), encoding="utf-8")
    temporary.replace(path)
