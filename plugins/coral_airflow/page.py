"""The page in Airflow's UI: an application of our own that Airflow's server mounts. Reads only.

Airflow mounts a plugin's application without any authentication, so every route here asks for a user who may read the
DAG ``coral_allocation``: an API client by its token, a browser by the session cookie of Airflow's UI. Imported at the
first request only, see ``page_link.LazyPage``.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from coral_airflow.page_link import airflow_root
from coral_tasks.reporting import dashboard
from coral_tasks.settings import Settings
from coral_tasks.tasks import views

DAG: Final = "coral_allocation"
_FILES: Final = Path(__file__).parent / "page_files"

HEADERS: Final = {
    # Scripts from our own files only: a name that slips through unescaped still runs nothing.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data: blob:; "
        "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def require_reader(user: GetUserDep) -> None:
    """401 without a valid token or session (from ``GetUserDep``), 403 for a user who may not read the DAG."""
    if not get_auth_manager().is_authorized_dag(method="GET", details=DagDetails(id=DAG), user=user):
        raise HTTPException(403, f"reading the DAG {DAG} is not permitted")


def build_app() -> FastAPI:
    """The application. Every route depends on ``require_reader``; there are no documentation routes."""
    # No redirects of addresses with a slash too many: they would answer before anyone was asked who he is.
    app = FastAPI(
        title="Coral",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        dependencies=[Depends(require_reader)],
    )
    app.get("/")(overview)
    app.get("/overview.json")(overview_json)
    app.get("/run")(run)
    app.get("/transition")(transition)
    app.get("/library")(library)
    app.get("/coral.js")(script)
    app.get("/plotly.min.js")(plotly)
    return app


def overview() -> Response:
    """The main page."""
    return _html(dashboard.overview_page(views.overview(Settings()), airflow=airflow_root()))


def overview_json() -> Response:
    """The main page's values, for machines."""
    return JSONResponse(views.overview(Settings()), headers=HEADERS)


def run(id: str) -> Response:  # noqa: A002 - the name in the address
    """The page of one run; 404 if it is not kept."""
    return _found("No such run", lambda: dashboard.run_page(views.run_view(Settings(), id), airflow=airflow_root()))


def transition(id: str) -> Response:  # noqa: A002 - the name in the address
    """The transition of one run, drawn; 404 if it is not kept."""
    return _found("No such transition", lambda: views.transition_page(Settings(), id).decode())


def library(before: str, after: str) -> Response:
    """What changed between two published versions; 404 if one is not published."""
    return _found("No such version", lambda: dashboard.library_diff_page(views.library_diff(Settings(), before, after)))


def _found(title: str, build: Callable[[], str]) -> Response:
    try:
        return _html(build())
    except views.NotKept as error:
        return _html(dashboard.message_page(title, str(error)), status=404)


def _html(document: str, status: int = 200) -> Response:
    return HTMLResponse(document, status_code=status, headers=HEADERS)


def script() -> Response:
    """The page's own script."""
    return Response((_FILES / "coral.js").read_bytes(), media_type="text/javascript", headers=HEADERS)


def plotly(request: Request) -> Response:
    """Plotly's script from its own package: no address outside is ever asked. Packed, since it is megabytes."""
    tag, packed = _packed_plotly()
    headers = {**HEADERS, "Cache-Control": "private, no-cache", "ETag": tag, "Vary": "Accept-Encoding"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, media_type="text/javascript", headers={**headers, "Content-Encoding": "gzip"})
    return Response(gzip.decompress(packed), media_type="text/javascript", headers=headers)


@lru_cache(maxsize=1)
def _packed_plotly() -> tuple[str, bytes]:
    data = dashboard.plotly_script().encode()
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"', gzip.compress(data, 6, mtime=0)
