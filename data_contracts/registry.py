"""All contracts by table name. Owns the list; a test fails if a table's module is not in it."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from data_contracts.contract import Contract

_WHERE: Final = {
    "demand": ("data_contracts.demand", "CONTRACT"),
    "prices": ("data_contracts.prices", "CONTRACT"),
    "availability": ("data_contracts.availability", "CONTRACT"),
    "running": ("data_contracts.running", "CONTRACT"),
    "plan": ("data_contracts.plan", "CONTRACT"),
    "commands": ("data_contracts.commands", "COMMANDS"),
    "outcomes": ("data_contracts.commands", "OUTCOMES"),
    "routing": ("data_contracts.routing", "CONTRACT"),
    "measurements": ("data_contracts.measurements", "CONTRACT"),
    "profiles": ("data_contracts.profile_cells", "CONTRACT"),
    "templates": ("data_contracts.templates", "CONTRACT"),
}

TABLES: Final = tuple(_WHERE)
"""Every table that crosses a process."""


def contract_of(table: str) -> Contract:
    """Contract by table name. Raises KeyError with the known names in its message."""
    if table not in _WHERE:
        message = f"no contract for table {table!r}; known: {', '.join(TABLES)}"
        raise KeyError(message)
    module, name = _WHERE[table]
    contract: Contract = getattr(import_module(module), name)
    return contract
