"""The memory model's bytes against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coral_tasks.catalog import load_catalog
from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.models import AttentionKind
from coral_tasks.profiling.memory import (
    MemoryParameters,
    Parallelism,
    activation_bytes,
    choose_parallelism,
    end_weight_bytes,
    kv_bytes_per_layer,
    layer_params,
    layer_weight_bytes,
    stage_memory,
    window_max,
)

CATALOG = load_catalog()
ONE = Parallelism(tp=1)


def test_layers_and_tables_of_a_dense_model_add_up_to_its_parameters() -> None:
    """Layers, embedding and head of Llama 3 70B together are its 70.55 G parameters, in 2 bytes each."""
    model = CATALOG.model("llama3-70b")
    total = layer_weight_bytes(model, ONE).sum() + end_weight_bytes(model, ONE, first=True, last=True)
    assert total == pytest.approx(70.55e9 * 2)


def test_one_layer_of_a_dense_model_has_the_size_of_its_matrices() -> None:
    """A layer of Llama 3 70B: 2 x 8192^2 + 2 x 8192 x 1024 + 3 x 8192 x 28672 = 855.6 M parameters."""
    matrices = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    assert layer_weight_bytes(CATALOG.model("llama3-70b"), ONE)[0] == pytest.approx(2 * matrices, rel=2e-3)


def test_gpt_oss_keeps_experts_in_four_bits_and_the_rest_in_sixteen() -> None:
    """A layer of GPT-OSS 20B: 32 experts of 3 x 2880^2 in 4.25 bits and about 26.5 M parameters in 16 bits."""
    experts = 32 * 3 * 2880**2 * 4.25 / 8
    attention = (2 * 2880 * 4096 + 2 * 2880 * 512) * 2
    assert layer_weight_bytes(CATALOG.model("gpt-oss-20b"), ONE)[0] == pytest.approx(experts + attention, rel=0.01)


@pytest.mark.parametrize(("ep", "expert_tp"), [(4, 1), (1, 4), (2, 2)])
def test_experts_are_divided_by_expert_and_tensor_parallelism(ep: int, expert_tp: int) -> None:
    """On four GPUs each holds a quarter of the experts, by EP, by TP or by both."""
    model = CATALOG.model("qwen3-235b")
    split = Parallelism(tp=4, ep=ep)
    assert split.expert_tp == expert_tp
    experts = 128 * 3 * 4096 * 1536 * 2 / 4
    dense = layer_params(model).attention * 2 / 4
    assert layer_weight_bytes(model, split)[0] == pytest.approx(experts + dense)


def test_the_first_layers_of_deepseek_are_dense_and_lighter() -> None:
    """Three leading layers hold an MLP of 18432 instead of 257 experts of 2048."""
    weights = layer_weight_bytes(CATALOG.model("deepseek-v3"), ONE)
    assert weights[3] - weights[2] == pytest.approx(3 * 7168 * (257 * 2048 - 18432))


def test_mla_keeps_the_latent_vector_not_the_heads() -> None:
    """DeepSeek-V3 keeps 61 x 576 values of 2 bytes: 70,272 bytes per token over all layers, on every GPU alike."""
    model = CATALOG.model("deepseek-v3")
    for tp in (1, 8):
        whole = kv_bytes_per_layer(model, Parallelism(tp=tp), 1, block_tokens=1).sum()
        assert whole == 70_272


def test_full_attention_keeps_every_token() -> None:
    """Qwen3-32B: 262,144 bytes per token over all layers (2 x 8 heads x 128 x 2 bytes x 64)."""
    assert kv_bytes_per_layer(CATALOG.model("qwen3-32b"), ONE, 1, block_tokens=1).sum() == 262_144


def test_sliding_layers_keep_only_the_window() -> None:
    """GPT-OSS at 4096 tokens: full layers keep 4096, sliding ones 128 and the block that the window starts in."""
    model = CATALOG.model("gpt-oss-20b")
    kv = kv_bytes_per_layer(model, ONE, 4096)
    per_token = 2 * 8 * 64 * 2
    assert kv[0] == (128 + 16) * per_token
    assert kv[1] == 4096 * per_token
    assert kv_bytes_per_layer(model, ONE, 64)[0] == 64 * per_token


def test_a_sequence_takes_whole_blocks() -> None:
    """17 tokens take two blocks of 16."""
    model = CATALOG.model("qwen3-32b")
    assert kv_bytes_per_layer(model, ONE, 17)[0] == kv_bytes_per_layer(model, ONE, 32)[0]


def test_kv_heads_are_divided_and_then_copied() -> None:
    """Four KV heads: a quarter each on 4 GPUs, and no less on 8."""
    model = CATALOG.model("qwen3-235b")
    kv = {tp: kv_bytes_per_layer(model, Parallelism(tp=tp), 16)[0] for tp in (1, 4, 8)}
    assert kv[4] == kv[1] / 4
    assert kv[8] == kv[4]


def test_embedding_and_head_weigh_on_the_ends_only() -> None:
    """A middle stage holds neither table, an end one, a lone stage two, and one if they are tied."""
    model = CATALOG.model("llama3-70b")
    table = 128_256 * 8192 * 2
    assert end_weight_bytes(model, ONE, first=False, last=False) == 0
    assert end_weight_bytes(model, ONE, first=True, last=False) == table
    assert end_weight_bytes(model, ONE, first=True, last=True) == 2 * table
    tied = CATALOG.model("gemma-3-27b")
    assert end_weight_bytes(tied, ONE, first=True, last=True) == end_weight_bytes(tied, ONE, first=True, last=False)


def test_fewer_layers_fit_on_an_end_than_in_the_middle() -> None:
    """One L4 holds one layer of Llama 3 70B less (1.71 GB) where it also holds a table of 2.10 GB."""
    model, node, parameters = CATALOG.model("llama3-70b"), CATALOG.configuration("L4x1"), MemoryParameters()
    fixed = parameters.overhead_bytes + activation_bytes(model, node.gpu, ONE, parameters)
    room = 0.9 * node.gpu.memory_bytes - fixed
    layer = layer_weight_bytes(model, ONE)[0]
    middle = int(room // layer)
    end = int((room - end_weight_bytes(model, ONE, first=True, last=False)) // layer)
    assert (middle, end) == (11, 10)
    assert int((stage_memory(model, node, ONE, 16, parameters).free > 0).sum()) == end


def test_the_memory_fraction_changes_the_room_as_the_formula_says() -> None:
    """From 0.92 to 1.0 an H100 gains 0.08 x 80 GiB of KV room; sequences grow by that over one sequence's KV."""
    model, node = CATALOG.model("phi-4-14b"), CATALOG.configuration("H100x1")
    low, high = (
        stage_memory(model, node, ONE, 1024, MemoryParameters(gpu_memory_fraction=fraction)) for fraction in (0.92, 1.0)
    )
    gained = 0.08 * 80 * 2**30
    assert high.free - low.free == pytest.approx(gained)
    kv = 40 * 204_800 / 40 * 1024  # all 40 layers: 204,800 bytes per token
    assert high.sequences()[-1] == np.floor(high.free[-1] / kv)
    assert high.sequences()[-1] - low.sequences()[-1] == pytest.approx(gained / kv, abs=1)


