"""The AWS policy allows what the code calls, and nothing else."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest
from botocore import xform_name

from coral_tasks.tasks.local_airflow import PROJECT

POLICY = json.loads((PROJECT / "docker" / "aws-policy.json").read_text(encoding="utf-8"))

SERVICES = {"s3": "s3", "ec2": "ec2", "pricing": "pricing", "service-quotas": "servicequotas"}
"""Service as boto3 names it → prefix of its actions."""

OTHER_NAMES = {"s3:ListObjectsV2": "s3:ListBucket"}
"""Calls whose action has another name than the call."""

SEARCHED = ("storage", "ingestion", "provisioning")
"""Packages whose modules call AWS."""

IMPLIED = {
    "ec2:CreateTags": "ec2:RunInstances",  # RunInstances with TagSpecifications
    "iam:PassRole": "ec2:RunInstances",  # launch templates with an instance profile
}
"""Actions that no call of ours names, and the one that needs them."""


def _operations() -> dict[str, str]:
    """Action by Python name of the call, for every operation of the services, from botocore's own models."""
    session = botocore.session.get_session()
    found = {}
    for service, prefix in SERVICES.items():
        for name in session.get_service_model(service).operation_names:
            action = f"{prefix}:{name}"
            found[xform_name(name)] = OTHER_NAMES.get(action, action)
    return found


def _words(tree: ast.AST) -> Iterator[str]:
    """Methods that are called on something, and texts: paginators and our own helpers take the name as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _called() -> set[str]:
    """Actions of all calls in the modules that hold AWS clients."""
    operations = _operations()
    found = set()
    for package in SEARCHED:
        for path in sorted((PROJECT / "coral_tasks" / package).glob("*.py")):
            source = path.read_text(encoding="utf-8")
            if "client" in source:
                found |= {operations[word] for word in _words(ast.parse(source)) if word in operations}
    return found


def _allowed() -> set[str]:
    listed = [statement["Action"] for statement in POLICY["Statement"]]
    return {one for entry in listed for one in ([entry] if isinstance(entry, str) else entry)}


def _calls(name: str) -> Iterator[tuple[Path, ast.Call]]:
    """Calls of a function or method of that name under ``coral_tasks``, with their file."""
    for path in sorted((PROJECT / "coral_tasks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and name in {getattr(node.func, "attr", ""), getattr(node.func, "id", "")}:
                yield path, node


def test_clients_live_where_this_test_looks() -> None:
    """boto3 makes clients in one place; who asks for one is in a package that is searched, for a service known here."""
    assert [path.relative_to(PROJECT).as_posix() for path, _ in _calls("client")] == ["coral_tasks/cloud/aws.py"]
    asked = list(_calls("make_client"))
    assert {path.parent.name for path, _ in asked} == set(SEARCHED)
    for path, call in asked:
        service = call.args[0]
        assert not isinstance(service, ast.Constant) or service.value in SERVICES, path


def test_every_call_is_allowed_and_nothing_else() -> None:
    """A new call needs a new line in the policy; a line that nothing needs is too much."""
    called = _called()
    assert {"s3:GetObject", "ec2:RunInstances", "pricing:GetProducts"} <= called
    needed = called | {action for action, cause in IMPLIED.items() if cause in called}
    assert _allowed() == needed


def test_nothing_is_allowed_on_everything_that_can_be_narrowed() -> None:
    """No wildcard actions; only reads of AWS's own catalogues are on every resource; ending needs our tag."""
    for statement in POLICY["Statement"]:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert statement["Effect"] == "Allow"
        assert not any("*" in action for action in actions)
        if statement["Resource"] == "*":
            assert all(action.split(":")[1].startswith(("Describe", "List", "Get")) for action in actions)
    (ending,) = [one for one in POLICY["Statement"] if one["Action"] == "ec2:TerminateInstances"]
    assert ending["Condition"] == {"StringLike": {"aws:ResourceTag/coral:fleet": "*"}}


@pytest.mark.parametrize(
    "planted", ['client.delete_bucket(Bucket="b")', '_pages(client, "describe_volumes", "Volumes")']
)
def test_a_planted_call_is_seen(planted) -> None:
    """The search finds calls by method and by name."""
    operations = _operations()
    assert {operations[word] for word in _words(ast.parse(planted)) if word in operations} <= {
        "s3:DeleteBucket",
        "ec2:DescribeVolumes",
    }
    assert any(word in operations for word in _words(ast.parse(planted)))
