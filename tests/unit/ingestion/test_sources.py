"""Sources that hang, refuse, answer half or nonsense; files and objects; rows there and back; cache with true age."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.fleet import Fleet, InstanceState, Node, ServingInstance
from coral_tasks.domain.models import RequestShape
from coral_tasks.domain.names import (
    InstanceId,
    Market,
    ModelId,
    NodeConfigurationId,
    NodeId,
    Phase,
    RegionId,
    TemplateId,
)
from coral_tasks.ingestion.agents import InventorySource, merge_availability
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.ingestion.cached import CachedSource
from coral_tasks.ingestion.files import FolderSource, S3PrefixSource, is_whole_name
from coral_tasks.ingestion.http import HttpLimits, get_json
from coral_tasks.ingestion.prometheus import MetricsTarget, PrometheusSource, bucket_quantile
from coral_tasks.ingestion.rows import availability_rows, demand_rows, fleet_of, running_table
from data_contracts.coerce import coerce
from data_contracts.registry import contract_of

NOW = datetime(2026, 11, 29, 12, 1, tzinfo=UTC)
END = datetime(2026, 11, 29, 12, 0, tzinfo=UTC).timestamp()
SHAPE = RequestShape(mean_prompt_tokens=7, p95_prompt_tokens=8, mean_output_tokens=2, p95_output_tokens=3)
FAST = HttpLimits(try_s=0.3, total_s=3.0, tries=2, first_pause_s=0.01)
Handler = Callable[[BaseHTTPRequestHandler, int], None]


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Starts local servers that answer with a given function; their address."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Handler) -> str:
        class Local(BaseHTTPRequestHandler):
            calls = 0

            def do_GET(self) -> None:
                type(self).calls += 1
                answer(self, type(self).calls)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Local)
        server.daemon_threads = True
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def reply(to: BaseHTTPRequestHandler, body: bytes, status: int = 200, *, length: int | None = None) -> None:
    """Answer with a body, and with a stated length that may be wrong."""
    to.send_response(status)
    to.send_header("Content-Length", str(len(body) if length is None else length))
    to.end_headers()
    to.wfile.write(body)


def drip(to: BaseHTTPRequestHandler, _: int) -> None:
    """One byte at a time, each within the socket's own limit."""
    to.send_response(200)
    to.send_header("Content-Length", "1000")
    to.end_headers()
    for _ in range(40):
        try:
            to.wfile.write(b" ")
            to.wfile.flush()
        except OSError:
            return
        time.sleep(0.05)


FAULTS: list[tuple[str, Handler, str]] = [
    ("429", lambda to, _: reply(to, b"{}", 429), "HTTP 429"),
    ("500", lambda to, _: reply(to, b"{}", 500), "HTTP 500"),
    ("404", lambda to, _: reply(to, b"no such page", 404), "HTTP 404 .*no such page"),
    ("half a page", lambda to, _: reply(to, b'{"a": [1,', 200, length=100), "cut off"),
    ("half of JSON", lambda to, _: reply(to, b'{"a": [1,'), "not whole JSON"),
    ("a web page", lambda to, _: reply(to, b"<html>"), "not whole JSON"),
    ("hangs", lambda _to, _: time.sleep(1.0), "no whole answer within"),
    ("drips", drip, "no whole answer within"),
]


@pytest.mark.parametrize(("answer", "message"), [pytest.param(a, m, id=name) for name, a, m in FAULTS])
def test_a_server_that_does_not_answer_whole_is_a_fault(serve: Any, answer: Handler, message: str) -> None:
    """Each kind has its message with the address, and the call ends within its time limit."""
    address = serve(answer)
    started = time.monotonic()
    with pytest.raises(SourceFault, match=message):
        get_json(address, "/x", {}, FAST)
    assert time.monotonic() - started < 20


def test_one_refusal_is_tried_again_after_the_time_that_the_server_asks_for(serve: Any) -> None:
    """Retry-After is kept; the second answer counts."""

    def answer(to: BaseHTTPRequestHandler, number: int) -> None:
        if number == 1:
            to.send_response(429)
            to.send_header("Retry-After", "0.25")
            to.send_header("Content-Length", "0")
            to.end_headers()
        else:
            reply(to, b"[1]")

    waits: list[float] = []
    assert get_json(serve(answer), "/", {}, FAST, sleep=waits.append) == [1]
    assert waits == [0.25]


def test_nobody_listening_and_foreign_schemes_are_faults() -> None:
    """A refused connection names the address; a file address is not read at all."""
    with pytest.raises(SourceFault, match="not reachable"):
        get_json("http://127.0.0.1:9", "/", {}, FAST)
    with pytest.raises(SourceFault, match="only http and https"):
        get_json("file:///etc/passwd", "", {}, FAST)


