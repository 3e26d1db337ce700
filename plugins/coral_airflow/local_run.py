"""Run DAGs to their end in this process, without a scheduler: ``python local_run.py PARENT RESULTS DAG_ID=JSON …``.

PARENT is the id of the process that starts this one: when that ends, however it ends, so does this. Each argument
after the results file names a DAG and its configuration; they run one after the other until one does
not succeed. RESULTS receives JSON: for each run its DAG, id, state and the tasks that did not succeed. Used by ``coral
demo``; the runs appear in the UI like any other.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    """Run every named DAG; exit status 1 if one did not succeed."""
    from airflow.configuration import conf
    from airflow.dag_processing.dagbag import DagBag

    from coral_tasks.tasks.local_airflow import end_with_parent

    end_with_parent(int(arguments[0]))
    results, wanted = Path(arguments[1]), arguments[2:]
    folder = Path(conf.get("core", "dags_folder"))
    bag = DagBag(folder, bundle_path=folder, bundle_name="dags-folder")
    for path, error in sorted(bag.import_errors.items()):
        sys.stderr.write(f"{path}: {error}\n")
    done: list[dict[str, Any]] = []
    for argument in wanted if not bag.import_errors else ():
        dag_id, _, text = argument.partition("=")
        done.append(_run(bag.dags[dag_id], json.loads(text or "{}")))
        results.write_text(json.dumps(done), encoding="utf-8")
        if done[-1]["state"] != "success":
            break
    return 0 if len(done) == len(wanted) and all(run["state"] == "success" for run in done) else 1


def _run(dag: Any, run_conf: dict[str, Any]) -> dict[str, Any]:
    # A date of its own: Airflow deletes an earlier run of the same one, and no date counts as one.
    now = datetime.now(UTC)
    run = dag.test(run_after=now, logical_date=now, run_conf=run_conf)
    failed = sorted({ti.task_id for ti in run.get_task_instances() if ti.state == "failed"})
    return {"dag": dag.dag_id, "run": run.run_id, "state": str(run.state), "failed": failed}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
