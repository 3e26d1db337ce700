"""The roofline's operations and bytes against figures worked out by hand, and its calibration file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.errors import StorageFault, ValidationFailed
from coral_tasks.domain.names import Phase
from coral_tasks.profiling.aggregated import load_corrections
from coral_tasks.profiling.calibration import DATA_FILE, Efficiency, load_calibration
from coral_tasks.profiling.costs import Work
from coral_tasks.profiling.memory import Parallelism
from coral_tasks.profiling.roofline import (
    RooflineSource,
    all_reduce_s,
    attended_tokens,
    layer_s,
    work_bytes,
    work_flops,
)

CATALOG = load_catalog()
IDEAL = Efficiency(
    compute=1.0,
    bandwidth=1.0,
    kv=1.0,
    expert_compute=1.0,
    expert_bandwidth=1.0,
    launch_s=0.0,
    link2=1.0,
    link4=1.0,
    link8=1.0,
    link_latency_s=0.0,
    step_s=0.0,
    fitted_from="ideal",
)


def work(model: str, node: str, phase: Phase, context: float, sequences: tuple[float, ...], tp: int = 1) -> Work:
    """One batch grid."""
    return Work(
        model=CATALOG.model(model),
        configuration=CATALOG.configuration(node),
        split=Parallelism(tp=tp),
        phase=phase,
        context_tokens=context,
        sequences=sequences,
    )


def test_prefill_of_a_dense_model_is_two_operations_per_parameter_and_token() -> None:
    """1000 tokens of Llama 3 70B: 2 x 855.6 M per layer and token, and 4 x 8192 x 500 for causal attention."""
    flops = work_flops(work("llama3-70b", "H100x1", Phase.PREFILL, 1000, (1,)))
    matrices = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert flops.dense[0, 0] == pytest.approx(1000 * (2 * matrices + 4 * 8192 * 500), rel=2e-3)


def test_a_sparse_model_works_with_its_chosen_experts_only() -> None:
    """A token of Qwen3-235B passes 8 experts of 3 x 4096 x 1536."""
    flops = work_flops(work("qwen3-235b", "H100x8", Phase.DECODE, 1, (1,)))
    assert flops.experts[0, 0] == 2 * 8 * 3 * 4096 * 1536


def test_one_token_reads_its_experts_and_many_tokens_all() -> None:
    """One token touches 8 of 128 experts, a thousand tokens all of them."""
    read = work_bytes(work("qwen3-235b", "H100x8", Phase.DECODE, 1, (1, 1000))).experts[:, 0]
    expert = 3 * 4096 * 1536 * 2
    assert read[0] == pytest.approx(8 * expert)
    assert read[1] == pytest.approx(128 * expert, rel=1e-6)


def test_decode_reads_weights_and_every_sequences_cache() -> None:
    """At ideal efficiency a decode step of Llama 3 70B on an H100 takes weights plus KV over 3.35 TB/s."""
    seconds = layer_s(work("llama3-70b", "H100x1", Phase.DECODE, 1000, (4,)), IDEAL)[0, 0]
    matrices = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert seconds == pytest.approx((2 * matrices + 4 * 1000 * 4096) / 3.35e12, rel=2e-3)


def test_sliding_layers_look_back_one_window() -> None:
    """GPT-OSS: in decode at 1000 tokens a sliding layer attends to 128; in prefill to 128 but for the first 128."""
    decode = attended_tokens(CATALOG.model("gpt-oss-20b"), work("gpt-oss-20b", "L4x1", Phase.DECODE, 1000, (1,)))
    assert decode[:2].tolist() == [128, 1000]
    prefill = attended_tokens(CATALOG.model("gpt-oss-20b"), work("gpt-oss-20b", "L4x1", Phase.PREFILL, 1000, (1,)))
    assert prefill[:2].tolist() == pytest.approx([(128 * 64 + 872 * 128) / 1000, 500])


def test_two_all_reduces_move_twice_a_ring_over_the_link() -> None:
    """100 tokens of width 5120 on four L40S: 2 x 2 x 3/4 x 2 x 5120 x 100 bytes over PCIe's 32 GB/s."""
    seconds = all_reduce_s(work("qwen3-32b", "L40Sx4", Phase.DECODE, 1, (100,), tp=4), IDEAL)[0]
    assert seconds == pytest.approx(2 * 2 * 0.75 * 2 * 5120 * 100 / 32e9)
    assert all_reduce_s(work("qwen3-32b", "L40Sx4", Phase.DECODE, 1, (100,)), IDEAL)[0] == 0


