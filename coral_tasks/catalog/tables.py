"""Hardware, models, SLOs and request shapes as the catalogue's files state them.

Owns the columns of each file and their units; turns rows into domain values. Prices are in ``prices``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coral_tasks.catalog.rows import Row, Table
from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.hardware import GpuType, IntraNodeLink, NodeConfiguration
from coral_tasks.domain.models import AttentionKind, ExpertShape, LatencySlo, RequestShape, ServedModel
from coral_tasks.domain.names import GpuTypeName, ModelId, NodeConfigurationId

GIB = 2**30
GIGA = 1e9
TERA = 1e12
GBIT_BYTES = 1e9 / 8

GPU_COLUMNS = [
    "gpu",
    "memory_gib",
    "dense_bf16_tflops",
    "dense_fp8_tflops",
    "memory_bandwidth_gb_per_s",
    "nvlink_gb_per_s",
    "pcie_gb_per_s",
    "architecture",
    "source",
]
MACHINE_COLUMNS = ["machine_type", "cloud", "gpu", "num_gpus", "intra_node_link", "network_gbps", "source"]
CONFIGURATION_COLUMNS = ["gpu", "num_gpus", "intra_node_link", "network_gbps", "rule", "source"]
MODEL_COLUMNS = [
    "model",
    "hub_name",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "tied_embeddings",
    "num_experts",
    "experts_per_token",
    "moe_intermediate_size",
    "num_dense_layers",
    "num_shared_experts",
    "attention",
    "window_tokens",
    "latent_dim",
    "params_total_b",
    "params_active_b",
    "weight_bytes_per_param",
    "expert_bytes_per_param",
    "kv_bytes_per_value",
    "checkpoint_gb",
    "max_context_tokens",
    "source",
]
SLO_COLUMNS = ["model", "ttft_ms", "tpot_ms", "percentile", "source"]
SHAPE_COLUMNS = [
    "model",
    "trace",
    "mean_prompt_tokens",
    "p95_prompt_tokens",
    "mean_output_tokens",
    "p95_output_tokens",
    "source",
]

ATTENTION_PATTERNS = ("full", "mla", "sliding_full", "five_sliding_one_full")
"""Repeating patterns of layers: all full, all MLA, one sliding then one full, five sliding then one full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """A cloud's product: which GPUs, what joins them and its network (the advertised maximum)."""

    name: str
    cloud: str
    gpu: GpuTypeName
    num_gpus: int
    intra_node_link: IntraNodeLink
    network_bytes_per_s: float
    source: str


def read_gpu_types(folder: Path) -> dict[GpuTypeName, GpuType]:
    """GPU types by short name, from ``gpu_types.csv``."""
    return _read(folder / "gpu_types.csv", GPU_COLUMNS, _gpu_type, lambda gpu: gpu.name)


def read_machine_types(folder: Path, gpus: Mapping[GpuTypeName, GpuType]) -> dict[str, MachineType]:
    """Machine types by the cloud's name, from ``machine_types.csv``."""
    return _read(
        folder / "machine_types.csv", MACHINE_COLUMNS, lambda row: _machine_type(row, gpus), lambda item: item.name
    )


def read_configurations(
    folder: Path, gpus: Mapping[GpuTypeName, GpuType]
) -> dict[NodeConfigurationId, NodeConfiguration]:
    """Node configurations by id, from ``node_configurations.csv``."""
    return _read(
        folder / "node_configurations.csv",
        CONFIGURATION_COLUMNS,
        lambda row: _configuration(row, gpus),
        lambda item: item.id,
    )


def read_models(folder: Path) -> dict[ModelId, ServedModel]:
    """Served models by id, from ``models.csv``."""
    return _read(folder / "models.csv", MODEL_COLUMNS, _model, lambda model: model.id)


def read_slos(folder: Path, models: Mapping[ModelId, ServedModel]) -> dict[ModelId, LatencySlo]:
    """Latency limits by model, from ``slos.csv``."""
    rows = _read(folder / "slos.csv", SLO_COLUMNS, lambda row: (_known_model(row, models), _slo(row)), lambda p: p[0])
    return dict(rows.values())


def read_shapes(folder: Path, models: Mapping[ModelId, ServedModel]) -> dict[ModelId, RequestShape]:
    """Request shapes by model, from ``request_shapes.csv``."""
    rows = _read(
        folder / "request_shapes.csv",
        SHAPE_COLUMNS,
        lambda row: (_known_model(row, models), _shape(row)),
        lambda p: p[0],
    )
    return dict(rows.values())


def _read[K, V](path: Path, columns: list[str], parse: Callable[[Row], V], key: Callable[[V], K]) -> dict[K, V]:
    """Parse all rows; every fault of every row is raised together."""
    table = Table(path, columns)
    values = []
    for row in table.rows:
        try:
            values.append(parse(row))
        except ValidationFailed as failure:
            for violation in failure.violations:
                row.reject(violation.rule, violation.value)
    table.raise_if_any()
    table.unique([key(value) for value in values])
    table.raise_if_any()
    return {key(value): value for value in values}


def _known_gpu(row: Row, gpus: Mapping[GpuTypeName, GpuType]) -> GpuType:
    return gpus[GpuTypeName(row.choice("gpu", tuple(gpus)))]


