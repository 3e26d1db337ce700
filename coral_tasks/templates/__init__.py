"""Serving templates from profile tables: enumeration, lossless reduction, runtime rule (design 2.3).

* ``BuildOptions(max_nodes=6, memory_ratio=12.0, latency_split=FREE, reduction=PAIRS, keep=())``
* ``build_template_set(table, options) -> BuildResult(templates: TemplateSet, counts: TemplateCounts)``
* ``build_template_sets(tables, options, processes=…, keeper=…, on_progress=…)``: by a pool of processes.
* ``large_chunks``, ``keep_smaller``, ``keep_large_chunk``: the same by several machines, for the build to find.
* ``set_key(table, options)``: hash of everything a set is made from.
No files: the library on disk is ``storage.library``.
"""

from coral_tasks.templates.build import BuildResult, build_template_set
from coral_tasks.templates.options import BuildOptions, Reduction, TemplateCounts
from coral_tasks.templates.pool import (
    ChunkKeeper,
    Progress,
    build_template_sets,
    keep_large_chunk,
    keep_smaller,
    large_chunks,
    set_key,
)

__all__ = [
    "BuildOptions",
    "BuildResult",
    "ChunkKeeper",
    "Progress",
    "Reduction",
    "TemplateCounts",
    "build_template_set",
    "build_template_sets",
    "keep_large_chunk",
    "keep_smaller",
    "large_chunks",
    "set_key",
]
