"""Make Airflow's database ready for Coral's DAGs: ``python plugins/coral_airflow/prepare.py``, as often as one likes.

Creates or upgrades the database, then makes the pools that are missing. A pool that is there keeps its slots: a person
may have changed them. To be run before Airflow starts, by ``coral serve``, ``coral demo`` or a deployment of your own;
a task whose pool does not exist would never be scheduled.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Migrate by Airflow's own command, in this process; then the pools."""
    from airflow.__main__ import main as airflow

    sys.argv = ["airflow", "db", "migrate"]
    airflow()
    for name in make_pools():
        sys.stdout.write(f"pool {name} made\n")
    return 0


def make_pools() -> list[str]:
    """One pool for each GPU type, with ``CORAL_MEASUREMENT_SLOTS`` slots; names of those that were made."""
    from airflow.models.pool import Pool

    from coral_airflow.policy import GPU_TYPES, gpu_pool
    from coral_tasks.settings import Settings

    slots, known = Settings().measurement_slots, {pool.pool for pool in Pool.get_pools()}
    missing = [one for one in GPU_TYPES if gpu_pool(one) not in known]
    for gpu_type in missing:
        text = f"Nodes with {gpu_type} that are measured at the same time"
        Pool.create_or_update_pool(gpu_pool(gpu_type), slots, text, include_deferred=True)
    return [gpu_pool(one) for one in missing]


if __name__ == "__main__":
    sys.exit(main())
