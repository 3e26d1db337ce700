"""The table of layers from ``docs/architecture.md`` and the check of one file against it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

# Package -> what it may import of ours. A trailing name inside coral_tasks is written without its prefix.
OURS: dict[str, tuple[str, ...]] = {
    "coral_tasks.domain": (),
    "coral_tasks.catalog": ("coral_tasks.domain",),
    "data_contracts": (),
    "coral_tasks.settings": (),
    "coral_tasks.optimization": ("coral_tasks.domain",),
    "coral_tasks.profiling": ("coral_tasks.domain", "coral_tasks.catalog"),
    "coral_tasks.placement": ("coral_tasks.domain", "coral_tasks.optimization"),
    "coral_tasks.templates": ("coral_tasks.domain", "coral_tasks.placement"),
    "coral_tasks.allocation": ("coral_tasks.domain", "coral_tasks.optimization"),
    "coral_tasks.baselines": (
        "coral_tasks.domain",
        "coral_tasks.optimization",
        "coral_tasks.allocation.problem",
        "coral_tasks.allocation.plan",
    ),
    "coral_tasks.simulation": ("coral_tasks.domain",),
    "coral_tasks.cloud": ("coral_tasks.domain",),
    "coral_tasks.ingestion": ("coral_tasks.domain", "coral_tasks.cloud", "data_contracts"),
    "coral_tasks.storage": ("coral_tasks.domain", "coral_tasks.cloud", "data_contracts"),
    "coral_tasks.protocol": ("coral_tasks.domain",),
    "coral_tasks.agent": ("coral_tasks.domain", "coral_tasks.protocol"),
    "coral_tasks.dispatch": ("coral_tasks.domain", "coral_tasks.protocol"),
    "coral_tasks.provisioning": ("coral_tasks.domain", "coral_tasks.cloud"),
    "coral_tasks.reporting": ("coral_tasks.domain",),
    "coral_tasks.observability": ("coral_tasks.domain",),
    "coral_tasks.tasks": ("coral_tasks", "data_contracts"),
    "coral_tasks.cli": ("coral_tasks.tasks", "coral_tasks.settings", "coral_tasks.agent", "coral_tasks.domain"),
    "plugins": ("plugins", "coral_airflow", "coral_tasks.tasks", "coral_tasks.reporting", "coral_tasks.settings"),
    "dags": ("coral_airflow", "coral_tasks.tasks"),
}

# Third-party packages that live in few places only.
CONFINED: dict[str, tuple[str, ...]] = {
    "airflow": ("plugins", "dags"),
    "highspy": ("coral_tasks.optimization",),
    "pulp": ("coral_tasks.optimization",),
    "aiconfigurator_core": ("coral_tasks.profiling",),
    "vllm": ("coral_tasks.profiling",),
    "boto3": ("coral_tasks.cloud",),
    "botocore": ("coral_tasks.cloud",),
    "pyarrow": ("coral_tasks.storage", "coral_tasks.ingestion", "data_contracts"),
    "great_expectations": ("data_contracts",),
    "zmq": ("coral_tasks.agent", "coral_tasks.dispatch"),
    "plotly": ("coral_tasks.reporting",),
    "prometheus_client": ("coral_tasks.observability",),
}

# Domain stays light; nothing else but numpy may enter it.
THIRD_PARTY_OF_DOMAIN = ("numpy",)

# These cost seconds to import and must not stand at module level where Airflow parses.
HEAVY = ("pandas", "great_expectations", "pulp", "highspy", "vllm", "pyarrow", "numba", "plotly", "boto3", "scipy")
LIGHT_AT_IMPORT = ("dags", "plugins", "coral_tasks.tasks")


def module_name(path: Path, root: Path) -> str:
    """Dotted name of a file under the project's root."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str | None:
    """The row of the table that ``module`` belongs to; None for the bare top package."""
    fitting = [name for name in OURS if module == name or module.startswith(f"{name}.")]
    return max(fitting, key=len) if fitting else None


def violations(source: str, module: str) -> list[str]:
    """Every import of ``source`` that the table forbids to ``module``, one message each."""
    package = package_of(module)
    if package is None:
        return [] if module == "coral_tasks" else [f"{module}: belongs to no layer of the table"]
    found: list[str] = []
    tree = ast.parse(source)
    top_level = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        for name in _imported(node):
            found += _judge(name, module, package, at_top=id(node) in top_level)
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:
            return ["<relative import>"]
        base = node.module or ""
        # "from coral_tasks import x" reaches the package x
        return [f"{base}.{alias.name}" for alias in node.names] if base == "coral_tasks" else [base]
    return []


def _judge(name: str, module: str, package: str, *, at_top: bool) -> list[str]:
    top = name.split(".", maxsplit=1)[0]
    if name == "<relative import>":
        return [f"{module}: relative imports are banned"]
    if top in ("coral_tasks", "data_contracts", "plugins", "dags", "coral_airflow"):
        allowed = (package, *OURS[package])
        return [] if _within(name, allowed) else [f"{module}: {package} must not import {name}"]
    found = []
    if top in CONFINED and not _within(module, CONFINED[top]):
        found.append(f"{module}: {top} may be imported only by {', '.join(CONFINED[top])}")
    if package == "coral_tasks.domain" and top not in sys.stdlib_module_names and top not in THIRD_PARTY_OF_DOMAIN:
        found.append(f"{module}: domain may import numpy only, not {top}")
    if at_top and top in HEAVY and package in LIGHT_AT_IMPORT:
        found.append(f"{module}: {top} is heavy and must be imported inside a function")
    return found


def _within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in allowed)
