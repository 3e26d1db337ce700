"""A template's pipeline drawn in text. Owns the drawing only."""

from __future__ import annotations

from coral_tasks.domain.names import Phase
from coral_tasks.domain.template_set import TemplateSet
from coral_tasks.domain.templates import ServingTemplate, Stage


def draw_template(templates: TemplateSet, row: int) -> str:
    """One template: stages, layers, nodes, latency shares and what limits it."""
    template = templates.template(row)
    limit_s = template.slo.limit_s(template.phase)
    lines = [
        template.id,
        f"  {template.throughput:,.6g} {template.phase.throughput_unit}, limited by {template.limited_by.name.lower()}",
        f"  {_slo(template)}, shares {template.latency_split.value}, runtime {template.runtime.value}",
        f"  profiles {templates.profile_version}: "
        + ", ".join(f"{name} {source.value}" for name, source in template.sources),
        "",
    ]
    first = 1
    for number, stage in enumerate(template.placement.stages, start=1):
        last = first + stage.num_layers - 1
        lines += _box(stage, number, (first, last), limit_s / template.placement.total_quanta)
        if last < template.placement.num_layers:
            lines.append("        │")
        first = last + 1
    spare = template.placement.total_quanta - sum(stage.num_quanta for stage in template.placement.stages)
    if spare:
        lines.append(f"  {spare} of {template.placement.total_quanta} latency quanta are left over")
    return "\n".join(lines)


def _slo(template: ServingTemplate) -> str:
    name = "TTFT" if template.phase is Phase.PREFILL else "TPOT"
    return f"{name} {template.slo.limit_s(template.phase) * 1e3:g} ms at {template.slo.percentile:g} %"


def _box(stage: Stage, number: int, layers: tuple[int, int], quantum_s: float) -> list[str]:
    nodes = ", ".join(f"{count} × {name}" if count > 1 else str(name) for name, count in stage.nodes.counts)
    share = stage.num_quanta * quantum_s * 1e3
    texts = [
        f"stage {number}: layers {layers[0]}–{layers[1]} ({stage.num_layers})",
        nodes,
        f"{stage.num_quanta} quanta = {share:.3g} ms",
    ]
    width = max(len(text) for text in texts)
    inner = [f"  │ {text:<{width}} │" for text in texts]
    return [f"  ┌{'─' * (width + 2)}┐", *inner, f"  └{'─' * (width + 2)}┘"]
