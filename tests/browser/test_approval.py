"""A person approves a change in Airflow's UI, against a real ``coral serve`` with real agents; then prices move."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from coral_tasks.settings import Settings
from coral_tasks.tasks import demo, local_fleet, nightly
from coral_tasks.tasks.local_airflow import PROJECT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DAG = "coral_allocation"
MODELS = ("gpt-oss-20b", "phi-4-14b", "qwen3-32b")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.airflow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


def small_demand(folder: Path) -> None:
    """A demand file of this moment, small enough for a laptop."""
    head = (
        "model,requests_per_s,mean_prompt_tokens,p95_prompt_tokens,mean_output_tokens,p95_output_tokens,"
        "interval_start,interval_s\n"
    )
    now = datetime.now(UTC).replace(microsecond=0).isoformat()
    folder.mkdir(exist_ok=True)
    lines = [f"{model},1.5,900,1800,120,300,{now},300\n" for model in MODELS]
    (folder / "demand.csv").write_text(head + "".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def served(tmp_path_factory, ports_in_a_row) -> Iterator[str]:
    """Address of Airflow's UI in mode approve, with a library and agents; all processes are ended afterwards."""
    home, port = tmp_path_factory.mktemp("approval"), ports_in_a_row(1601)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CORAL_HOME", str(home))
        patch.setenv("CORAL_UI_PORT", str(port))
        patch.setenv("CORAL_FIRST_AGENT_PORT", str(port + 1))
        patch.setenv("CORAL_MODE", "approve")
        profiled = [nightly.profile(item) for item in nightly.plan_profiling("night", {})]
        nightly.publish([nightly.build_templates(item) for item in nightly.plan_templates(profiled)])
        demo.ensure_agents(Settings())
        small_demand(home / "inputs")
        words = [str(Path(sys.executable).parent / "coral"), "serve"]
        process = subprocess.Popen(words, cwd=PROJECT, start_new_session=True)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(timeout=60)
            local_fleet.stop_agents(home)


def api(address: str, path: str, **params: object) -> dict:
    """Airflow's API; {} while it does not answer."""
    try:
        answer = httpx.get(f"{address}/api/v2/{path}", params=params, timeout=60.0)
    except httpx.HTTPError:
        return {}
    return answer.json() if answer.status_code == 200 else {}


def until(limit_s: float, what: str, look):
    """What ``look`` finds, as soon as it finds anything."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = look()
        if found:
            return found
        time.sleep(1.0)
    pytest.fail(f"{what} did not come within {limit_s:g} s")


def waiting_run(address: str) -> str:
    """Run whose question is open."""
    found = api(address, f"dags/{DAG}/dagRuns/~/hitlDetails", response_received=False).get("hitl_details", [])
    return found[0]["task_instance"]["dag_run_id"] if found else ""


def state(address: str, run: str) -> str:
    """State of a run once it has ended, "" before."""
    found = api(address, f"dags/{DAG}/dagRuns/{quote(run, safe='')}").get("state", "")
    return found if found in {"success", "failed"} else ""


@pytest.fixture(scope="module")
def page(served: str):
    """A page of headless Chromium of the system."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened = browser.new_context(viewport={"width": 1300, "height": 1000}).new_page()
        opened.set_default_timeout(90_000)
        yield opened
        browser.close()


def screenshot(page, name: str) -> None:
    """Kept only where CORAL_SCREENSHOTS names a folder."""
    folder = os.environ.get("CORAL_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


def test_a_person_approves_the_first_deployment(served: str, page) -> None:
    """The first scheduled run asks, since nothing runs yet; the question shows costs, steps and reasons; after the yes
    the fleet is brought to the plan, and Coral's page shows the plan's cost and who approved.
    """
    run = until(400.0, "a question", lambda: waiting_run(served))
    assert httpx.get(f"{served}/coral/overview.json", timeout=60.0).json()["waiting"][0]["run"] == run
    page.goto(f"{served}/dags/{DAG}/runs/{quote(run, safe='')}/tasks/decide/required_actions")
    page.get_by_text("nothing runs yet").first.wait_for()
    for text in ("Starts", "Steps:", "Why this plan"):
        assert page.get_by_text(text).count() >= 1, text
    screenshot(page, "question")
    page.get_by_role("button", name="Approve").click()
    assert until(300.0, "the end of the run", lambda: state(served, run)) == "success"
    shown = httpx.get(f"{served}/coral/overview.json", timeout=60.0).json()
    assert shown["plan"]["run"] == run
    assert len(shown["fleet"]["instances"]) == sum(row["count"] for row in shown["plan"]["instances"]) > 0
    page.goto(f"{served}/plugin/coral/coral/run?id={quote(run, safe='')}")
    frame = page.frame_locator("iframe[title='Coral']")
    frame.get_by_role("heading", name="Approval").wait_for()
    assert frame.get_by_text("approved").count() >= 1
    cost = shown["plan"]["certificate"]["cost_usd_per_hour"]
    assert frame.get_by_text(f"{cost:,.2f} USD/h").count() >= 1
    screenshot(page, "approved")


def test_a_burst_of_price_events_makes_one_run_that_says_why(served: str) -> None:
    """Five events within a second: one run more, whose reason is the price change."""
    asset = api(served, "assets", name_pattern="coral_price_change")["assets"][0]["id"]
    before = triggered(served)
    for number in range(5):
        extra = {"moved": [f"aws/us-east-2 L4x1 spot: 0.3 to 0.{number + 4} USD/h"]}
        sent = httpx.post(f"{served}/api/v2/assets/events", json={"asset_id": asset, "extra": extra}, timeout=60.0)
        assert sent.status_code == 200, sent.text
    (run,) = until(400.0, "the run of the burst", lambda: triggered(served) - before)
    assert until(300.0, "its end", lambda: state(served, run)) == "success"
    seen = httpx.get(f"{served}/coral/overview.json", timeout=60.0).json()
    (told,) = [one for one in seen["runs"] if one["run"] == run]
    assert told["reason"].startswith("price change: aws/us-east-2 L4x1 spot: 0.3 to 0.")
    time.sleep(10.0)
    assert triggered(served) - before == {run}


def triggered(address: str) -> set[str]:
    """Runs that asset events started."""
    found = api(address, f"dags/{DAG}/dagRuns", run_type="asset_triggered").get("dag_runs", [])
    return {one["dag_run_id"] for one in found}
