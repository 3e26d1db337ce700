"""How long Airflow needs to parse each DAG file, beside the import of Airflow itself in the same process."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from pathlib import Path

from coral_tasks.tasks.local_airflow import PROJECT, airflow_environment


def main() -> None:
    os.environ.update(airflow_environment(Path(tempfile.mkdtemp(prefix="coral-bench-"))))
    begun = time.process_time()
    from airflow.dag_processing.dagbag import DagBag

    airflow_s = time.process_time() - begun
    DagBag(PROJECT / "dags", bundle_path=PROJECT / "dags", bundle_name="dags-folder")  # first parse warms imports
    bag = DagBag(PROJECT / "dags", bundle_path=PROJECT / "dags", bundle_name="dags-folder")
    print(f"{platform.machine()}, Python {platform.python_version()}, import of Airflow {airflow_s:.2f} CPU-s")
    for stat in bag.dagbag_stats:
        seconds = stat.duration.total_seconds()
        print(f"{stat.file}: {seconds:.3f} s, {seconds / airflow_s:.1%} of Airflow's own import, {stat.task_num} tasks")


if __name__ == "__main__":
    main()
