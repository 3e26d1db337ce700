"""100 allocation runs one after another by Airflow itself (``dag.test()``), with node agents and simulated engines.

Run: ``python benchmarks/bench_runs.py [RUNS] [KEEP]``. Prints, every tenth of the way: memory of the process that runs
the DAGs, files and bytes in the data folder and what of them grew, rows that one run adds to Airflow's XCom table; then
where the time of a run goes, from trigger to commands sent. Demand goes up and down, so that every run has something
to send. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sqlite3
import statistics
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from coral_tasks.tasks.local_airflow import PROJECT, airflow_environment, migrate_database

DAG = "coral_allocation"
MODELS = ("gpt-oss-20b", "phi-4-14b", "qwen3-32b")
RATES = (2.0, 3.0)
"""Requests/s of every model in turn."""


def free_range(count: int) -> int:
    for first in range(12000, 32000, count):
        try:
            with socket.create_server(("127.0.0.1", first)), socket.create_server(("127.0.0.1", first + count - 1)):
                return first
        except OSError:
            continue
    raise SystemExit("no free ports")


def prepare(home: Path) -> None:
    """Library, agents and Airflow's database."""
    from coral_tasks.settings import Settings
    from coral_tasks.tasks import demo, nightly

    migrate_database(home)
    profiled = [nightly.profile(item) for item in nightly.plan_profiling("night", {})]
    nightly.publish([nightly.build_templates(item) for item in nightly.plan_templates(profiled)])
    demo.ensure_agents(Settings())


def run_once(dag: Any, number: int) -> str:
    demand = [{"model": model, "requests_per_s": RATES[number % len(RATES)]} for model in MODELS]
    conf = {"reason": f"run {number}", "demand": demand, "as_of": "2026-11-29T12:00:00+00:00"}
    now = datetime.now(UTC)  # a date of its own: Airflow deletes an earlier run of the same one
    run = dag.test(run_after=now, logical_date=now, run_conf=conf)
    if str(run.state) != "success":
        failed = [one.task_id for one in run.get_task_instances() if one.state == "failed"]
        raise SystemExit(f"run {number} ended {run.state}: {failed}")
    return str(run.run_id)


def resident_mb() -> float:
    """Of this process, now: not its peak."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def agents_mb() -> tuple[float, int]:
    """Resident memory of the node agents, and how many processes they have: agents and engines."""
    import psutil

    home, agents = os.environ["CORAL_HOME"], []
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if "agent" in words and home in " ".join(words):
            agents.append(one)
    engines = {child.pid for one in agents for child in one.children(recursive=True)} - {one.pid for one in agents}
    return sum(one.memory_info().rss for one in agents) / 1e6, len(agents) + len(engines)


def files(home: Path) -> dict[str, tuple[int, int]]:
    """Number and bytes of files by first folder; a file with two names counts once."""
    found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    seen: set[int] = set()
    for folder, _, names in os.walk(home):
        for name in names:
            path = Path(folder) / name
            try:
                stat = path.lstat()
            except OSError:
                continue
            if stat.st_ino in seen:
                continue
            seen.add(stat.st_ino)
            parts = path.relative_to(home).parts
            top = "/".join(parts[:2]) if parts[0] == "airflow" else parts[0]
            found[top][0] += 1
            found[top][1] += stat.st_size
    return {name: (one[0], one[1]) for name, one in sorted(found.items())}


def query(home: Path, text: str, *values: object) -> list[tuple[Any, ...]]:
    with sqlite3.connect(home / "airflow" / "airflow.db", timeout=30.0) as database:
        return database.execute(text, values).fetchall()


def report(home: Path, number: int, run: str) -> None:
    listed = files(home)
    runs, xcom = listed.get("runs", (0, 0)), query(home, "SELECT COUNT(*) FROM xcom WHERE run_id = ?", run)[0][0]
    dispatch = listed.get("dispatch", (0, 0))
    rest = sum(size for name, (_, size) in listed.items() if name not in {"runs", "dispatch", "airflow/airflow.db"})
    agents, processes = agents_mb()
    print(
        f"{number:>4} runs: {resident_mb():6.1f} MB resident; agents {agents:6.1f} MB in {processes} processes; "
        f"runs/ {runs[0]:>5} files {runs[1] / 1e6:7.2f} MB; "
        f"dispatch/ {dispatch[0]:>3} files {dispatch[1] / 1e6:6.2f} MB; the rest {rest / 1e6:7.2f} MB; "
        f"{xcom} XCom rows of the last run",
        flush=True,
    )


def where_time_goes(home: Path, runs: list[str]) -> None:
    """Median seconds of each task, and from the run's begin to the end of dispatch."""
    spent: defaultdict[str, list[float]] = defaultdict(list)
    total = []
    for run in runs:
        found = query(
            home,
            "SELECT task_id, map_index, start_date, end_date FROM task_instance WHERE run_id = ? AND dag_id = ?",
            run,
            DAG,
        )
        times = [(task, datetime.fromisoformat(a), datetime.fromisoformat(b)) for task, _, a, b in found if a and b]
        for task, begun, ended in times:
            spent[task].append((ended - begun).total_seconds())
        begin = min(begun for _, begun, _ in times)
        total.append((next(ended for task, _, ended in times if task == "dispatch") - begin).total_seconds())
    for task, seconds in sorted(spent.items(), key=lambda one: -statistics.median(one[1])):
        print(f"  {task:<16}{statistics.median(seconds):7.2f} s median, {max(seconds):7.2f} s most")
    middle, most = statistics.median(total), max(total)
    print(f"  trigger to commands sent and fleet as planned: {middle:.2f} s median, {most:.2f} s most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=int, nargs="?", default=100)
    parser.add_argument("keep", type=int, nargs="?", default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ.update(airflow_environment(home))
        os.environ |= {"CORAL_KEEP_RUNS": str(given.keep), "CORAL_FIRST_AGENT_PORT": str(free_range(1600))}
        from coral_tasks.tasks import local_fleet

        begun = time.monotonic()
        prepare(home)
        print(f"prepared in {time.monotonic() - begun:.0f} s; {given.runs} runs, {given.keep} folders kept")
        try:
            measure(home, given.runs)
        finally:
            local_fleet.stop_agents(home)


def measure(home: Path, num_runs: int) -> None:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(PROJECT / "dags", bundle_path=PROJECT / "dags", bundle_name="dags-folder")
    done: list[str] = []
    cpu_s = time.process_time()
    for number in range(num_runs):
        done.append(run_once(bag.dags[DAG], number))
        if (number + 1) % max(1, num_runs // 10) == 0:
            report(home, number + 1, done[-1])
    print(f"{(time.process_time() - cpu_s) / num_runs:.2f} CPU-s of this process a run")
    kept = [one / "dispatch.json" for one in (home / "runs").iterdir()]
    sent = [json.loads(one.read_bytes()).get("num_commands", 0) for one in kept if one.exists()]
    print(f"commands in the runs kept: {sum(sent)} in {len(sent)}")
    where_time_goes(home, done)


if __name__ == "__main__":
    main()
