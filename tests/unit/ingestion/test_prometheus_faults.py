"""Prometheus above the HTTP layer: half answers, odd values and foreign times are a fault or are left out and noted.

A real HTTP server answers the queries as Prometheus would for two decode engines of one model; each test spoils one
thing. Right value of the healthy answer: engine a finished 600 and holds 30 more, engine b finished 300 and holds 30
less, in 300 s: (630 + 270) / 300 = 3 requests/s.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import ModelId, Phase
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.ingestion.http import HttpLimits, get_json
from coral_tasks.ingestion.prometheus import MetricsTarget, PrometheusSource
from coral_tasks.ingestion.rows import demand_rows
from data_contracts.coerce import coerce
from data_contracts.registry import contract_of

NOW = datetime(2026, 11, 29, 12, 1, tzinfo=UTC)
END = datetime(2026, 11, 29, 12, 0, tzinfo=UTC).timestamp()
SHAPE = RequestShape(mean_prompt_tokens=7, p95_prompt_tokens=8, mean_output_tokens=2, p95_output_tokens=3)
TARGETS = tuple(MetricsTarget(instance=name, model=ModelId("m"), phase=Phase.DECODE) for name in ("a:1", "b:1"))
FAST = HttpLimits(try_s=5.0, total_s=10.0, tries=1)

VALUES = {
    "finished": {"a:1": 600.0, "b:1": 300.0},
    "running": {"a:1": 20.0, "b:1": -20.0},
    "waiting": {"a:1": 10.0, "b:1": -10.0},
    "sum": {"a:1": 6000.0, "b:1": 3000.0},
    "count": {"a:1": 600.0, "b:1": 300.0},
}
"""By part and engine: what the newest interval's query gives."""

Spoil = Callable[[str, Any], Any]
"""(part, healthy answer) → what is sent: JSON, or bytes as they are."""


def part_of(query: str) -> str:
    """Which of the source's questions a query is."""
    marks = {
        "timestamp(": "age",
        "count_over_time(": "scrapes",
        "request_success": "finished",
        "requests_running": "running",
        "requests_waiting": "waiting",
        "_bucket": "bucket",
        "_sum": "sum",
        "_count": "count",
    }
    return next(part for mark, part in marks.items() if mark in query)


def labels(instance: str, **more: str) -> dict[str, str]:
    """Labels of an engine's series."""
    return {"instance": instance, "model_name": "hub/m", **more}


def matrix(part: str) -> list[dict[str, Any]]:
    """Healthy series of a range query; 95 of 100 tokens lie below 10."""
    if part != "bucket":
        return [{"metric": labels(name), "values": [[END, str(value)]]} for name, value in VALUES[part].items()]
    return [
        {"metric": labels(name, le=bound), "values": [[END, str(value)]]}
        for name, count in VALUES["count"].items()
        for bound, value in (("10", 0.95 * count), ("20", count), ("+Inf", count))
    ]


def healthy(part: str) -> dict[str, Any]:
    """A whole answer."""
    if part in ("age", "scrapes"):
        value = str(NOW.timestamp() - 5) if part == "age" else "20"
        found = [{"metric": labels(name, job="vllm"), "value": [END, value]} for name in ("a:1", "b:1")]
        return {"status": "success", "data": {"resultType": "vector", "result": found}}
    return {"status": "success", "data": {"resultType": "matrix", "result": matrix(part)}}


class Prometheus(BaseHTTPRequestHandler):
    """Answers as ``spoil`` says."""

    spoil: Spoil = staticmethod(lambda part, answer: answer)

    def do_GET(self) -> None:
        part = part_of(parse_qs(urlparse(self.path).query)["query"][0])
        answer = type(self).spoil(part, healthy(part))
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of the server."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def ask(server: str, spoil: Spoil = lambda _, answer: answer, now: datetime = NOW, **changes: Any) -> SourceBatch:
    """Demand of the spoiled answers."""
    Prometheus.spoil = staticmethod(spoil)
    settings: dict[str, Any] = {
        "address": server,
        "targets": TARGETS,
        "model_names": {"hub/m": ModelId("m")},
        "shapes": {"m": SHAPE},
        "limits": FAST,
    }
    return PrometheusSource(**(settings | changes))(now)


def rows_of(batch: SourceBatch) -> Any:
    """Domain rows."""
    table = coerce(contract_of("demand"), batch.raw().table).table
    assert table is not None
    return demand_rows(table)