def _known_model(row: Row, models: Mapping[ModelId, ServedModel]) -> ModelId:
    return ModelId(row.choice("model", tuple(models)))


def _gpu_type(row: Row) -> GpuType:
    fp8, nvlink = row.optional_number("dense_fp8_tflops"), row.optional_number("nvlink_gb_per_s")
    return GpuType(
        name=GpuTypeName(row.text("gpu")),
        memory_bytes=round(row.number("memory_gib") * GIB),
        flops_per_s=row.number("dense_bf16_tflops") * TERA,
        fp8_flops_per_s=None if fp8 is None else fp8 * TERA,
        memory_bandwidth_bytes_per_s=row.number("memory_bandwidth_gb_per_s") * GIGA,
        nvlink_bytes_per_s=None if nvlink is None else nvlink * GIGA,
        pcie_bytes_per_s=row.number("pcie_gb_per_s") * GIGA,
        architecture=row.text("architecture"),
        source=row.text("source"),
    )


def _machine_type(row: Row, gpus: Mapping[GpuTypeName, GpuType]) -> MachineType:
    return MachineType(
        name=row.text("machine_type"),
        cloud=row.choice("cloud", ("aws", "gcp")),
        gpu=_known_gpu(row, gpus).name,
        num_gpus=row.count("num_gpus"),
        intra_node_link=IntraNodeLink(row.choice("intra_node_link", tuple(IntraNodeLink))),
        network_bytes_per_s=row.number("network_gbps") * GBIT_BYTES,
        source=row.text("source"),
    )


def _configuration(row: Row, gpus: Mapping[GpuTypeName, GpuType]) -> NodeConfiguration:
    row.text("rule")
    row.text("source")
    return NodeConfiguration(
        gpu=_known_gpu(row, gpus),
        num_gpus=row.count("num_gpus"),
        intra_node_link=IntraNodeLink(row.choice("intra_node_link", tuple(IntraNodeLink))),
        network_bytes_per_s=row.number("network_gbps") * GBIT_BYTES,
    )


def _model(row: Row) -> ServedModel:
    num_layers = row.count("num_layers")
    return ServedModel(
        id=ModelId(row.text("model")),
        hub_name=row.text("hub_name"),
        num_layers=num_layers,
        hidden_size=row.count("hidden_size"),
        num_attention_heads=row.count("num_attention_heads"),
        num_kv_heads=row.count("num_kv_heads"),
        head_dim=row.count("head_dim"),
        intermediate_size=row.count("intermediate_size"),
        vocab_size=row.count("vocab_size"),
        tied_embeddings=row.choice("tied_embeddings", ("false", "true")) == "true",
        experts=_experts(row),
        attention_kinds=attention_kinds(row.choice("attention", ATTENTION_PATTERNS), num_layers),
        window_tokens=row.optional_count("window_tokens"),
        latent_dim=row.optional_count("latent_dim"),
        num_params=row.number("params_total_b") * GIGA,
        num_active_params=row.number("params_active_b") * GIGA,
        weight_bytes_per_param=row.number("weight_bytes_per_param"),
        expert_bytes_per_param=row.number("expert_bytes_per_param"),
        kv_bytes_per_value=row.number("kv_bytes_per_value"),
        checkpoint_bytes=row.number("checkpoint_gb") * GIGA,
        max_context_tokens=row.count("max_context_tokens"),
        source=row.text("source"),
    )


def _experts(row: Row) -> ExpertShape | None:
    num_experts = row.optional_count("num_experts")
    if num_experts is None:
        return None
    return ExpertShape(
        num_experts=num_experts,
        experts_per_token=row.count("experts_per_token"),
        intermediate_size=row.count("moe_intermediate_size"),
        num_dense_layers=row.optional_count("num_dense_layers") or 0,
        num_shared_experts=row.optional_count("num_shared_experts") or 0,
    )


def attention_kinds(pattern: str, num_layers: int) -> tuple[AttentionKind, ...]:
    """Kind of each layer. ``pattern``: one of ATTENTION_PATTERNS.

    Sources: ``layer_types`` of openai/gpt-oss-20b (starts with a sliding layer); ``sliding_window_pattern`` 6 of
    google/gemma-3-27b (every sixth layer is full).
    """
    period = {"sliding_full": 2, "five_sliding_one_full": 6}.get(pattern, 1)
    last = AttentionKind.MLA if pattern == "mla" else AttentionKind.FULL
    return tuple(last if (i + 1) % period == 0 else AttentionKind.SLIDING for i in range(num_layers))


def _slo(row: Row) -> LatencySlo:
    row.text("source")
    return LatencySlo(
        ttft_s=row.number("ttft_ms") / 1e3, tpot_s=row.number("tpot_ms") / 1e3, percentile=row.number("percentile")
    )


def _shape(row: Row) -> RequestShape:
    row.text("trace")
    row.text("source")
    return RequestShape(
        mean_prompt_tokens=row.number("mean_prompt_tokens"),
        p95_prompt_tokens=row.number("p95_prompt_tokens"),
        mean_output_tokens=row.number("mean_output_tokens"),
        p95_output_tokens=row.number("p95_output_tokens"),
    )
