"""The database source: what it knows, what it marks, and how it splits operations. Needs the optional package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coral_tasks.catalog import load_catalog
from coral_tasks.cli import app
from coral_tasks.domain.names import Phase
from coral_tasks.domain.profiles import ProfileSource
from coral_tasks.profiling import build_profiles
from coral_tasks.profiling.costs import Work, work_for
from coral_tasks.profiling.database import DatabaseSource, _known_heads, _sharing_layers
from coral_tasks.profiling.memory import MemoryParameters, choose_parallelism
from coral_tasks.tasks.profiling import read_profiles, summarize

pytest.importorskip("aiconfigurator_core")

CATALOG = load_catalog()


@pytest.fixture(scope="module")
def database() -> DatabaseSource:
    """One source for all tests: loading its tables costs seconds."""
    source = DatabaseSource.load()
    assert source is not None
    return source


def work(model: str, node: str, phase: Phase) -> Work:
    """The grid that a table of the evaluated model asks for."""
    entry = next(one for one in CATALOG.setup("extended").models if one.model.id == model)
    configuration = CATALOG.configuration(node)
    split = choose_parallelism(entry.model, configuration)
    return work_for(entry.model, configuration, split, phase, entry.shape, MemoryParameters())


@pytest.mark.parametrize("node", ["L4x1", "A10Gx4", "T4x1", "V100x1", "cpu"])
def test_it_knows_nothing_of_cards_without_vllm_tables(database: DatabaseSource, node: str) -> None:
    """L4, A10G, T4, V100 and machines without GPU have no kernels there: None, never a guess."""
    if node in CATALOG.configurations:
        assert database.costs(work("qwen3-32b", node, Phase.DECODE)) is None


def test_an_a100_has_no_four_bit_experts_there(database: DatabaseSource) -> None:
    """GPT-OSS was not measured on A100: the roofline must stand in."""
    assert database.costs(work("gpt-oss-20b", "A100-40GBx1", Phase.DECODE)) is None


def test_decode_of_a_dense_model_is_near_its_memory_time(database: DatabaseSource) -> None:
    """One sequence of Qwen3-32B on two H100: a layer of 975 MB reads in 146 us at the peak; kernels take 1 to 2.5 x."""
    costs = database.costs(work("qwen3-32b", "H100x2", Phase.DECODE))
    assert costs is not None
    peak = 975e6 / 2 / 3.35e12
    assert 1.0 < costs.layer_s[0, 0] / peak < 2.5
    assert costs.source is ProfileSource.DATABASE
    assert "aiconfigurator-core" in costs.provenance


def test_full_layers_of_a_hybrid_model_cost_more_than_sliding_ones(database: DatabaseSource) -> None:
    """GPT-OSS at 2000 tokens of context and a large batch: full layers read more cache than sliding ones."""
    costs = database.costs(work("gpt-oss-20b", "H100x1", Phase.DECODE))
    assert costs is not None
    large = costs.layer_s[-1]
    assert large[1] > large[0] * 1.05
    assert large[::2].tolist() == [large[0]] * 12


def test_a_slower_card_of_the_same_chip_is_scaled_and_marked(database: DatabaseSource) -> None:
    """Decode on the 40 GB A100 takes 2039 / 1555 of the 80 GB card's time, every batch marked as extrapolated."""
    large, small = (database.costs(work("qwen3-32b", name, Phase.DECODE)) for name in ("A100-80GBx2", "A100-40GBx2"))
    assert large is not None
    assert small is not None
    assert small.layer_s == pytest.approx(large.layer_s * 2039 / 1555)
    assert small.extrapolated.all()
    assert not large.extrapolated.all()


def test_unmeasured_head_counts_are_scaled_and_marked(database: DatabaseSource) -> None:
    """Phi-4 has 10 KV heads, which no table holds: priced by 8, scaled, and marked."""
    body = {"n": 40, "n_kv": 10, "scale_factor": 40.0}
    assert _known_heads(body) == ({"n": 32, "n_kv": 8, "scale_factor": 50.0}, True)
    assert _known_heads({"n": 64, "n_kv": 8, "scale_factor": 1.0})[1] is False
    costs = database.costs(work("phi-4-14b", "L40Sx1", Phase.DECODE))
    assert costs is not None
    assert costs.extrapolated.all()


