"""Coral in Airflow's UI: the page, its entry in the navigation and on DAG runs, links from task instances.

Every Airflow component imports this file: nothing heavy here.
"""

from __future__ import annotations

from typing import Any, ClassVar

from airflow.plugins_manager import AirflowPlugin
from coral_airflow.page_link import PREFIX, ROUTE, LazyPage, RunLink, airflow_root


class CoralPlugin(AirflowPlugin):
    """What Airflow collects from this file."""

    name = "coral"
    fastapi_apps: ClassVar[list[dict[str, Any]]] = [{"app": LazyPage(), "url_prefix": PREFIX, "name": "Coral"}]
    external_views: ClassVar[list[dict[str, Any]]] = [
        {
            "name": "Coral",
            "href": f"{airflow_root()}{PREFIX}/",
            "destination": "nav",
            "url_route": ROUTE,
            "nav_top_level": True,
        }
    ]
    global_operator_extra_links: ClassVar[list[Any]] = [RunLink()]