TARGETS = (
    MetricsTarget(instance="a:1", model=ModelId("m"), phase=Phase.DECODE),
    MetricsTarget(instance="b:1", model=ModelId("m"), phase=Phase.PREFILL),
)


def prometheus(
    *, increase: str = "600", running: str = "0", extra: list[dict[str, Any]] | None = None, age_s: float = 5.0
) -> Handler:
    """A Prometheus with one decode, one prefill and one forgotten instance, and three requests per second at most."""

    def answer(to: BaseHTTPRequestHandler, _: int) -> None:
        query = parse_qs(urlparse(to.path).query)["query"][0]
        if query.startswith(("timestamp", "count_over_time")):
            at = str(NOW.timestamp() - age_s) if query.startswith("timestamp") else "20"
            found = [{"metric": {"instance": name}, "value": [0, at]} for name in ("a:1", "b:1", "gone:1")]
            body = {"status": "success", "data": {"resultType": "vector", "result": found}}
        else:
            value = increase if "request_success" in query else running if "num_requests_running" in query else "0"
            if "_sum" in query or "_count" in query:
                value = "0"
            names = [] if "_bucket" in query else ["a:1", "b:1", "gone:1"]
            found = [{"metric": {"instance": n, "model_name": "hub/m"}, "values": [[END, value]]} for n in names]
            body = {"status": "success", "data": {"resultType": "matrix", "result": [*found, *(extra or [])]}}
        reply(to, json.dumps(body).encode())

    return answer


def demand_from(address: str, **changes: Any) -> SourceBatch:
    """Demand of the last interval."""
    settings: dict[str, Any] = {
        "address": address,
        "targets": TARGETS,
        "model_names": {"hub/m": ModelId("m")},
        "shapes": {"m": SHAPE},
        "limits": FAST,
    }
    return PrometheusSource(**(settings | changes))(NOW)


def rows_of(batch: SourceBatch) -> Any:
    """Domain rows of a demand batch."""
    table = coerce(contract_of("demand"), batch.raw().table).table
    assert table is not None
    return demand_rows(table)


def test_requests_are_counted_once_and_growth_of_the_queue_is_demand(serve: Any) -> None:
    """600 finished and 300 more in flight in 300 s on the one decode instance: 3/s; prefill and gone do not count."""
    batch = demand_from(serve(prometheus(running="300")))
    (row,) = rows_of(batch)
    assert row.requests_per_s == pytest.approx(3.0)
    assert row.interval_start == datetime(2026, 11, 29, 11, 55, tzinfo=UTC)
    assert row.shape == SHAPE
    assert batch.age_s(NOW) == 60.0
    assert batch.notes == (
        "left out: 1 instances that no longer run (gone:1)",
        "m: no requests finished, so lengths are those expected",
    )


def test_quiet_metrics_are_zero_and_absent_ones_are_not(serve: Any) -> None:
    """Counters that stand still are a demand of zero; samples of an hour ago, or no instance at all, are a fault."""
    (row,) = rows_of(demand_from(serve(prometheus(increase="0"))))
    assert row.requests_per_s == 0.0
    with pytest.raises(SourceFault, match=r"0 of 1 instances.*outage is not zero"):
        demand_from(serve(prometheus(age_s=3600)))
    with pytest.raises(SourceFault, match="no instance runs that could be asked"):
        demand_from(serve(prometheus()), targets=TARGETS[1:])


def test_odd_values_do_not_become_demand(serve: Any) -> None:
    """NaN and infinity are an outage and no zero; a gauge's negative noise does not make demand negative."""
    for odd in ("NaN", "+Inf"):
        with pytest.raises(SourceFault, match="an outage is not zero demand"):
            demand_from(serve(prometheus(increase=odd)))
    assert rows_of(demand_from(serve(prometheus(increase="0", running="-3"))))[0].requests_per_s == 0.0


def test_a_model_that_nobody_knows_goes_through_for_the_gate_to_refuse(serve: Any) -> None:
    """An unknown model_name on a running instance keeps its name, if its lengths are known, else it is noted."""
    batch = demand_from(serve(prometheus()), model_names={}, shapes={"hub/m": SHAPE})
    assert [row.model for row in rows_of(batch)] == ["hub/m"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"status": "error", "error": "too many samples"}, "too many samples"),
        ({"status": "success", "warnings": ["partial response"], "data": {}}, "partial response"),
        ({"status": "success", "data": {"resultType": "scalar", "result": []}}, "another kind of result"),
        ({"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}}]}}, "not an answer"),
        ({"status": "success", "data": {"resultType": "vector", "result": [{"value": [0, "x"]}]}}, "not an answer"),
        (["status"], "not an answer"),
        ({}, "not an answer"),
    ],
)
def test_answers_that_are_none_of_prometheus_are_faults(serve: Any, body: Any, message: str) -> None:
    """Errors, partial answers and other shapes of JSON are faults that name the query."""
    with pytest.raises(SourceFault, match=message):
        demand_from(serve(lambda to, _: reply(to, json.dumps(body).encode())))


