"""What docs/deployment.md tells a reader to write and to call exists as it stands there."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest
import typer.main

from coral_tasks.agent.config import read_agent_config
from coral_tasks.cli import app
from coral_tasks.dispatch.inventory import read_endpoints
from coral_tasks.tasks.local_airflow import PROJECT

TEXT = (PROJECT / "docs" / "deployment.md").read_text(encoding="utf-8")
BLOCKS = [textwrap.dedent(block) for block in re.findall(r"(?:^    .*\n(?:^\n(?=    ))?)+", TEXT, re.MULTILINE)]
PLACES = ("docker", "dags", "plugins", "docs", "benchmarks")


def block(first: str) -> str:
    """The one indented block that starts so."""
    (found,) = [one for one in BLOCKS if one.startswith(first)]
    return found


def called() -> list[list[str]]:
    """Every call of ``coral`` in the text, as words."""
    calls = [found[1] for found in re.finditer(r"`(coral [a-z][^`]*)`", TEXT)]
    in_block = re.compile(r"(?:^|exec scheduler )(coral [a-z].*)$", re.MULTILINE)
    calls += [found[1] for one in BLOCKS for found in in_block.finditer(one)]
    return [shlex.split(re.split(r"[|;]", call)[0], comments=True) for call in calls]


def test_the_configurations_shown_are_accepted(tmp_path: Path) -> None:
    """The agent's file and the controller's inventory name the same agent, and both are read without complaint."""
    agent, inventory = tmp_path / "agent.toml", tmp_path / "agents.toml"
    agent.write_text(block('name = "gpu-17"'), encoding="utf-8")
    inventory.write_text(block("[agents."), encoding="utf-8")
    config = read_agent_config(agent)
    assert read_endpoints(inventory) == {config.name: config.bind}


@pytest.mark.parametrize("words", called(), ids=" ".join)
def test_every_call_of_coral_is_one(words: list[str]) -> None:
    """Commands and options exist."""
    command, rest = typer.main.get_command(app), words[1:]
    while hasattr(command, "commands"):
        assert rest, f"{command.name} is a group of commands"
        assert rest[0] in command.commands, f"no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert {word for word in rest if word.startswith("--")} <= known


def test_the_calls_are_found() -> None:
    """The search above sees both calls in a sentence and calls in a block."""
    found = [" ".join(words) for words in called()]
    assert "coral keys make gpu-17 --role agent" in found
    assert "coral keys make controller --role controller --keys keys" in found
    assert len(found) >= 8


def test_every_file_named_exists() -> None:
    """Paths in the repository are those of files, except what a reader makes: the secrets and his own settings."""
    named = set(re.findall(rf"\b(?:{'|'.join(PLACES)})/[\w./-]+\w", TEXT)) - {"docker/secrets", "docker/.env"}
    assert len(named) >= 6
    assert [path for path in sorted(named) if not (PROJECT / path).exists()] == []
