"""Where Coral's page lies in Airflow's UI, and the links from task instances to it.

Every Airflow component imports this, so it stays light: the application itself is built at its first request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import quote, urlsplit

from airflow.sdk import BaseOperatorLink

PREFIX: Final = "/coral"
ROUTE: Final = "coral"
"""Of the view: the UI shows it at ``/plugin/coral``."""


def airflow_root() -> str:
    """Path under which Airflow's UI lies, "" for the root of the host."""
    from airflow.configuration import conf

    return urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/")


def run_address(run_id: str) -> str:
    """Coral's page of one run, inside Airflow's frame."""
    root = airflow_root()
    return f"{root}/plugin/{ROUTE}{root}{PREFIX}/run?id={quote(run_id, safe='')}"


def transition_address(run_id: str) -> str:
    """The run's transition step by step, inside Airflow's frame."""
    root = airflow_root()
    return f"{root}/plugin/{ROUTE}{root}{PREFIX}/transition?id={quote(run_id, safe='')}"


class RunLink(BaseOperatorLink):
    """Button of a task instance that opens Coral's page of its run; absent from DAGs that are not Coral's."""

    name = "Coral"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:  # noqa: ARG002 - Airflow's signature
        """The address, "" for other DAGs."""
        return run_address(ti_key.run_id) if ti_key.dag_id.startswith("coral_") else ""


class LazyPage:
    """The page's application, imported and built at the first request: schedulers and workers never need it."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(
        self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        """One ASGI call."""
        if self._app is None:
            from coral_airflow.page import build_app

            self._app = build_app()
        await self._app(scope, receive, send)
