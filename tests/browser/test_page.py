"""The page in a real browser against a real ``coral serve``: opened through Airflow's navigation, read, followed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from made_home import Size, make_home

from coral_tasks.tasks.local_airflow import PROJECT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.airflow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]


def free_port() -> int:
    """A port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[str]:
    """Address of Airflow's UI with a made data folder behind it; every process is ended afterwards."""
    home, port = tmp_path_factory.mktemp("browser"), free_port()
    make_home(home, Size(models=2, instances=8, runs=3))
    environment = {**os.environ, "CORAL_HOME": str(home), "CORAL_UI_PORT": str(port)}
    words = [str(Path(sys.executable).parent / "coral"), "serve"]
    process = subprocess.Popen(words, cwd=PROJECT, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/api/v2/monitor/health", process, 240.0)
        wait_for(f"{address}/api/v2/dags/coral_allocation", process, 240.0)
        yield address
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def wait_for(address: str, process: subprocess.Popen, limit_s: float) -> None:
    """Until the address answers 200; a server that ends, or a limit passed, fails the test."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert process.poll() is None, "coral serve ended"
        try:
            if httpx.get(address, timeout=60.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1.0)
    pytest.fail(f"{address} did not answer within {limit_s:g} s")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium of the system."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def screenshot(page, name: str) -> None:
    """Kept only where CORAL_SCREENSHOTS names a folder."""
    folder = os.environ.get("CORAL_SCREENSHOTS")
    if folder:
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def open_coral(page, address: str):
    """Airflow's start page, then its entry for Coral; the frame with our page and what the console complained of."""
    complaints: list[str] = []
    page.on("console", lambda one: complaints.append(one.text) if one.type == "error" else None)
    page.set_default_timeout(90_000)
    page.goto(f"{address}/")
    page.get_by_role("link", name="Coral").first.click()
    frame = page.frame_locator("iframe[title='Coral']")
    frame.get_by_role("heading", name="Coral", exact=True).wait_for()
    return frame, complaints


def test_from_the_navigation_to_the_plan_and_its_run(served: str, browser) -> None:
    """The entry opens the page in Airflow's frame: the plan's cost is there, charts are drawn, a link leaves to the
    run in Airflow, and the browser refused none of our scripts.
    """
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    page = context.new_page()
    frame, complaints = open_coral(page, served)
    assert frame.locator("#plan .figure b").first.inner_text() == "28.00 USD/h"
    frame.locator("[data-figure] .main-svg").first.wait_for()
    assert frame.locator("[data-figure]").count() == frame.locator("[data-figure].js-plotly-plot").count()
    screenshot(page, "wide")
    frame.get_by_role("searchbox").fill("model-01 decode")
    frame.get_by_role("searchbox").fill("gcp/us-central1")
    assert frame.locator(".group:visible").count() == 4
    assert [one for one in complaints if "coral" in one.lower() or "Content Security" in one] == []
    frame.get_by_role("link", name="its run in Airflow").click()
    page.wait_for_url("**/dags/coral_allocation/runs/**")
    context.close()


def test_a_run_opens_inside_airflow_by_its_own_address(served: str, browser) -> None:
    """The address that task instances link to shows the run's page in the frame, gate report and all."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    page = context.new_page()
    frame, _ = open_coral(page, served)
    # coral serve schedules runs of its own meanwhile: the made ones are the manual ones
    run = frame.locator("#runs a", has_text="manual__").first.inner_text()
    from urllib.parse import quote

    page.goto(f"{served}/plugin/coral/coral/run?id={quote(run, safe='')}")
    frame = page.frame_locator("iframe[title='Coral']")
    frame.get_by_role("heading", name=f"Run {run}").wait_for()
    assert frame.get_by_role("heading", name="prices: accepted").count() == 1
    screenshot(page, "run")
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_in_light_and_dark(served: str, browser, scheme: str) -> None:
    """At a phone's width nothing sticks out of the page, and the background follows the reader's choice."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(90_000)
    page.goto(f"{served}/coral/")
    page.locator("[data-figure] .main-svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 25, 31)"}[scheme]
    screenshot(page, f"phone-{scheme}")
    context.close()


def test_airflows_own_theme_is_followed(served: str, browser) -> None:
    """Whoever set Airflow to dark sees Coral dark, though the browser says light."""
    context = browser.new_context(color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(90_000)
    page.goto(f"{served}/coral/")
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 25, 31)"
    context.close()
