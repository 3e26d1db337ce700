"""Identifier types. Each is a plain string with a meaning; holds no lookup."""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

GpuTypeName = NewType("GpuTypeName", str)
"""Card, for example ``"L40S"``."""

NodeConfigurationId = NewType("NodeConfigurationId", str)
"""GPU type and count of one machine, for example ``"L40Sx4"``."""

ModelId = NewType("ModelId", str)
"""Served model, for example ``"qwen3-32b"``."""

RegionId = NewType("RegionId", str)
"""Provider and region, for example ``"aws/us-east-2"``; an instance stays inside one."""

TemplateId = NewType("TemplateId", str)
"""Readable and unique within a library, see ``templates.template_id``."""

InstanceId = NewType("InstanceId", str)
NodeId = NewType("NodeId", str)
CommandId = NewType("CommandId", str)
PlanId = NewType("PlanId", str)
RunId = NewType("RunId", str)
LibraryVersion = NewType("LibraryVersion", str)


class Phase(StrEnum):
    """Part of a request's work that a serving instance carries out."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"

    @property
    def throughput_unit(self) -> str:
        """Unit of a template's throughput in this phase."""
        return _THROUGHPUT_UNIT[self]


_THROUGHPUT_UNIT = {
    Phase.PREFILL: "prompt tokens/s",
    Phase.DECODE: "output tokens/s",
    Phase.AGGREGATED: "requests/s",
}


class Market(StrEnum):
    """How a node is paid for. Reserved nodes cost nothing at the margin."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    RESERVED = "reserved"


class Runtime(StrEnum):
    """What can carry a template out: stock vLLM, or only an engine with data parallelism inside a stage
    or unequal tensor parallel degrees.
    """

    VLLM = "vllm"
    HYBRID = "hybrid"


class LatencySplit(StrEnum):
    """How the latency budget is shared among the stages (design 2.2)."""

    EQUAL = "equal"
    FREE = "free"
