"""The page in Airflow's UI: closed to the unauthenticated on every route, escaped, linked from task instances."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*httpx.*"),
]

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


@pytest.fixture(scope="module")
def client(dag_bag):
    """Airflow's own server application with the plugin mounted, without a listening port."""
    from airflow.api_fastapi.app import create_app
    from airflow.utils.db import initdb
    from fastapi.testclient import TestClient

    # Without passwords (coral serve on loopback) Airflow itself makes everyone an administrator.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS", "False")
        initdb()  # tokens are looked up among the revoked ones
        yield TestClient(create_app(apps="core"), base_url="http://127.0.0.1:8080", follow_redirects=False)


@pytest.fixture(scope="module")
def token(client) -> str:
    """A valid token of an administrator."""
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    return get_auth_manager().generate_jwt(SimpleAuthManagerUser(username="test", role="ADMIN"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    """An empty data folder."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    return tmp_path


def routes() -> list[str]:
    """Addresses of all routes of the page's application, their parameters filled in."""
    from coral_airflow.page import build_app

    query = {"/run": "?id=r1", "/transition": "?id=r1", "/library": "?before=a&after=b"}
    return [f"/coral{route.path}{query.get(route.path, '')}" for route in build_app().routes]


def test_every_route_refuses_the_unauthenticated(client, home) -> None:
    """Without a token, with a bad one and with a bad cookie, no route answers; there is more than one route."""
    addresses = routes()
    assert len(addresses) >= 6
    for address in addresses:
        assert client.get(address).status_code == 401, address
        bad = client.get(address, headers={"Authorization": "Bearer nonsense"}).status_code
        assert bad in {401, 403}, address
        assert client.get(address, headers={"Cookie": "_token=nonsense"}).status_code in {401, 403}, address


def test_routes_that_change_anything_do_not_exist(client, home, token) -> None:
    """The page only reads: no method but GET is known, even to an administrator."""
    for method in ("post", "put", "patch", "delete"):
        assert getattr(client, method)("/coral/", headers={"Authorization": f"Bearer {token}"}).status_code == 405


def test_a_user_who_may_not_read_the_dag_is_refused(client, home, token, monkeypatch) -> None:
    """Airflow's permissions hold for every route."""
    from airflow.api_fastapi.app import get_auth_manager

    asked = []

    def refuse(*, method, user, details=None, **_):
        asked.append((method, details.id))
        return False

    monkeypatch.setattr(get_auth_manager(), "is_authorized_dag", refuse)
    for address in routes():
        assert client.get(address, headers={"Authorization": f"Bearer {token}"}).status_code == 403, address
    assert set(asked) == {("GET", "coral_allocation")}


@pytest.mark.parametrize("how", ["token", "cookie"])
def test_an_empty_home_gives_a_page(client, home, token, how: str) -> None:
    """API clients by token and browsers by Airflow's cookie see a page that says what to run first."""
    headers = {"Authorization": f"Bearer {token}"} if how == "token" else {"Cookie": f"_token={token}"}
    answer = client.get("/coral/", headers=headers)
    assert answer.status_code == 200
    assert "No plan is in force yet" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "unsafe-eval" not in answer.headers["content-security-policy"]


def test_nothing_is_fetched_from_outside(client, home, token) -> None:
    """The page names no other host, and plotly comes from its own package through our application."""
    headers = {"Authorization": f"Bearer {token}"}
    page = client.get("/coral/", headers=headers).text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    script = client.get("/coral/plotly.min.js", headers=headers)
    assert script.status_code == 200
    assert "plotly.js v" in script.text[:500]
    again = client.get("/coral/plotly.min.js", headers={**headers, "If-None-Match": script.headers["etag"]})
    assert again.status_code == 304


def test_unknown_runs_and_versions_are_not_found(client, home, token) -> None:
    """A run or version that is not kept, or is no id, is a 404 that says so, escaped."""
    headers = {"Authorization": f"Bearer {token}"}
    for address in (
        "/coral/run?id=nope",
        f"/coral/run?id={quote(HOSTILE)}",
        "/coral/run?id=../../etc",
        f"/coral/library?before={quote(HOSTILE)}&after=b",
    ):
        answer = client.get(address, headers=headers)
        assert answer.status_code == 404, address
        assert "<script>alert" not in answer.text
    assert not (home / "runs").exists()


def test_failures_of_a_run_are_shown_escaped(client, home, token) -> None:
    """What an error message holds is text on the page, never markup."""
    folder = home / "runs" / "manual__2026-11-29T10:00:00+00:00" / "failures"
    folder.mkdir(parents=True)
    failure = {"task": "gate", "error": "ValidationFailed", "message": HOSTILE, "expected": True}
    (folder / "gate.json").write_text(json.dumps(failure), encoding="utf-8")
    headers = {"Authorization": f"Bearer {token}"}
    for address in ("/coral/", "/coral/run?id=manual__2026-11-29T10:00:00%2B00:00"):
        text = client.get(address, headers=headers).text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "<script>alert(1)" not in text
        assert "<img" not in text


def test_task_instances_link_to_their_run() -> None:
    """Tasks of Coral's DAGs have a button to the run's page, other DAGs' tasks none."""
    from airflow import plugins_manager

    (link,) = [one for one in plugins_manager.get_global_operator_extra_links() if one.name == "Coral"]
    mine = SimpleNamespace(dag_id="coral_allocation", run_id="manual__2026-11-29T10:00:00+00:00")
    assert link.get_link(None, ti_key=mine) == "/plugin/coral/coral/run?id=manual__2026-11-29T10%3A00%3A00%2B00%3A00"
    assert link.get_link(None, ti_key=SimpleNamespace(dag_id="other", run_id="x")) == ""


def test_the_page_has_an_entry_in_the_navigation(client, token) -> None:
    """Airflow's UI learns of the view from its plugins route."""
    answer = client.get("/api/v2/plugins", headers={"Authorization": f"Bearer {token}"})
    (plugin,) = [one for one in answer.json()["plugins"] if one["name"] == "coral"]
    (view,) = plugin["external_views"]
    assert (view["href"], view["destination"], view["url_route"]) == ("/coral/", "nav", "coral")
