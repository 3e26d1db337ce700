"""What the page shows: values and HTML from a made data folder, from broken ones and with hostile names."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from coral_tasks.domain.errors import UnknownName, ValidationFailed
from coral_tasks.reporting import dashboard
from coral_tasks.settings import Settings
from coral_tasks.tasks import views

sys.path.insert(0, str(Path(__file__).parents[2] / "browser"))
from made_home import COST_OF_INSTANCE, NOW, Size, gate_report, make_home, run_id

HOSTILE = "\"><script>alert(1)</script>'<img src=x onerror=alert(2)>&{{7*7}}"


def settings(home: Path) -> Settings:
    """Settings of a data folder."""
    return Settings(home=home)


class Tags(HTMLParser):
    """All tags with their attributes."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in {"meta", "br", "input", "img"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def charts(document: str) -> dict[str, dict]:
    """Charts of a page by their label."""
    return {
        attributes["aria-label"]: json.loads(attributes["data-figure"])
        for _, attributes in Tags(document).found
        if "data-figure" in attributes
    }


def test_the_overview_states_plan_costs_and_demand(tmp_path: Path) -> None:
    """Cost by row is nodes times the run's prices; demand and capacity stand side by side by model."""
    plan = make_home(tmp_path)
    seen = views.overview(settings(tmp_path), now=NOW)
    assert seen["plan"]["id"] == plan.id
    assert seen["plan"]["run"] == run_id(NOW.replace(minute=10))
    rows = seen["plan"]["instances"]
    assert len(rows) == 8
    assert [row["cost_usd_per_hour"] for row in rows] == pytest.approx([COST_OF_INSTANCE] * 8)
    assert rows[0]["by_configuration"]["L4x1"] == {"nodes": 2, "cost_usd_per_hour": pytest.approx(1.6)}
    assert seen["plan"]["models"] == [
        {
            "model": f"model-0{number}",
            "demand_requests_per_s": 9.0,
            "served_requests_per_s": 12.0,
            "shortfall_requests_per_s": 0.0,
        }
        for number in range(2)
    ]
    assert json.loads(json.dumps(seen)) == json.loads(json.dumps(seen, allow_nan=False))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"violations": []}', "no difference found"),
        ('{"violations": ["L4x1 over by 2"]}', "L4x1 over by 2"),
        (None, "not checked yet"),
        ("{", "cannot be read"),
    ],
)
def test_the_certificate_says_what_the_check_found(tmp_path: Path, content: str | None, words: str) -> None:
    """The page claims that a plan was recomputed only where its run's check says so."""
    make_home(tmp_path, Size(runs=1))
    path = tmp_path / "runs" / run_id(NOW) / "check.json"
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    page = dashboard.overview_page(views.overview(settings(tmp_path)))
    assert words in page
    assert ("no difference found" in page) == (words == "no difference found")


def test_history_is_in_order_of_time(tmp_path: Path) -> None:
    """Sealed runs come oldest first, by the moment in their ids; an unsealed one is no part of it."""
    make_home(tmp_path)
    (tmp_path / "runs" / run_id(NOW) / "manifest.json").unlink()
    seen = views.overview(settings(tmp_path))
    assert [one["run"] for one in seen["history"]] == [run_id(NOW.replace(minute=m)) for m in (5, 10)]
    assert seen["history"][0]["cost_usd_per_hour"] == pytest.approx(8 * COST_OF_INSTANCE)
    assert [one["sealed"] for one in seen["runs"]] == [True, True, False]


def test_the_fleet_is_counted_by_pool(tmp_path: Path) -> None:
    """Four instances in each region, with two L4x1 and one L40Sx1 each, all in use."""
    make_home(tmp_path)
    pools = views.overview(settings(tmp_path))["fleet"]["pools"]
    found = {(one["region"], one["configuration"]): (one["num_nodes"], one["num_used"]) for one in pools}
    assert found == {
        ("aws/us-east-2", "L4x1"): (8, 8),
        ("aws/us-east-2", "L40Sx1"): (4, 4),
        ("gcp/us-central1", "L4x1"): (8, 8),
        ("gcp/us-central1", "L40Sx1"): (4, 4),
    }