def test_fp8_weights_use_fp8_units_where_the_card_has_them() -> None:
    """DeepSeek-V3 in FP8 computes at 1978 TFLOP/s on an H100, and at 312 on an A100, which has no FP8."""
    for name, peak in (("H100x1", 1978e12), ("A100-80GBx1", 312e12)):
        one = work("deepseek-v3", name, Phase.PREFILL, 4096, (16,))
        flops = work_flops(one)
        expected = (flops.dense + flops.experts)[0, -1] / peak
        assert layer_s(one, IDEAL)[0, -1] == pytest.approx(expected)


def test_a_machine_without_gpu_has_no_roofline() -> None:
    """For cpu only measurements count: the formula knows nothing about it."""
    assert RooflineSource.load().costs(work("tiny", "cpu", Phase.DECODE, 100, (1,))) is None


@pytest.mark.parametrize("gpu", ["T4", "V100", "A10G", "L4", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200"])
def test_every_gpu_type_is_calibrated_in_both_phases(gpu: str) -> None:
    """Each type has factors for prefill and decode, each at most a peak, with their origin."""
    for phase in (Phase.PREFILL, Phase.DECODE):
        factors = load_calibration()[gpu, phase]
        assert 0 < factors.compute <= 1
        assert factors.fitted_from


def test_times_grow_with_the_batch_and_the_context() -> None:
    """A larger batch or a longer context never takes less time."""
    source = RooflineSource.load()
    costs = source.costs(work("qwen3-32b", "A10Gx4", Phase.DECODE, 800, (1, 2, 64, 512), tp=4))
    longer = source.costs(work("qwen3-32b", "A10Gx4", Phase.DECODE, 1600, (1, 2, 64, 512), tp=4))
    assert costs is not None
    assert longer is not None
    assert (np.diff(costs.layer_s[:, 0]) >= 0).all()
    assert (longer.layer_s >= costs.layer_s).all()


@pytest.mark.parametrize(
    ("old", "new"),
    [("L4,decode,", "L4,decode,-"), ("L4,decode,", "L4,decoding,"), ("gpu,phase,compute", "gpu,phase,c")],
)
def test_a_broken_calibration_row_is_named(tmp_path: Path, old: str, new: str) -> None:
    """A negative share, an unknown phase or a missing column is refused with the line."""
    path = tmp_path / "calibration.csv"
    path.write_text(DATA_FILE.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(ValidationFailed, match=r"calibration\.csv, line \d+"):
        load_calibration(path)


def test_a_missing_calibration_file_is_named(tmp_path: Path) -> None:
    """A missing file is a storage fault with its name."""
    with pytest.raises(StorageFault, match=r"none\.csv"):
        load_calibration(tmp_path / "none.csv")


def test_sparse_models_are_corrected_like_in_the_database() -> None:
    """Qwen3-235B decodes slower than kernels say: the roofline applies the family's factor, on every card alike."""
    one = work("qwen3-235b", "L4x8", Phase.DECODE, 1000, (8,), tp=8)
    factors = load_calibration()["L4", Phase.DECODE]
    costs = RooflineSource.load().costs(one)
    assert costs is not None
    factor = load_corrections()["qwen3-235b"].decode
    assert costs.layer_s == pytest.approx(layer_s(one, factors) * factor)
    assert "correction qwen3-235b" in costs.provenance


def test_dense_models_are_corrected_only_where_factors_come_from_kernels() -> None:
    """The L4's factors come from measured layers and stand as they are; the H100's from kernels and are corrected."""
    for name, factor in (("L4x1", 1.0), ("H100x1", load_corrections()["llama-70b"].decode)):
        one = work("qwen3-32b", name, Phase.DECODE, 1000, (8,))
        costs = RooflineSource.load().costs(one)
        assert costs is not None
        factors = load_calibration()[one.configuration.gpu.name, Phase.DECODE]
        assert costs.layer_s == pytest.approx(layer_s(one, factors) * factor)


def test_a_share_above_the_peak_is_refused() -> None:
    """No card does more than its peak."""
    with pytest.raises(ValidationFailed, match="plausible share"):
        replace(IDEAL, compute=1.2)