def test_whole_answers_give_rate_and_lengths(server: str) -> None:
    """(630 + 270) / 300 s = 3/s; 9000 tokens of 900 requests are 10 each; 95 % lie at or below 10."""
    batch = ask(server)
    (row,) = rows_of(batch)
    assert row.requests_per_s == pytest.approx(3.0)
    assert row.shape.mean_prompt_tokens == pytest.approx(10.0)
    assert row.shape.p95_prompt_tokens == pytest.approx(10.0)
    assert (batch.completeness, batch.notes) == (1.0, ())


def changed(part: str, change: Callable[[list[Any]], Any]) -> Spoil:
    """Spoils the series of one part, in place or by what ``change`` returns."""

    def spoil(asked: str, answer: Any) -> Any:
        if asked == part:
            kept = change(answer["data"]["result"])
            if kept is not None:
                answer["data"]["result"] = kept
        return answer

    return spoil


def value(text: object) -> Callable[[list[Any]], None]:
    """Sets the first engine's value."""

    def change(series: list[Any]) -> None:
        series[0]["values"][0][1] = text

    return change


HALF = {
    "fewer series of finished requests": changed("finished", lambda series: series[:1]),
    "fewer series of running requests": changed("running", lambda series: series[:1]),
    "no series of waiting requests": changed("waiting", lambda _: []),
    "finished is NaN": changed("finished", value("NaN")),
    "finished is infinite": changed("finished", value("+Inf")),
    "running is NaN": changed("running", value("NaN")),
    "waiting is -Inf": changed("waiting", value("-Inf")),
    "old samples of one engine": changed("age", lambda series: series[0].update(value=[END, "1764417600"])),
    "samples of tomorrow": changed("age", lambda series: series[0].update(value=[END, str(NOW.timestamp() + 86_400)])),
    "an age that is NaN": changed("age", lambda series: series[0].update(value=[END, "NaN"])),
    "one engine less": changed("age", lambda series: series[:1]),
    "no engine": changed("age", lambda _: []),
    "no rates of engines that were scraped": lambda part, answer: (
        answer if part in ("age", "scrapes") else {**answer, "data": {"resultType": "matrix", "result": []}}
    ),
}


@pytest.mark.parametrize("kind", HALF)
def test_half_an_answer_is_an_outage_and_never_a_smaller_demand(server: str, kind: str) -> None:
    """Of two engines one or both lack a part: too few for a table, and the message says it is not zero demand."""
    with pytest.raises(SourceFault, match=r"fresh metrics from [01] of 2 instances.*an outage is not zero demand"):
        ask(server, HALF[kind])


@pytest.mark.parametrize(
    "kind", [kind for kind in HALF if kind.startswith(("fewer", "finished", "running", "waiting", "old"))]
)
def test_within_the_share_that_may_be_missing_the_rest_counts(server: str, kind: str) -> None:
    """Where half of the engines may be missing, the whole one's demand is told and the other is named in a note."""
    batch = ask(server, HALF[kind], min_completeness=0.5)
    (row,) = rows_of(batch)
    assert row.requests_per_s in (pytest.approx(2.1), pytest.approx(0.9), pytest.approx(3.0))
    assert batch.completeness == 0.5
    assert any("no whole metrics from" in note for note in batch.notes)


def series_of(metric: Any, values: Any = None) -> Spoil:
    """An answer of finished requests with one series of any form."""
    series = {"metric": metric, "values": [[END, "1"]] if values is None else values}
    return changed("finished", lambda _: [series])


def twice(part: str) -> Spoil:
    """Every series of the part two times."""
    return changed(part, lambda series: [*series, *series])


