"""GPU types and node configurations. Owns what a machine is, not what it costs or how fast a model runs on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from coral_tasks.domain.names import GpuTypeName, NodeConfigurationId
from coral_tasks.domain.validation import Checks

CPU_ARCHITECTURE: Final = "cpu"
"""Architecture of the stand-in card of a machine without GPU; only measured profiles may be used for it."""


class IntraNodeLink(StrEnum):
    """What joins the GPUs of one machine."""

    PCIE = "pcie"
    NVLINK = "nvlink"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuType:
    """One card. Rates are per card, one direction, dense (no sparsity).

    ``fp8_flops_per_s`` and ``nvlink_bytes_per_s`` are None where the card has none.
    """

    name: GpuTypeName
    memory_bytes: int
    flops_per_s: float
    fp8_flops_per_s: float | None
    memory_bandwidth_bytes_per_s: float
    nvlink_bytes_per_s: float | None
    pcie_bytes_per_s: float
    architecture: str
    source: str

    def __post_init__(self) -> None:
        checks = Checks("gpu_types", self.name)
        checks.named(name=self.name, architecture=self.architecture, source=self.source)
        checks.positive(
            memory_bytes=self.memory_bytes,
            flops_per_s=self.flops_per_s,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
            pcie_bytes_per_s=self.pcie_bytes_per_s,
        )
        if self.fp8_flops_per_s is not None:
            checks.positive(fp8_flops_per_s=self.fp8_flops_per_s)
        if self.nvlink_bytes_per_s is not None:
            checks.positive(nvlink_bytes_per_s=self.nvlink_bytes_per_s)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfiguration:
    """GPU type times count in one machine; all GPUs of a machine are equal."""

    gpu: GpuType
    num_gpus: int
    intra_node_link: IntraNodeLink
    network_bytes_per_s: float

    def __post_init__(self) -> None:
        checks = Checks("node_configurations", f"{self.gpu.name}x{self.num_gpus}")
        checks.positive(num_gpus=self.num_gpus, network_bytes_per_s=self.network_bytes_per_s)
        has_link = self.intra_node_link is not IntraNodeLink.NVLINK or self.gpu.nvlink_bytes_per_s is not None
        checks.require(has_link, "nvlink needs a GPU type that has it", str(self.intra_node_link))
        checks.raise_if_any()

    @property
    def id(self) -> NodeConfigurationId:
        """Name of this configuration, ``<gpu>x<count>``; a machine without GPU bears its card's name, ``cpu``."""
        if self.gpu.architecture == CPU_ARCHITECTURE:
            return NodeConfigurationId(self.gpu.name)
        return NodeConfigurationId(f"{self.gpu.name}x{self.num_gpus}")

    @property
    def memory_bytes(self) -> int:
        """GPU memory of the whole machine."""
        return self.gpu.memory_bytes * self.num_gpus
