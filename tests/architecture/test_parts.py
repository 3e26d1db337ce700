"""Parts install alone: the node agent without the planner, the planner without Airflow."""

from __future__ import annotations

import subprocess
import sys

import pytest

PLANNER = ("pandas", "pyarrow", "great_expectations", "highspy", "pulp", "numba", "plotly")
PARTS = {
    "coral_tasks.cli": (*PLANNER, "airflow", "zmq", "psutil", "boto3", "vllm"),
    "coral_tasks.agent.server": (*PLANNER, "airflow", "boto3", "vllm"),
    "coral_tasks.agent.simulated_engine": (*PLANNER, "airflow", "boto3", "vllm", "zmq"),
    "coral_tasks.dispatch.dispatcher": (*PLANNER, "airflow", "boto3", "vllm"),
    "coral_tasks.allocation.solve": ("airflow", "zmq", "boto3", "vllm", "great_expectations"),
    "coral_tasks.templates": ("airflow", "zmq", "boto3", "vllm", "great_expectations"),
    "data_contracts.gate": ("airflow", "zmq", "boto3", "vllm", "coral_tasks"),
}


@pytest.mark.parametrize("module", sorted(PARTS))
def test_a_part_loads_without_what_it_does_not_need(module: str) -> None:
    """Importing the part works in a process where the other parts' packages cannot be imported."""
    blocked = dict.fromkeys(PARTS[module])
    code = f"import sys; sys.modules.update({blocked!r}); import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-600:]


def test_a_missing_extra_is_named() -> None:
    """A command whose packages are not installed says which extra brings them, without a traceback."""
    code = (
        "import sys; sys.modules.update({'pyarrow': None}); sys.argv = ['coral', 'plan', '--library', 'x', '--demand',"
        " 'x', '--prices', 'x', '--availability', 'x']; from coral_tasks.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "needs pyarrow: pip install 'coral[planner]'" in done.stderr
    assert "Traceback" not in done.stderr