FAULTS: dict[str, tuple[Spoil, str]] = {
    "cut in the JSON": (
        lambda part, answer: json.dumps(answer).encode()[:-30] if part == "sum" else answer,
        "whole JSON",
    ),
    "error with 200": (
        lambda part, answer: {"status": "error", "errorType": "timeout", "error": "query timed out"},
        "query timed out",
    ),
    "warnings": (lambda part, answer: {**answer, "warnings": ["store 2 was not reached"]}, "store 2 was not reached"),
    "warnings of another shape": (lambda part, answer: {**answer, "warnings": {"a": 1}}, "prometheus"),
    "nothing": (lambda part, answer: b"", "not whole JSON"),
    "deep": (lambda part, answer: b"[" * 100_000, "not whole JSON"),
    "a list": (lambda part, answer: [answer], "not an answer"),
    "no data": (lambda part, answer: {"status": "success"}, "not an answer"),
    "data is text": (lambda part, answer: {"status": "success", "data": "vector"}, "not an answer"),
    "result is null": (changed("finished", lambda _: {"a": 1}), "not an answer"),
    "a vector for a matrix": (
        lambda part, answer: healthy("age") if part == "finished" else answer,
        "another kind of result",
    ),
    "labels are no texts": (series_of({"instance": 5, "model_name": ["hub/m"]}), "not an answer"),
    "labels are a list": (series_of([["instance", "a:1"], ["model_name", {}]]), "not an answer"),
    "labels are text": (series_of("a:1"), "not an answer"),
    "a value without time": (series_of(labels("a:1"), [["1"]]), "not an answer"),
    "values are null": (series_of(labels("a:1"), 7), "not an answer"),
    "a word for a number": (series_of(labels("a:1"), [[END, "many"]]), "not an answer"),
    "an endless whole number": (series_of(labels("a:1"), [[END, 10**400]]), "not an answer"),
    "a time that is NaN": (series_of(labels("a:1"), [["NaN", "1"]]), "not an answer"),
    "a time without end": (series_of(labels("a:1"), [["inf", "1"]]), "not an answer"),
    "an interval later": (series_of(labels("a:1"), [[END + 300, "1"]]), "a value of another time"),
    "an interval earlier": (series_of(labels("a:1"), [[END - 300, "1"]]), "a value of another time"),
    "times that were aligned to something else": (
        series_of(labels("a:1"), [[END - 7, "1"]]),
        "a value of another time",
    ),
    "a series twice": (twice("finished"), "two values of a:1 for one time"),
    "a bucket twice": (twice("bucket"), "two values of a:1 for one time"),
    "scraped by two jobs": (
        changed("age", lambda series: [*series, {"metric": labels("a:1", job="copy"), "value": [END, "1"]}]),
        r"a:1 is scraped by several jobs \(copy, vllm\)",
    ),
    "a bucket without a bound": (changed("bucket", lambda series: series[0]["metric"].pop("le") and None), "no bound"),
    "a bucket's bound is a word": (
        changed("bucket", lambda series: series[0]["metric"].update(le="ten")),
        "a bucket has no bound",
    ),
    "a bucket's bound is NaN": (changed("bucket", lambda series: series[0]["metric"].update(le="NaN")), "no bound"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_what_is_no_answer_to_the_question_is_a_fault(server: str, kind: str) -> None:
    """Refusals, other shapes of JSON, other times, doubled series: each is named, and none ends in a traceback."""
    spoil, message = FAULTS[kind]
    with pytest.raises(SourceFault, match=message) as caught:
        ask(server, spoil)
    assert len(str(caught.value)) < 1000


def test_what_a_crashed_engine_lost_does_not_lower_the_others_demand(server: str) -> None:
    """Engine b restarted: its counter began again (20 since then) and 500 running requests are gone; a's count."""

    def spoil(part: str, answer: Any) -> Any:
        values = {"finished": "20", "running": "-500"}
        if part in values:
            answer["data"]["result"][1]["values"][0][1] = values[part]
        return answer

    (row,) = rows_of(ask(server, spoil))
    assert row.requests_per_s == pytest.approx(630 / 300)


def test_engines_that_vanished_count_if_they_ran_lately_and_else_are_noted(server: str) -> None:
    """A series of an engine that no list holds is left out, whatever it says; one of the last interval counts."""
    extra = {"metric": labels("x:9"), "values": [[END, "300"]]}

    def spoil(part: str, answer: Any) -> Any:
        if part in ("age", "scrapes"):
            answer["data"]["result"].append({"metric": labels("x:9"), "value": [END, "2"]})
        elif part in VALUES:
            answer["data"]["result"].append(extra)
        return answer

    batch = ask(server, spoil)
    assert rows_of(batch)[0].requests_per_s == pytest.approx(3.0)
    assert "left out: 1 instances that no longer run (x:9)" in batch.notes
    past = (MetricsTarget(instance="x:9", model=ModelId("m"), phase=Phase.DECODE),)
    # finished 300, running and waiting 300 more each
    assert rows_of(ask(server, spoil, past=past))[0].requests_per_s == pytest.approx(3.0 + 3.0)


def test_an_engine_that_has_just_started_is_not_missing(server: str) -> None:
    """Scraped once in the interval there is no rate yet: it has answered, and counts nothing."""

    def spoil(part: str, answer: Any) -> Any:
        if part == "scrapes":
            answer["data"]["result"][1]["value"][1] = "1"
        elif part != "age":
            answer["data"]["result"] = [one for one in answer["data"]["result"] if one["metric"]["instance"] == "a:1"]
        return answer

    batch = ask(server, spoil)
    assert rows_of(batch)[0].requests_per_s == pytest.approx(2.1)
    assert batch.completeness == 1.0


def test_half_an_answer_for_an_earlier_interval_leaves_that_interval_out(server: str) -> None:
    """The interval before has NaN on one engine: unknown, so it has no row and a note; the newest keeps its rate."""

    def spoil(part: str, answer: Any) -> Any:
        if part in ("finished", "running", "waiting"):
            for number, series in enumerate(answer["data"]["result"]):
                earlier = "NaN" if (part, number) == ("finished", 0) else "30"
                series["values"].insert(0, [END - 300, earlier])
        return answer

    batch = ask(server, spoil, num_intervals=2)
    assert [row.interval_start for row in rows_of(batch)] == [datetime(2026, 11, 29, 11, 55, tzinfo=UTC)]
    assert "m: half an answer for the interval of 2026-11-29T11:50:00+00:00: left out" in batch.notes


def test_lengths_without_requests_are_no_demand(server: str) -> None:
    """Histograms of a model name that counts no requests make no row of zero."""

    def spoil(part: str, answer: Any) -> Any:
        if part in ("sum", "count", "bucket"):
            for series in answer["data"]["result"]:
                series["metric"]["model_name"] = "another"
        return answer

    batch = ask(server, spoil, shapes={"m": SHAPE, "another": SHAPE})
    assert [row.model for row in rows_of(batch)] == ["m"]
    assert rows_of(batch)[0].shape == SHAPE
    assert "m: no requests finished, so lengths are those expected" in batch.notes


def test_a_histogram_that_is_not_whole_gives_the_expected_lengths_with_a_note(server: str) -> None:
    """Without the last bucket there is no quantile; nothing is made of the rest."""
    spoil = changed("bucket", lambda series: [one for one in series if one["metric"]["le"] != "+Inf"])
    batch = ask(server, spoil)
    assert rows_of(batch)[0].shape == SHAPE
    assert batch.notes == ("m: no requests finished, so lengths are those expected",)


@pytest.mark.parametrize("hours", [-24, -1, 1, 24])
def test_a_clock_that_is_off_finds_no_fresh_sample(server: str, hours: int) -> None:
    """Seen from another hour the samples are of the past or of the future; neither is now."""
    with pytest.raises(SourceFault, match="an outage is not zero demand"):
        ask(server, now=NOW + timedelta(hours=hours))


@pytest.mark.parametrize(
    "address",
    ["http://[::1", "http://127.0.0.1:port", "http://a b", "http://" + "x" * 300, "http://\u2100", "prometheus"],
)
def test_an_address_that_is_none_is_a_fault(address: str) -> None:
    """Misspelt addresses are named, and none ends in a traceback."""
    with pytest.raises(SourceFault):
        get_json(address, "/", {}, FAST)


class Slow(BaseHTTPRequestHandler):
    """Sends its head a byte at a time, each within a socket's own time limit; or refuses and never says why."""

    def do_GET(self) -> None:
        if self.path.startswith("/refuse"):
            self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 100\r\n\r\nno")
            self.wfile.flush()
            time.sleep(2.0)
            return
        try:
            for _ in range(100):
                self.wfile.write(b"H")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            return

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("path", ["/drip", "/refuse"])
def test_a_server_that_drips_its_head_or_its_refusal_is_given_up(path: str) -> None:
    """The deadline is on the whole answer, head and refusal included."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        limits = HttpLimits(try_s=0.4, total_s=5.0, tries=1)
        with pytest.raises(SourceFault, match=r"no whole answer within 0\.4 s|HTTP 404 Not Found: no"):
            get_json(f"http://127.0.0.1:{running.server_port}", path, {}, limits)
    finally:
        running.shutdown()
        running.server_close()
