"""CPU seconds from profile tables in memory to reduced template sets in memory, one placement per kept template.

    python benchmarks/bench_placement.py [core] [one] [extended] [ilp] [--processes N]

Tables are the synthetic roofline of ``placement.reference_tables``. Compilation is done before the clock starts. CPU
seconds are summed over all processes; the machine may be shared, so wall time is printed beside them. ``ilp``
compares one combination with PuLP + HiGHS and PuLP + CBC.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import time
from importlib.metadata import version

import numpy as np

from coral_tasks.domain.models import LatencySlo, RequestShape
from coral_tasks.domain.names import LatencySplit, ModelId, NodeConfigurationId, Phase
from coral_tasks.domain.profiles import LimitedBy, ProfileSource, ProfileTable
from coral_tasks.optimization.mip import SolverName
from coral_tasks.optimization.placement_ilp import solve_placement_program
from coral_tasks.placement.combinations import build_tree
from coral_tasks.placement.reference_tables import (
    CONFIGURATIONS,
    CORE_CONFIGURATIONS,
    MODELS,
    configuration_memory_gb,
    make_table,
)
from coral_tasks.placement.search import solve_tree
from coral_tasks.templates import BuildOptions, build_template_sets

PHASES = (Phase.PREFILL, Phase.DECODE)
TARGETS = {"core": (2, 5), "one": (8, 30), "extended": (40, 150)}


def profile_table(model: str, phase: Phase, names: tuple[str, ...], **options) -> ProfileTable:
    parts = MODELS[model]
    values = make_table(model, phase.value, configs=names, **options)
    count = len(names)
    return ProfileTable(
        model=ModelId(model),
        num_layers=values.shape[1],
        checkpoint_bytes=parts.size_gb * 1e9,
        phase=phase,
        slo=LatencySlo(ttft_s=parts.slo_ms[0] / 1e3, tpot_s=parts.slo_ms[1] / 1e3),
        shape=RequestShape(
            mean_prompt_tokens=parts.prompt,
            p95_prompt_tokens=parts.prompt,
            mean_output_tokens=parts.context,
            p95_output_tokens=parts.context,
        ),
        configurations=tuple(NodeConfigurationId(name) for name in names),
        node_memory_bytes=tuple(round(configuration_memory_gb(name) * 1e9) for name in names),
        tp_degree=tuple(int(name.rpartition("x")[2]) for name in names),
        throughput=values,
        limited_by=np.full(values.shape, LimitedBy.LATENCY.value, np.uint8),
        sources=(ProfileSource.ANALYTIC,) * count,
        provenance=("synthetic roofline",) * count,
        version="benchmark",
    )


def libraries(wanted: list[str]) -> dict[str, tuple[list[ProfileTable], float | None]]:
    """Tables and rho of each library asked for."""
    core = ("phi4-14b", "gpt-oss-20b", "qwen3-32b")
    made: dict[str, tuple[list[ProfileTable], float | None]] = {}
    if "core" in wanted:
        made["core"] = ([profile_table(m, p, CORE_CONFIGURATIONS) for m in core for p in PHASES], 12.0)
    if "one" in wanted:
        for phase in PHASES:
            made[f"one {phase}"] = ([profile_table("qwen3-235b", phase, CONFIGURATIONS)], None)
    if "extended" in wanted:
        made["extended"] = ([profile_table(m, p, CONFIGURATIONS) for m in MODELS for p in PHASES], 12.0)
    return made


def cpu_s() -> float:
    """Of this process and of those that have ended."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measure(name: str, tables: list[ProfileTable], rho: float | None, split: LatencySplit, processes: int) -> None:
    options = BuildOptions(latency_split=split, memory_ratio=rho)
    cpu, wall = cpu_s(), time.monotonic()
    counts = [result.counts for _, result in build_template_sets(tables, options, processes=processes)]
    cpu, wall = cpu_s() - cpu, time.monotonic() - wall
    solved = sum(one.num_possible - one.num_beyond_memory for one in counts)
    positive = solved - sum(one.num_infeasible for one in counts)
    kept = sum(one.num_kept for one in counts)
    extra = sum(one.num_vllm_extra for one in counts)
    target = TARGETS[name.partition(" ")[0]][split is LatencySplit.FREE]
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20
    print(
        f"{name:14} {split.value:6} {solved:>9,} combinations, {positive:>9,} positive, {kept:>8,} kept (+{extra} vllm)"
        f"  {cpu:7.1f} CPU s (target {target}), {wall:7.1f} s wall, {cpu / solved * 1e6:5.1f} us each,"
        f" peak {peak:.2f} GiB in one process, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def compare_with_ilp(time_limit_s: float) -> None:
    """The same combinations by the search and by the program, CPU seconds each."""
    solvers = [SolverName.PULP_HIGHS] + ([SolverName.PULP_CBC] if shutil.which("cbc") else [])
    for layers, nodes in ((16, [0, 1, 8]), (64, [0, 1, 8]), (64, [0, 1, 2, 8])):
        table = make_table("qwen3-32b", "decode", configs=CORE_CONFIGURATIONS, layers=layers)
        counts = np.bincount(nodes, minlength=len(table))
        tree = build_tree(max_nodes=len(nodes), num_configurations=len(table), max_counts=counts)
        solve_tree(table, tree, LatencySplit.EQUAL)
        begun = time.process_time()
        for _ in range(20):
            best = solve_tree(table, tree, LatencySplit.EQUAL).throughput[tree.id_of(nodes)]
        ours = (time.process_time() - begun) / 20
        print(
            f"{len(nodes)} nodes, {layers} layers, equal: search with all {tree.total - 1} sub-combinations "
            f"{ours * 1e6:,.0f} us -> {best:g}"
        )
        for solver in solvers:
            begun = cpu_s()
            found, _, proved = solve_placement_program(
                table, nodes, LatencySplit.EQUAL, solver=solver, time_limit_s=time_limit_s
            )
            spent = cpu_s() - begun
            print(
                f"    {solver.value:10} {spent:8.1f} CPU s -> {found:g}{'' if proved else ' (cut off)'}, "
                f"{spent / ours:,.0f} times",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["core"], choices=["core", "one", "extended", "ilp"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--split", choices=["equal", "free", "both"], default="both")
    parser.add_argument("--ilp-limit-s", type=float, default=30.0)
    given = parser.parse_args()
    packages = ", ".join(f"{name} {version(name)}" for name in ("numba", "numpy", "pulp", "highspy"))
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {packages}, {given.processes} processes"
    )
    splits = [split for split in LatencySplit if given.split in (split.value, "both")]
    for split in splits:  # compile, or load what is compiled
        list(
            build_template_sets(
                [profile_table("qwen3-32b", Phase.DECODE, ("L4x1", "L4x2"), layers=4)],
                BuildOptions(latency_split=split),
            )
        )
    for name, (tables, rho) in libraries(given.what).items():
        for split in splits:
            measure(name, tables, rho, split, given.processes)
    if "ilp" in given.what:
        compare_with_ilp(given.ilp_limit_s)


if __name__ == "__main__":
    main()