def test_quantiles_of_histograms_are_prometheus_own() -> None:
    """Of 100 in (0, 10] and 100 in (10, 20] the 95th percentile is 19; beyond the last bound it is that bound."""
    inf = float("inf")
    assert bucket_quantile(0.95, {10.0: 100.0, 20.0: 200.0, inf: 200.0}) == pytest.approx(19.0)
    assert bucket_quantile(0.95, {10.0: 0.0, inf: 5.0}) == 10.0
    assert bucket_quantile(0.95, {}) != bucket_quantile(0.95, {})
    assert bucket_quantile(0.95, {10.0: 3.0}) != bucket_quantile(0.95, {10.0: 3.0})


def test_a_drop_folder_without_a_file_is_a_fault(tmp_path: Path) -> None:
    """An empty and an absent folder each say what was looked for and where."""
    with pytest.raises(SourceFault, match=r"no prices\*\.csv"):
        FolderSource(table="prices", folder=tmp_path)(NOW)
    with pytest.raises(SourceFault, match="cannot be read"):
        FolderSource(table="prices", folder=tmp_path / "absent")(NOW)
    assert [
        name for name in ("a.csv", "a.parquet", "a.csv.tmp", ".a.csv", "_a.csv", "a.txt") if is_whole_name(name)
    ] == [
        "a.csv",
        "a.parquet",
    ]


class Bucket:
    """An S3 client in the form that boto3 has, with three objects on two pages; ``cut`` bytes are lost on the way."""

    def __init__(self, cut: int = 0) -> None:
        self.cut = cut

    def get_paginator(self, name: str) -> Any:
        assert name == "list_objects_v2"
        return self

    def paginate(self, **wanted: str) -> list[dict[str, Any]]:
        assert wanted == {"Bucket": "b", "Prefix": "demand/"}
        objects = [("demand/1.csv", 1), ("demand/3.csv.tmp", 3), ("demand/2.csv", 2)]
        entries = [{"Key": key, "LastModified": NOW + timedelta(hours=h), "Size": 5} for key, h in objects]
        found = [{"Contents": entries[:2]}, {"Contents": entries[2:]}, {}]
        return [{"IsTruncated": number < 2, **page} for number, page in enumerate(found)]

    def get_object(self, **wanted: str) -> dict[str, Any]:
        assert wanted["Key"] == "demand/2.csv"
        data = b"a,b\n1"[: 5 - self.cut]

        class Body:
            def read(self, most: int) -> bytes:
                return data[:most]

        return {"Body": Body()}


def test_the_newest_whole_object_of_a_prefix_counts() -> None:
    """Temporaries are passed over, all pages are read, and an object that comes short is a fault."""
    source = S3PrefixSource(table="demand", bucket="b", prefix="demand/", client=Bucket())
    batch = source(NOW)
    assert (batch.data, batch.source) == (b"a,b\n1", "s3://b/demand/2.csv")
    with pytest.raises(SourceFault, match="3 of 5 bytes"):
        S3PrefixSource(table="demand", bucket="b", prefix="demand/", client=Bucket(cut=2))(NOW)


