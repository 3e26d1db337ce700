"""JSON schemas of run parameters as Airflow's Params: Airflow checks them and builds the form in its UI from them."""

from __future__ import annotations

from airflow.sdk import Param

from coral_tasks.tasks.run_parameters import Schema


def params_of(schemas: Schema) -> dict[str, Param]:
    """One Param for each schema, in its order."""
    return {name: Param(**schema) for name, schema in schemas.items()}
