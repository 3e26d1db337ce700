"""From planned instances to what agents need to start them. Pure. Owns the translation of a template to a StartSpec."""

from __future__ import annotations

import re
from collections.abc import Mapping

from coral_tasks.dispatch.observation import Observation
from coral_tasks.domain.errors import ValidationFailed, Violation
from coral_tasks.domain.fleet import ServingInstance
from coral_tasks.domain.names import ModelId, NodeConfigurationId, Runtime
from coral_tasks.domain.plan import AllocationPlan
from coral_tasks.domain.templates import ServingTemplate
from coral_tasks.domain.transition import Transition
from coral_tasks.protocol.messages import StageSpec, StartSpec

_COUNT = re.compile(r".+x(\d+)\Z")


def start_specs(
    transition: Transition, plan: AllocationPlan, observation: Observation, model_names: Mapping[ModelId, str]
) -> dict[str, StartSpec]:
    """StartSpec, of rank 0, for each new instance whose nodes exist already."""
    return {
        str(instance.id): start_spec(instance, plan.template(instance.template), observation, model_names)
        for instance in transition.started
        if all(node in observation.nodes for node in instance.nodes)
    }


def start_spec(
    instance: ServingInstance,
    template: ServingTemplate,
    observation: Observation,
    model_names: Mapping[ModelId, str],
) -> StartSpec:
    """What the head needs to know; other nodes get the same with their rank.

    ``latency_s`` is the part of the SLO that the placement's stages use, what the simulated engine answers with.
    """
    placement = template.placement
    head = observation.nodes[instance.nodes[0]]
    used = sum(stage.num_quanta for stage in placement.stages) / placement.total_quanta
    return StartSpec(
        instance=instance.id,
        template=template.id,
        model=template.model,
        model_name=model_names.get(template.model, template.model),
        phase=template.phase,
        region=instance.region,
        market=instance.market,
        throughput=template.throughput,
        latency_s=template.slo.limit_s(template.phase) * used,
        stages=tuple(
            StageSpec(num_layers=stage.num_layers, nodes=nodes)
            for stage, nodes in zip(placement.stages, instance.stage_nodes, strict=True)
        ),
        rank=0,
        tp_degree=tensor_parallel_degree(template),
        master_address=head.address,
        master_port=head.master_port,
    )


def tensor_parallel_degree(template: ServingTemplate) -> int:
    """All GPUs of a node work together; stock vLLM needs the same number in every stage.

    For the hybrid runtime the first stage's is given. Raises ValidationFailed if a configuration's id names no count
    or a vLLM template mixes counts.
    """
    degrees = [num_gpus(configuration) for stage in template.placement.stages for configuration in stage.nodes]
    if template.runtime is Runtime.VLLM and len(set(degrees)) != 1:
        rule = "a template for stock vLLM needs the same number of GPUs in every node"
        raise ValidationFailed([Violation(table="templates", row=template.id, value=str(degrees), rule=rule)])
    return degrees[0]


def num_gpus(configuration: NodeConfigurationId) -> int:
    """GPUs of a node configuration, from its id ``<gpu>x<count>``."""
    found = _COUNT.match(configuration)
    if found is None:
        rule = "a node configuration's id ends in x and its number of GPUs"
        raise ValidationFailed([Violation(table="node_configurations", row="", value=configuration, rule=rule)])
    return int(found[1])