def test_the_newest_dispatch_counts_by_number(tmp_path: Path) -> None:
    """Epoch 10 is newer than epoch 7, whatever the order of names."""
    make_home(tmp_path)
    newer = json.loads((tmp_path / "dispatch" / "7.json").read_bytes()) | {"epoch": 10, "converged": False}
    (tmp_path / "dispatch" / "10.json").write_text(json.dumps(newer), encoding="utf-8")
    seen = views.overview(settings(tmp_path))
    assert seen["transition"]["epoch"] == 10
    assert "fleet is not as planned" in dashboard.overview_page(seen)


def test_the_page_draws_every_instance_with_its_nodes(tmp_path: Path) -> None:
    """Layers of each stage and the node ids of every running instance are on the page, which is well-formed."""
    make_home(tmp_path, short=True)
    seen = views.overview(settings(tmp_path))
    page = dashboard.overview_page(seen)
    assert not Tags(page).open
    assert page.count("layers 0–29") == 8
    assert page.count("layers 30–39") == 8
    for instance in seen["fleet"]["instances"]:
        assert f"<code>{instance['id']}</code>" in page
        assert all(node in page for stage in instance["stage_nodes"] for node in stage)
    assert "28.00 USD/h" in page
    assert "one more node" in page
    assert "model-00: 3 requests/s are not served" in page
    assert "no answer from agent agent-9" in page


def test_charts_carry_the_figures(tmp_path: Path) -> None:
    """Costs by region and configuration, demand and cost over time are in the charts' data."""
    make_home(tmp_path)
    drawn = charts(dashboard.overview_page(views.overview(settings(tmp_path))))
    costs = {one["name"]: one for one in drawn["Cost by region and node configuration"]["data"]}
    assert costs["L40Sx1"]["x"] == pytest.approx([4 * 1.9, 4 * 1.9])
    bars = {one["name"]: one["y"] for one in drawn["Demand and capacity by model"]["data"]}
    assert bars == {"demand": [9.0, 9.0], "can be served": [12.0, 12.0]}
    assert len(drawn["Cost of every run's plan over time"]["data"][0]["x"]) == 3


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """A model's, a region's or a message's text never becomes markup, neither in HTML nor in a chart."""
    make_home(tmp_path, prefix=HOSTILE)
    folder = tmp_path / "runs" / run_id(NOW)
    finding = dict.fromkeys(("row", "value", "rule", "text", "severity"), HOSTILE)
    (folder / "gate" / "prices.json").write_text(json.dumps(gate_report(HOSTILE, HOSTILE, (finding,))))
    (folder / "failures").mkdir()
    failure = {"task": HOSTILE, "error": HOSTILE, "message": HOSTILE, "expected": False}
    (folder / "failures" / "x.json").write_text(json.dumps(failure))
    overview = dashboard.overview_page(views.overview(settings(tmp_path)))
    run = dashboard.run_page(views.run_view(settings(tmp_path), folder.name))
    for page in (overview, run):
        tags = Tags(page)
        assert not tags.open
        assert "img" not in {tag for tag, _ in tags.found}
        assert [attributes.get("src") for tag, attributes in tags.found if tag == "script"] == [
            "coral.js",
            "plotly.min.js",
        ]
        assert not any(name.startswith("on") for _, attributes in tags.found for name in attributes)
        assert "&lt;script&gt;alert(1)" in page
        for chart in charts(page).values():
            assert "<" not in json.dumps(chart["data"])


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("current/plan.json", "plan"),
        ("dispatch/7.json", "transition"),
        (f"runs/{run_id(NOW.replace(minute=10))}/explanation.json", "explanation"),
    ],
)
@pytest.mark.parametrize("content", ["", "{", "[]", '{"sentences": 3}', "null", "\x00\xff"])
def test_a_broken_file_costs_its_part_only(tmp_path: Path, file: str, part: str, content: str) -> None:
    """Half-written, foreign or empty files are said on the page; the other parts stay."""
    make_home(tmp_path)
    (tmp_path / file).write_text(content, encoding="latin-1")
    seen = views.overview(settings(tmp_path))
    assert "error" in seen[part]
    page = dashboard.overview_page(seen)
    assert "Cannot be shown" in page
    assert len(seen["history"]) == 3
    assert not Tags(page).open


@pytest.mark.parametrize("gone", ["inputs", "gate", "explanation.json", "dispatch.json"])
def test_files_of_the_run_may_be_gone(tmp_path: Path, gone: str) -> None:
    """Retention may have taken parts of the run away: unknown is shown as unknown, not as zero."""
    import shutil

    make_home(tmp_path, Size(runs=1))
    target = tmp_path / "runs" / run_id(NOW) / gone
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    seen = views.overview(settings(tmp_path))
    page = dashboard.overview_page(seen)
    assert seen["plan"]["id"] in page
    if gone == "inputs":
        assert {row["cost_usd_per_hour"] for row in seen["plan"]["instances"]} == {None}
        assert "Prices and demand are not shown" in page


