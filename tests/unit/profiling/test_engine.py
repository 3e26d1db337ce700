"""Real vLLM on this machine: measured rows, a table and a serving template for the configuration ``cpu``."""

from __future__ import annotations

from pathlib import Path

import pytest

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.names import Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.profiling.measured import MeasuredSource, fit_measurements
from coral_tasks.profiling.runner import as_records, plan_run, run_plan
from coral_tasks.tasks.profiling import build_profiles, read_measured, read_profiles
from coral_tasks.templates import BuildOptions, build_template_set
from data_contracts.measurements import write_measurements

INTERPRETER = Path(__file__).parents[3] / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not INTERPRETER.exists(), reason="needs vLLM's own environment, .venv-vllm"),
]


def test_this_machine_is_profiled_and_a_template_built_from_it(tmp_path: Path) -> None:
    """Two engines of two and four layers give ok rows with versions; they land in Parquet, a table for ``cpu`` is built
    from them alone, and from it templates that name the measured source.
    """
    plan = plan_run(
        "tiny",
        "cpu",
        layer_counts=(2, 4),
        sequences=(1, 2),
        tokens=(64, 160),
        warmup=1,
        repeats=3,
        decode_steps=8,
        timeout_s=700.0,
    )
    rows = run_plan(plan, INTERPRETER)
    assert len(rows) == 16
    assert {row.status for row in rows} == {"ok"}
    assert all(row.vllm and row.torch and row.num_repeats == 3 for row in rows)
    assert len(fit_measurements(rows)) == 8

    path = tmp_path / "cpu.parquet"
    write_measurements(path, as_records(rows))
    assert read_measured(path) == tuple(rows)
    costs = MeasuredSource.of(rows).fits
    assert set(costs) == {("tiny", "cpu", Phase.PREFILL), ("tiny", "cpu", Phase.DECODE)}

    build_profiles("cpu", tmp_path, measured=[path])
    tables = read_profiles(tmp_path)
    assert [table.sources for table in tables] == [(ProfileSource.MEASURED,)] * 2
    for table in tables:
        assert table.throughput[0, -1, -1] > 0
        # The toy weighs 3 MB beside 16 GiB of memory: rho does not apply.
        result = build_template_set(table, BuildOptions(max_nodes=2, memory_ratio=None))
        assert len(result.templates) >= 1


def test_the_catalogue_names_what_was_measured() -> None:
    """The setup ``cpu`` holds the toy model on the configuration of a machine without GPU."""
    setup = load_catalog().setup("cpu")
    assert [entry.model.id for entry in setup.models] == ["tiny"]
    assert [node.id for node in setup.configurations] == ["cpu"]
