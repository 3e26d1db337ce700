"""Run DAGs to their end in this process, without a scheduler: ``python local_run.py DAG_ID=JSON …``.

Each argument names a DAG and its configuration. Exit status 1 if a run did not succeed; its failed tasks are
named. Used by ``coral demo``; the runs appear in the UI like any other.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    """Run every named DAG, one after the other; stop at the first that fails."""
    from airflow.configuration import conf
    from airflow.dag_processing.dagbag import DagBag

    logging.disable(logging.INFO)
    folder = Path(conf.get("core", "dags_folder"))
    bag = DagBag(folder, bundle_path=folder, bundle_name="dags-folder")
    if bag.import_errors:
        for path, error in sorted(bag.import_errors.items()):
            sys.stderr.write(f"{path}: {error}\n")
        return 1
    for argument in arguments:
        dag_id, _, text = argument.partition("=")
        if not _run(bag.dags[dag_id], json.loads(text or "{}")):
            return 1
    return 0


def _run(dag: Any, run_conf: dict[str, Any]) -> bool:
    run = dag.test(run_after=datetime.now(UTC), logical_date=None, run_conf=run_conf)
    failed = sorted(ti.task_id for ti in run.get_task_instances() if ti.state not in ("success", "skipped"))
    if run.state != "success":
        sys.stderr.write(f"{dag.dag_id}: run {run.run_id} ended {run.state}; not successful: {', '.join(failed)}\n")
    return bool(run.state == "success")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
