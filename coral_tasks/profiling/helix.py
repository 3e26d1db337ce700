"""Helix's measured layer times and KV capacities (ASPLOS 2025): reading, and what the models here predict for them.

Owns the settings of those measurements as far as they are known. Machines T4, T4x2, T4x4, L4, L4x2, V100, A100-40GB;
models LLaMA-1 30B and LLaMA-2 70B in FP16; vLLM of 2023.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coral_tasks.catalog import Catalog
from coral_tasks.domain.errors import StorageFault
from coral_tasks.domain.hardware import IntraNodeLink, NodeConfiguration
from coral_tasks.domain.names import Phase
from coral_tasks.profiling.calibration import Efficiency
from coral_tasks.profiling.costs import Work
from coral_tasks.profiling.memory import (
    MemoryParameters,
    Parallelism,
    activation_bytes,
    kv_bytes_per_layer,
    layer_weight_bytes,
)
from coral_tasks.profiling.points import MEASURED_FOLDER
from coral_tasks.profiling.roofline import layer_s

LAYER_FILE = MEASURED_FOLDER / "helix_layer_times.csv"
KV_FILE = MEASURED_FOLDER / "helix_kv_blocks.csv"
MODELS = {"LLaMA-1-30B": "llama1-30b", "LLaMA-2-70B": "llama2-70b"}
GPUS = {"A100-40GB": "A100-40GB", "L4": "L4", "T4": "T4", "V100-16GB": "V100"}

CONTEXT_TOKENS = 995.0
"""Mean prompt 763 and output 232 tokens of Helix's trace (its section 6.1). The context of its decode rows is not
stated; the KV factor fitted from them rests on this figure."""

GROUPED_KV_FACTOR = 3.0
"""Reads of the KV cache of grouped heads over its size in the vLLM of those measurements: of 1, 2, 3, 4, 6 and 8 the
value with the least error on the fit half. Not used for planning: today's kernels read grouped heads once."""

PROMPT_TOKENS = 763.0
MODEL_LENGTH_TOKENS = 2048
"""Tokens of one prompt in the engine's profiling run; with ``max_prompt_requests`` prompts in a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Time of one layer for a batch of ``tokens`` (decode: sequences)."""

    model: str
    gpu: str
    num_gpus: int
    phase: Phase
    tokens: float
    seconds: float

    @property
    def for_fit(self) -> bool:
        """Half of the rows by SHA-256 of what was measured. Neighbouring batches stand on both sides."""
        key = f"{self.model}|{self.gpu}|{self.num_gpus}|{self.phase}|{self.tokens}"
        return hashlib.sha256(key.encode()).digest()[0] < 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCapacity:
    """KV blocks of 16 tokens beside ``layers`` layers on a machine; ``prompts``: of its largest batch."""

    model: str
    gpu: str
    num_gpus: int
    layers: int
    blocks: int
    prompts: int


def read_layer_times(path: Path = LAYER_FILE) -> tuple[LayerTime, ...]:
    """Rows of ``helix_layer_times.csv``."""
    return tuple(
        LayerTime(
            model=row["model"],
            gpu=GPUS[row["gpu"]],
            num_gpus=int(row["gpus_per_machine"]),
            phase=Phase.PREFILL if row["phase"] == "prompt" else Phase.DECODE,
            tokens=float(row["batch_tokens"]),
            seconds=float(row["layer_time_ms"]) / 1e3,
        )
        for row in _rows(path)
    )


def read_kv_capacities(path: Path = KV_FILE) -> tuple[KvCapacity, ...]:
    """Rows of ``helix_kv_blocks.csv``."""
    return tuple(
        KvCapacity(
            model=row["model"],
            gpu=GPUS[row["gpu"]],
            num_gpus=int(row["gpus_per_machine"]),
            layers=int(row["layers_on_machine"]),
            blocks=int(row["vllm_kv_blocks"]),
            prompts=int(row["max_prompt_requests"]),
        )
        for row in _rows(path)
    )


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        message = f"{path.name} cannot be read: {error}"
        raise StorageFault(message) from error


def configuration(catalog: Catalog, gpu: str, num_gpus: int) -> NodeConfiguration:
    """A Helix machine; several T4 or L4 sit on PCIe."""
    return NodeConfiguration(
        gpu=catalog.gpu_type(gpu),
        num_gpus=num_gpus,
        intra_node_link=IntraNodeLink.PCIE,
        network_bytes_per_s=1.25e9,
    )


def predict_layer_times(
    rows: Sequence[LayerTime],
    catalog: Catalog,
    calibration: Mapping[tuple[str, Phase], Efficiency],
    grouped_kv_factor: float,
) -> NDArray[np.float64]:
    """Seconds predicted by the roofline for each row, shape (N,).

    ``grouped_kv_factor``: how often that vLLM read the KV cache of grouped heads (its attention kernel expanded
    groups); a factor of those measurements, not of today's engines.
    """
    predicted = np.zeros(len(rows))
    for model_name, gpu, num_gpus, phase in sorted({(row.model, row.gpu, row.num_gpus, row.phase) for row in rows}):
        wanted = (model_name, gpu, num_gpus, phase)
        mine = [i for i, row in enumerate(rows) if (row.model, row.gpu, row.num_gpus, row.phase) == wanted]
        model = catalog.model(MODELS[model_name])
        per_sequence = PROMPT_TOKENS if phase is Phase.PREFILL else 1.0
        work = Work(
            model=model,
            configuration=configuration(catalog, gpu, num_gpus),
            split=Parallelism(tp=num_gpus),
            phase=phase,
            context_tokens=PROMPT_TOKENS if phase is Phase.PREFILL else CONTEXT_TOKENS,
            sequences=tuple(rows[i].tokens / per_sequence for i in mine),
        )
        factor = grouped_kv_factor if model.num_kv_heads < model.num_attention_heads else 1.0
        predicted[mine] = layer_s(work, calibration[gpu, phase], factor)[:, 0]
    return predicted


def predict_kv_blocks(
    rows: Iterable[KvCapacity], catalog: Catalog, parameters: MemoryParameters
) -> NDArray[np.float64]:
    """Blocks predicted by the memory model at Helix's settings (middle stage, its batch of prompts), shape (N,)."""
    predicted = []
    for row in rows:
        model, split = catalog.model(MODELS[row.model]), Parallelism(tp=row.num_gpus)
        gpu = catalog.gpu_type(row.gpu)
        settings = replace(parameters, max_batched_tokens=row.prompts * MODEL_LENGTH_TOKENS)
        weights = float(layer_weight_bytes(model, split)[: row.layers].sum())
        fixed = settings.overhead_bytes + activation_bytes(model, gpu, split, settings)
        free = settings.gpu_memory_fraction * gpu.memory_bytes - fixed - weights
        block = float(kv_bytes_per_layer(model, split, settings.block_tokens)[: row.layers].sum())
        predicted.append(max(0.0, free) / block)
    return np.asarray(predicted)