def test_a_stage_is_charged_its_worst_position() -> None:
    """Of layers 1, 5, 2, 7 the heaviest two in a row are 9, the heaviest three 14."""
    assert window_max(np.asarray([1.0, 5.0, 2.0, 7.0])).tolist() == [7.0, 9.0, 14.0, 15.0]


def test_any_two_layers_in_a_row_of_gpt_oss_hold_one_full_layer() -> None:
    """One layer may be full, two hold one full and one sliding, three may hold two full ones."""
    model, node = CATALOG.model("gpt-oss-20b"), CATALOG.configuration("L40Sx1")
    kv = stage_memory(model, node, ONE, 4096, MemoryParameters()).kv_of_sequence
    token, full, window = 2 * 8 * 64 * 2, 4096, 144
    assert kv[:3].tolist() == [full * token, (full + window) * token, (2 * full + window) * token]


@pytest.mark.parametrize(
    ("model", "node", "tp", "ep"),
    [
        ("qwen3-32b", "L40Sx8", 8, 1),
        ("phi-4-14b", "L40Sx2", 2, 1),
        ("phi-4-14b", "L40Sx8", 2, 1),  # 10 KV heads: neither 4 nor 8 divides them
        ("qwen3-235b", "H100x8", 8, 8),  # 4 KV heads are copied
        ("gpt-oss-20b", "L4x4", 4, 4),
        ("deepseek-v3", "H100x8", 8, 8),
    ],
)
def test_the_tensor_parallel_degree_is_one_that_vllm_can_start(model: str, node: str, tp: int, ep: int) -> None:
    """The degree is the node's GPUs where heads allow it, else the largest part of them that they allow."""
    assert choose_parallelism(CATALOG.model(model), CATALOG.configuration(node)) == Parallelism(tp=tp, ep=ep)


def test_batched_tokens_follow_the_engines_default() -> None:
    """8192 tokens on an H100, 2048 on an L4 and on an A100, or what the parameters say."""
    parameters = MemoryParameters()
    assert parameters.batched_tokens(CATALOG.gpu_type("H100")) == 8192
    assert parameters.batched_tokens(CATALOG.gpu_type("L4")) == 2048
    assert parameters.batched_tokens(CATALOG.gpu_type("A100-80GB")) == 2048
    assert MemoryParameters(max_batched_tokens=99).batched_tokens(CATALOG.gpu_type("L4")) == 99


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan")])
def test_an_impossible_memory_fraction_is_refused(fraction: float) -> None:
    """The fraction lies in (0, 1]."""
    with pytest.raises(ValidationFailed, match="gpu_memory_fraction"):
        MemoryParameters(gpu_memory_fraction=fraction)


def test_degrees_that_do_not_divide_are_refused() -> None:
    """Experts cannot go over three of four GPUs."""
    with pytest.raises(ValidationFailed, match="tp must be a multiple of ep"):
        Parallelism(tp=4, ep=3)


def test_a_model_with_fewer_parameters_than_its_matrices_is_refused() -> None:
    """A stated total below what the dimensions need is an error, not a negative attention part."""
    model = replace(CATALOG.model("qwen3-32b"), num_params=20e9)
    with pytest.raises(ValidationFailed, match="num_params is smaller"):
        layer_params(model)


def test_attention_kinds_are_one_per_layer() -> None:
    """The KV of every layer has an entry, whatever its kind."""
    model = CATALOG.model("gemma-3-27b")
    kv = kv_bytes_per_layer(model, ONE, 8192)
    full = np.asarray([kind is AttentionKind.FULL for kind in model.attention_kinds])
    assert (kv[full] > kv[~full].max()).all()
