"""Serving templates from profile tables: enumeration, lossless reduction, runtime rule (design 2.3).

* ``BuildOptions(max_nodes=6, memory_ratio=12.0, latency_split=FREE, reduction=PAIRS, keep=())``
* ``build_template_set(table, options) -> BuildResult(templates: TemplateSet, counts: TemplateCounts)``
No files: the library on disk is ``storage.library``.
"""

from coral_tasks.templates.build import BuildResult, build_template_set
from coral_tasks.templates.options import BuildOptions, Reduction, TemplateCounts

__all__ = ["BuildOptions", "BuildResult", "Reduction", "TemplateCounts", "build_template_set"]
