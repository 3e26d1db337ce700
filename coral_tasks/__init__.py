"""Coral's planner, node agents and tasks: everything that is not Airflow.

Nothing below this package imports ``airflow``; layers are listed in ``docs/architecture.md`` and checked in
``tests/architecture``.
"""
