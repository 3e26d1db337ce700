"""Derives the day of demand of a setup from request traces: what ``coral demand derive`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from coral_tasks.domain.errors import ValidationFailed, Violation

TRACE_OF: Final = {
    "phi-4-14b": "conv",
    "gpt-oss-20b": "code",
    "gpt-oss-120b": "conv",
    "qwen3-235b": "code",
}
"""Which Azure trace a model follows (design, section 7); a model that is not here follows BurstGPT's stated lengths."""


def derive_demand_day(setup: str, traces: Sequence[Path], out: Path) -> int:
    """Write the setup's day of demand to ``out`` (CSV); rows written.

    A trace belongs to the models whose kind ("conv" or "code") is part of its file name. Raises ValidationFailed if
    a needed trace is missing or given twice, and what ``read_trace`` raises; nothing is written then.
    """
    from coral_tasks.catalog import load_catalog
    from coral_tasks.ingestion.trace_demand import ModelDay, derive_day, write_day
    from coral_tasks.ingestion.trace_file import read_trace

    models = load_catalog().setup(setup).models
    paths = _by_kind(traces, {TRACE_OF[one.model.id] for one in models if one.model.id in TRACE_OF})
    read = {kind: read_trace(path) for kind, path in paths.items()}
    rows = []
    for one in models:
        kind = TRACE_OF.get(one.model.id)
        wish = ModelDay(
            model=one.model.id,
            mean_requests_per_s=one.requests_per_s,
            trace=None if kind is None else read[kind],
            stated_shape=one.shape,
            source="burstgpt lengths, daily curve" if kind is None else f"azure {kind} trace 2023-11-16",
        )
        rows += derive_day(wish)
    header = {
        "source": "Azure/AzurePublicDataset, LLM inference traces of 2023-11-16, CC-BY (Splitwise, ISCA 2024)",
        "rule": "one hour repeated with a daily curve and scaled to the setup; see ingestion/trace_demand.py",
        "made by": f"coral demand derive --setup {setup} --trace FILE --trace FILE --out FILE",
    }
    _write(out, write_day(rows, header))
    return len(rows)


def _by_kind(traces: Sequence[Path], kinds: set[str]) -> dict[str, Path]:
    fitting = {kind: [path for path in traces if kind in path.name] for kind in sorted(kinds)}
    bad = [
        Violation(table="traces", row="", value=", ".join(path.name for path in traces), rule=_rule(kind, found))
        for kind, found in fitting.items()
        if len(found) != 1
    ]
    if bad:
        raise ValidationFailed(bad)
    return {kind: found[0] for kind, found in fitting.items()}


def _rule(kind: str, found: Sequence[Path]) -> str:
    return f"needs exactly one trace whose name holds {kind!r}, got {len(found)}"


def _write(path: Path, text: str) -> None:
    from coral_tasks.storage.runs import write_whole

    write_whole(path, text.encode())
