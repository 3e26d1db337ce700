"""CPU seconds and memory of building all profile tables of a setup, from a cold start.

``python benchmarks/bench_profiles.py [SETUP]``; prints one JSON object. Wall time depends on what else runs; CPU time
is that of this process (all its threads). Target of issue 3: the extended setup under 60 s on 2 cores and 1 GiB.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from coral_tasks.catalog import load_catalog
from coral_tasks.profiling import build_profiles


def main() -> None:
    setup = load_catalog().setup(sys.argv[1] if len(sys.argv) > 1 else "extended")
    wall, cpu = time.perf_counter(), time.process_time()
    report = build_profiles(setup)
    result = {
        "setup": setup.name,
        "tables": len(report.tables),
        "cells": sum(table.throughput.size for table in report.tables),
        "cpu_s": round(time.process_time() - cpu, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "sources": {},
    }
    for table in report.tables:
        for source in table.sources:
            result["sources"][source.value] = result["sources"].get(source.value, 0) + 1
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
