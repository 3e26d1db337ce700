"""Profiles: how fast one node runs j layers of a model, from the best source there is (design 2.1).

Owns cost sources (measured, database, analytic), the memory model and the reduction to profile tables. It never
places layers, never plans and never imports vLLM into this interpreter.

API::

    build_profile_tables(setup, *, sources=None, parameters=None) -> tuple[ProfileTable, ...]
    build_profiles(setup, ...) -> BuildReport            # also what is missing, repaired, or out of reach of its SLO
    default_sources() -> (DatabaseSource?, RooflineSource)
    MemoryParameters, stage_memory, kv_bytes_per_layer, layer_weight_bytes, choose_parallelism   (memory)
"""

from coral_tasks.profiling.build import (
    BuildReport,
    MissingProfile,
    UnreachableSlo,
    build_profile_tables,
    build_profiles,
    default_sources,
)
from coral_tasks.profiling.memory import MemoryParameters

__all__ = [
    "BuildReport",
    "MemoryParameters",
    "MissingProfile",
    "UnreachableSlo",
    "build_profile_tables",
    "build_profiles",
    "default_sources",
]