def test_an_empty_home_says_what_to_run(tmp_path: Path) -> None:
    """Nothing there is no error, and looking makes no folder."""
    page = dashboard.overview_page(views.overview(settings(tmp_path / "none")))
    assert "run the DAG coral_allocation" in page
    assert not Tags(page).open
    assert not (tmp_path / "none" / "runs").exists()


@pytest.mark.parametrize(("name", "error"), [("nope", UnknownName), ("../x", ValidationFailed), ("", ValidationFailed)])
def test_a_run_that_is_not_there(tmp_path: Path, name: str, error: type[Exception]) -> None:
    """Unknown runs and what is no run id are refused."""
    with pytest.raises(error):
        views.run_view(settings(tmp_path), name)


def test_a_failed_run_is_first_on_the_page(tmp_path: Path) -> None:
    """The newest run's failure stands on top, with the sentence that nothing was changed."""
    make_home(tmp_path)
    folder = tmp_path / "runs" / run_id(NOW.replace(minute=15)) / "failures"
    folder.mkdir(parents=True)
    (folder / "gate.json").write_text(
        json.dumps({"task": "gate", "error": "StaleInput", "message": "prices are 9 h old", "expected": True})
    )
    page = dashboard.overview_page(views.overview(settings(tmp_path)))
    head = page[: page.index("<nav>")]
    assert re.search(r"newest run failed; .*unchanged.* gate: prices are 9 h old", head)


def test_links_lead_to_airflow_under_its_own_path(tmp_path: Path) -> None:
    """A run's link names Airflow's page of it, under the path that Airflow lies at, with the id quoted."""
    make_home(tmp_path)
    page = dashboard.overview_page(views.overview(settings(tmp_path)), airflow="/airflow")
    wanted = "/airflow/dags/coral_allocation/runs/manual__2026-11-29T12%3A10%3A00%2B00%3A00_abcdefgh"
    assert any(attributes.get("href") == wanted for _, attributes in Tags(page).found)


def test_changes_of_the_library_are_told_set_by_set() -> None:
    """Counts, shifts of throughput and the names of what came and went are on the page, as text."""
    shift = {"gpu_type": HOSTILE, "num_templates": 3, "median": 0.83, "smallest": 0.82, "largest": 0.84}
    one = {
        "name": (HOSTILE, "prefill", "900ms"),
        "num_before": 8,
        "num_after": 7,
        "num_gained": 0,
        "num_lost": 1,
        "gained": (),
        "lost": (HOSTILE,),
        "shifts": (shift,),
    }
    page = dashboard.library_diff_page({"before": "a", "after": "b", "sets": [one]})
    tags = Tags(page)
    assert not tags.open
    assert "img" not in {tag for tag, _ in tags.found}
    assert "-17.0% in the median of 3 (-18.0% to -16.0%)" in page
    same = dashboard.library_diff_page({"before": "a", "after": "b", "sets": []})
    assert "Both versions hold the same templates" in same


def write(path: Path, value: object) -> None:
    """One JSON file, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_the_page_shows_what_changed_what_bans_cost_and_what_baselines_would(tmp_path: Path) -> None:
    """Figures of the run that brought the plan in force: its change, the cost of doing without, Homo's plan."""
    plan = make_home(tmp_path)
    seen = views.overview(settings(tmp_path), now=NOW)
    assert seen["change"]["nodes_started"] == 8
    assert seen["history"][-1]["baselines"] == {"cauchy": None, "homo": 2 * plan.certificate.cost_usd_per_hour}
    page = dashboard.overview_page(seen)
    for text in (
        "region gcp/us-central1",
        "SLO one step tighter (0.8 times), model-00",
        "4.25",
        "+40.0%",
        "aws/us-east-2 L4x1 on_demand: 0.7 to 0.8 USD/h",
        "56.00 USD/h (2.00×)",
    ):
        assert text in page
    assert ", model-01" not in page  # nothing is known of its step
    assert [one["name"] for one in charts(page)["Cost of every run's plan over time"]["data"]][-1] == (
        "homo, same inputs"
    )