def test_batches_beyond_the_tables_are_marked_never_clamped(database: DatabaseSource) -> None:
    """Prompts of 20,000 tokens and batches of 4096 sequences were never measured: marked, and dearer than inside."""
    inside = work("llama3-70b", "H100x8", Phase.DECODE)
    wide = replace(inside, sequences=(2048, 4096))
    costs = database.costs(wide)
    assert costs is not None
    assert costs.extrapolated.tolist() == [False, True]
    assert costs.layer_s[1, 0] > costs.layer_s[0, 0]
    long = replace(work("llama3-70b", "H100x8", Phase.PREFILL), sequences=(1,), context_tokens=20_000)
    marked = database.costs(long)
    assert marked is not None
    assert marked.extrapolated.tolist() == [True]
    within = database.costs(replace(long, context_tokens=8000))
    assert within is not None
    assert within.extrapolated.tolist() == [False]


def test_leading_dense_layers_do_not_dilute_the_others() -> None:
    """DeepSeek-V3: the time of the whole model is shared by its 58 layers with experts, not by all 61."""
    assert _sharing_layers(CATALOG.model("deepseek-v3")) == 58
    assert _sharing_layers(CATALOG.model("qwen3-235b")) == 94
    assert _sharing_layers(CATALOG.model("qwen3-32b")) == 64


def test_an_a100s_tables_end_earlier(database: DatabaseSource) -> None:
    """Its matrix products end at 8192 rows, where the H100's go on to 32,768."""
    wide = replace(work("llama3-70b", "A100-80GBx8", Phase.PREFILL), sequences=(8, 9), context_tokens=1000)
    costs = database.costs(wide)
    assert costs is not None
    assert costs.extrapolated.tolist() == [False, True]


def test_times_grow_with_the_batch(database: DatabaseSource) -> None:
    """Decode of 512 sequences takes longer than of one, and no step back exceeds measurement noise of 10 %."""
    costs = database.costs(work("llama3-70b", "H100x8", Phase.DECODE))
    assert costs is not None
    column = costs.layer_s[:, 0]
    assert column[-1] > column[0]
    assert (np.diff(column) / column[:-1] > -0.1).all()


def test_a_setup_mixes_sources_and_says_which(database: DatabaseSource) -> None:
    """Core: L40S from the database, L4 and A10G analytic; nothing missing, tables monotone and not empty."""
    report = build_profiles(CATALOG.setup("core"))
    assert report.missing == ()
    for table in report.tables:
        known = dict(zip(table.configurations, table.sources, strict=True))
        assert known["L40Sx4"] is ProfileSource.DATABASE
        assert known["L4x1"] is ProfileSource.ANALYTIC
        assert (table.throughput[:, 0, -1] > 0).all()


def test_build_and_show_by_command(tmp_path: Path) -> None:
    """`coral profile build` writes a version once, `show` reads it back; the second build finds it there."""
    runner, home = CliRunner(), ["--home", str(tmp_path)]
    first = runner.invoke(app, ["profile", "build", "--setup", "core", *home, "--json"])
    assert first.exit_code == 0, first.output
    manifest = json.loads(first.stdout)
    written = {path: path.stat().st_mtime_ns for path in Path(manifest["folder"]).glob("*.parquet")}
    assert len(written) == 6
    again = json.loads(runner.invoke(app, ["profile", "build", "--setup", "core", *home, "--json"]).stdout)
    assert again["version"] == manifest["version"]
    assert {path: path.stat().st_mtime_ns for path in written} == written
    shown = runner.invoke(app, ["profile", "show", "--model", "phi-4-14b", *home, "--json"])
    rows = json.loads(shown.stdout)
    assert len(rows) == 2 * 12
    assert rows == [row for row in summarize(read_profiles(tmp_path)) if row["model"] == "phi-4-14b"]