def test_an_object_that_is_larger_than_a_table_may_be_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five bytes where four may be: refused by what the listing says; five where five may be are read."""
    source = S3PrefixSource(table="demand", bucket="b", prefix="demand/", client=Bucket())
    monkeypatch.setattr("coral_tasks.ingestion.files.MAX_BYTES", 5)
    assert source(NOW).data == b"a,b\n1"
    monkeypatch.setattr("coral_tasks.ingestion.files.MAX_BYTES", 4)
    monkeypatch.setattr(Bucket, "get_object", None)
    with pytest.raises(SourceFault, match=r"demand/2\.csv is larger than 4 bytes"):
        source(NOW)


def node(name: str) -> Node:
    """An idle node."""
    return Node(
        id=NodeId(name),
        region=RegionId("aws/r"),
        configuration=NodeConfigurationId("L4x1"),
        market=Market.ON_DEMAND,
    )


def test_a_fleet_survives_the_way_through_its_table() -> None:
    """Nodes, instances and the order of stages come back as they went; an idle node has no instance."""
    instance = ServingInstance(
        id=InstanceId("i"),
        template=TemplateId("t"),
        model=ModelId("m"),
        phase=Phase.DECODE,
        region=RegionId("aws/r"),
        market=Market.ON_DEMAND,
        state=InstanceState.READY,
        stage_nodes=((NodeId("n3"),), (NodeId("n1"), NodeId("n2"))),
    )
    fleet = Fleet(nodes=tuple(node(f"n{k}") for k in range(1, 5)), instances=(instance,))
    assert fleet_of(running_table(fleet, NOW)) == fleet
    empty = Fleet(nodes=(), instances=())
    assert fleet_of(running_table(empty, NOW)) == empty


def test_the_agents_inventory_counts_nodes_and_says_who_answered() -> None:
    """Two nodes of one pool; one of two agents answered; none answering is unknown, not zero."""
    source = InventorySource(nodes=(node("a"), node("b")), observed_at=NOW, num_agents=2, num_answered=1)
    batch = source(NOW + timedelta(seconds=9))
    assert (batch.completeness, batch.age_s(NOW + timedelta(seconds=9))) == (0.5, 9.0)
    table = coerce(contract_of("availability"), batch.raw().table).table
    assert table is not None
    (row,) = availability_rows(table)
    assert row.available_nodes == 2
    assert merge_availability([row], []) == [row]
    with pytest.raises(SourceFault, match="unknown is not zero"):
        InventorySource(nodes=(), observed_at=NOW, num_agents=2, num_answered=0)(NOW)


def test_nodes_that_take_no_work_cannot_be_had_and_their_pool_stays_known() -> None:
    """Of two nodes one is excluded: 1 is left; with both excluded the pool is there with none, which is not unknown."""
    odd = ("node a is reported by one and by two; the latter ignored",)
    for unusable, left in (({NodeId("a"): "engine failed"}, 1), ({NodeId("a"): "x", NodeId("b"): "being profiled"}, 0)):
        source = InventorySource(
            nodes=(node("a"), node("b")),
            observed_at=NOW,
            num_agents=1,
            num_answered=1,
            unusable=unusable,
            trouble=odd,
        )
        batch = source(NOW)
        table = coerce(contract_of("availability"), batch.raw().table).table
        assert table is not None
        assert [row.available_nodes for row in availability_rows(table)] == [left]
        assert batch.notes == (*(f"node {name} is left out: {why}" for name, why in unusable.items()), *odd)


def test_a_cache_asks_no_more_than_it_must_and_keeps_the_true_age(tmp_path: Path) -> None:
    """Fresh answers are reused, old ones replaced, very old ones not used; a clock that stepped back trusts none."""
    calls: list[datetime] = []
    down = False

    def source(now: datetime) -> SourceBatch:
        calls.append(now)
        if down:
            raise SourceFault("down")
        return SourceBatch(table="prices", data=b"x", suffix=".csv", source="s", observed_at=now)

    cached = CachedSource(source=source, folder=tmp_path, name="prices", fresh_s=60, keep_s=600)
    assert cached(NOW).age_s(NOW) == 0.0
    soon = NOW + timedelta(seconds=50)
    assert (cached(soon).age_s(soon), len(calls)) == (50.0, 1)
    later = NOW + timedelta(seconds=100)
    assert (cached(later).age_s(later), len(calls)) == (0.0, 2)
    down = True
    bridged = cached(later + timedelta(seconds=500))
    assert bridged.observed_at == later
    assert "source failed (down)" in bridged.notes[0]
    with pytest.raises(SourceFault, match="down"):
        cached(later + timedelta(seconds=700))
    with pytest.raises(SourceFault, match="down"):
        cached(NOW - timedelta(days=1))
    (tmp_path / "prices.json").write_text("{")
    with pytest.raises(SourceFault, match="down"):
        cached(later)


def test_what_a_stopped_engine_served_in_the_interval_still_counts(serve: Any) -> None:
    """Demand does not fall because an engine was stopped; one that was never ours is left out and noted."""
    past = (MetricsTarget(instance="gone:1", model=ModelId("m"), phase=Phase.DECODE),)
    address = serve(prometheus(increase="600"))
    batch = demand_from(address, past=past)
    assert rows_of(batch)[0].requests_per_s == pytest.approx(2 * 600 / 300)
    assert not any("no longer run" in note for note in batch.notes)
    assert (batch.expected, batch.received) == (1, 1)
    reused = (MetricsTarget(instance="a:1", model=ModelId("old"), phase=Phase.DECODE),)
    assert rows_of(demand_from(address, past=reused))[0].requests_per_s == pytest.approx(2.0)