def test_a_publication_that_ended_half_way_is_shown_as_it_was_before(tmp_path: Path) -> None:
    """The copy of a newer plan without its record does not join the older run's page: the record decides."""
    plan = make_home(tmp_path)
    current = tmp_path / "current" / "plan.json"
    newer = json.loads(current.read_text(encoding="utf-8"))
    newer["id"] = "plan-fedcba9876543210"
    write(current, newer)
    assert views.overview(settings(tmp_path), now=NOW)["plan"]["id"] == plan.id


def test_a_question_that_waits_is_announced_until_answered_or_over(tmp_path: Path) -> None:
    """Whoever opens the page sees that an answer is awaited, and by when; not once it was given or time is over."""
    make_home(tmp_path)
    run = tmp_path / "runs" / run_id(NOW)
    question = {"needed": True, "why": ["the cost <doubles>"], "asked_at": NOW.isoformat(), "timeout_s": 600.0}
    write(run / "approval.json", question)
    seen = views.overview(settings(tmp_path), now=NOW)
    assert [one["run"] for one in seen["waiting"]] == [run.name]
    page = dashboard.overview_page(seen)
    assert "the cost &lt;doubles&gt;" in page
    assert "no other allocation run starts" in page
    assert views.overview(settings(tmp_path), now=NOW.replace(hour=13))["waiting"] == []
    answer = {"asked_at": NOW.isoformat(), "approved": False, "by": "<b>Ann</b>", "timed_out": False}
    write(run / "answer.json", {**answer, "at": NOW.isoformat()})
    assert views.overview(settings(tmp_path), now=NOW)["waiting"] == []
    told = dashboard.run_page(views.run_view(settings(tmp_path), run.name))
    assert "&lt;b&gt;Ann&lt;/b&gt;" in told
    assert "rejected" in told
    write(run / "answer.json", {**answer, "asked_at": "2026-11-29T11:00:00+00:00", "at": NOW.isoformat()})
    again = views.overview(settings(tmp_path), now=NOW)["waiting"]
    assert [one["run"] for one in again] == [run.name], "an answer to an earlier question is none to this one"


def test_a_running_dispatch_is_shown_until_its_result_is_there(tmp_path: Path) -> None:
    """Progress names run, round and steps; it goes when the dispatch has ended, whatever the file says."""
    make_home(tmp_path)
    progress = {"run": run_id(NOW), "epoch": 8, "rounds": 1, "num_steps": 12, "num_done": 5}
    write(tmp_path / "dispatch" / "progress.json", {**progress, "last": "start a<b", "at": NOW.isoformat()})
    page = dashboard.overview_page(views.overview(settings(tmp_path), now=NOW))
    assert "5 of 12 steps done, last: start a&lt;b" in page
    write(tmp_path / "dispatch" / "progress.json", {**progress, "epoch": 7, "last": "", "at": NOW.isoformat()})
    assert views.overview(settings(tmp_path), now=NOW)["progress"] is None


def test_what_a_run_was_given_stands_on_its_page(tmp_path: Path) -> None:
    """Overrides that a person gave are shown with the run, escaped."""
    make_home(tmp_path)
    run = tmp_path / "runs" / run_id(NOW)
    pinned = json.loads((run / "run.json").read_text(encoding="utf-8"))
    pinned["given"] = {"demand": [{"model": HOSTILE, "requests_per_s": 3.5}]}
    write(run / "run.json", pinned)
    page = dashboard.run_page(views.run_view(settings(tmp_path), run.name))
    assert "Given by hand" in page
    assert "3.5" in page
    assert "<script>alert" not in page


def test_the_drawn_transition_is_linked_and_only_that_file_is_given_out(tmp_path: Path) -> None:
    """A run that drew its transition links to it; one that did not, or is not there, has none."""
    make_home(tmp_path)
    run = tmp_path / "runs" / run_id(NOW.replace(minute=10))
    assert "transition?id=" not in dashboard.overview_page(views.overview(settings(tmp_path), now=NOW))
    with pytest.raises(UnknownName):
        views.transition_page(settings(tmp_path), run.name)
    (run / "report").mkdir()
    (run / "report" / "transition.html").write_text("<p>steps</p>", encoding="utf-8")
    assert "transition?id=" in dashboard.overview_page(views.overview(settings(tmp_path), now=NOW))
    assert views.transition_page(settings(tmp_path), run.name) == b"<p>steps</p>"
    for name in ("nope", "../../etc/passwd"):
        with pytest.raises(ValidationFailed):
            views.transition_page(settings(tmp_path), name)
