"""AWS sources against a local server with answers in the form AWS documents, and against moto's server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from coral_tasks.domain.errors import SourceFault
from coral_tasks.domain.names import NodeConfigurationId
from coral_tasks.ingestion.aws import AwsAvailability, AwsPrices, MachineOffer, client_factory
from coral_tasks.ingestion.batch import SourceBatch
from coral_tasks.ingestion.files import S3PrefixSource
from data_contracts.contract import GateContext
from data_contracts.gate import check_table
from data_contracts.registry import contract_of

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
OFFERS = (
    MachineOffer("g6.xlarge", NodeConfigurationId("L4x1")),
    MachineOffer("p4d.24xlarge", NodeConfigurationId("A100-40GBx8")),
)


def product(price: str, unit: str = "Hrs") -> str:
    """One entry of the price list, in the form that the price list API documents."""
    dimension = {"unit": unit, "pricePerUnit": {"USD": price}, "description": "per On Demand Linux hour"}
    term = {"priceDimensions": {"A.B.C": dimension}, "sku": "A"}
    return json.dumps({"product": {"sku": "A"}, "terms": {"OnDemand": {"A.B": term}}})


SPOT = """<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><spotPriceHistorySet>
<item><instanceType>g6.xlarge</instanceType><productDescription>Linux/UNIX</productDescription>
<spotPrice>0.300000</spotPrice><timestamp>2026-11-29T11:00:00.000Z</timestamp><availabilityZone>us-east-2a</availabilityZone></item>
<item><instanceType>g6.xlarge</instanceType><productDescription>Linux/UNIX</productDescription>
<spotPrice>0.250000</spotPrice><timestamp>2026-11-29T10:00:00.000Z</timestamp><availabilityZone>us-east-2a</availabilityZone></item>
<item><instanceType>g6.xlarge</instanceType><productDescription>Windows</productDescription>
<spotPrice>0.100000</spotPrice><timestamp>2026-11-29T11:30:00.000Z</timestamp><availabilityZone>us-east-2a</availabilityZone></item>
</spotPriceHistorySet><nextToken>{token}</nextToken></DescribeSpotPriceHistoryResponse>"""

SPOT_SECOND = """<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><spotPriceHistorySet>
<item><instanceType>g6.xlarge</instanceType><productDescription>Linux/UNIX (Amazon VPC)</productDescription>
<spotPrice>0.275600</spotPrice><timestamp>2026-11-29T11:00:00.000Z</timestamp><availabilityZone>us-east-2b</availabilityZone></item>
</spotPriceHistorySet><nextToken></nextToken></DescribeSpotPriceHistoryResponse>"""

TYPES = """<DescribeInstanceTypesResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><instanceTypeSet>
<item><instanceType>g6.xlarge</instanceType><vCpuInfo><defaultVCpus>4</defaultVCpus></vCpuInfo></item>
<item><instanceType>p4d.24xlarge</instanceType><vCpuInfo><defaultVCpus>96</defaultVCpus></vCpuInfo></item>
</instanceTypeSet></DescribeInstanceTypesResponse>"""

RESERVED = """<DescribeCapacityReservationsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">
<capacityReservationSet><item><instanceType>p4d.24xlarge</instanceType><totalInstanceCount>2</totalInstanceCount>
<availableInstanceCount>1</availableInstanceCount><state>active</state></item></capacityReservationSet>
</DescribeCapacityReservationsResponse>"""

QUOTAS = {
    "Quotas": [
        {"ServiceCode": "ec2", "QuotaCode": "L-DB2E81BA", "Value": 130.0},
        {"ServiceCode": "ec2", "QuotaCode": "L-417A185B", "Value": 95.0},
    ]
}

Answer = tuple[int, str]
CUT = 299
"""Stands for a 200 whose body ends before the length that its head states."""


class Cloud(BaseHTTPRequestHandler):
    """Answers each operation by ``script``: operation and number of the call → status and body."""

    script: Callable[[str, int, str], Answer]
    calls: dict[str, int]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        target = self.headers.get("X-Amz-Target", "")
        operation = target.rpartition(".")[2] or body.partition("Action=")[2].partition("&")[0]
        type(self).calls[operation] = type(self).calls.get(operation, 0) + 1
        status, text = type(self).script(operation, type(self).calls[operation], body)
        data = text.encode()
        if status == CUT:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + 500))
            self.end_headers()
            self.wfile.write(data)
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1" if target else "text/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def healthy(operation: str, number: int, body: str) -> Answer:
    """Every answer whole, with the price list and the spot history in two pages."""
    del number
    if operation == "GetProducts":
        if "p4d" in body:
            return 200, json.dumps({"PriceList": [product("32.7726")]})
        if "NextToken" in body:
            return 200, json.dumps({"PriceList": [product("0.8048")]})
        return 200, json.dumps({"PriceList": [product("0.0")], "NextToken": "2"})
    if operation == "ListServiceQuotas":
        return 200, json.dumps(QUOTAS)
    texts = {"DescribeInstanceTypes": TYPES, "DescribeCapacityReservations": RESERVED}
    texts["DescribeSpotPriceHistory"] = SPOT_SECOND if "NextToken" in body else SPOT.replace("{token}", "2")
    return 200, texts[operation]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Cloud], str]]:
    """A local AWS with its address."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")

    class Fresh(Cloud):
        script = staticmethod(healthy)
        calls: dict[str, int] = {}  # noqa: RUF012

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Fresh, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def prices(address: str, **limits: Any) -> AwsPrices:
    """Both offers in one region."""
    clients = client_factory(endpoint_url=address, **limits)
    return AwsPrices(offers=OFFERS, regions=("us-east-2",), clients=clients)


def test_prices_come_from_all_pages_and_the_newest_linux_entry_of_the_cheapest_zone(cloud: Any) -> None:
    """On-demand 0.8048 is on the second page; spot: zone a's newest is 0.30, zone b has 0.2756; Windows is not ours."""
    batch = prices(cloud[1])(NOW)
    outcome = check_table(contract_of("prices"), batch.raw(), GateContext(now=NOW))
    assert outcome.table is not None
    found = {(row["configuration"], row["market"]): row["price_usd_per_hour"] for row in outcome.table.to_pylist()}
    assert found == {("L4x1", "on_demand"): 0.8048, ("L4x1", "spot"): 0.2756, ("A100-40GBx8", "on_demand"): 32.7726}
    assert batch.completeness == 0.75
    assert batch.notes == ("no spot price of p4d.24xlarge in us-east-2",)


def test_availability_is_quota_over_vcpus_and_reserved_instances(cloud: Any) -> None:
    """130 vCPUs hold 32 machines of 4; 95 hold none of 96; two are reserved; spot quotas are unknown, so no row."""
    batch = AwsAvailability(offers=OFFERS, regions=("us-east-2",), clients=client_factory(endpoint_url=cloud[1]))(NOW)
    outcome = check_table(contract_of("availability"), batch.raw(), GateContext(now=NOW))
    assert outcome.table is not None
    found = {(row["configuration"], row["market"]): row["available_nodes"] for row in outcome.table.to_pylist()}
    assert found == {("L4x1", "on_demand"): 32, ("A100-40GBx8", "on_demand"): 0, ("A100-40GBx8", "reserved"): 2}
    assert batch.completeness == 1.0


@pytest.mark.parametrize("status", [429, 500, 503])
def test_one_refusal_is_tried_again(cloud: Any, status: int) -> None:
    """429 and 5xx are passed over by back-off, and the answer is the same."""
    error = json.dumps({"__type": "ThrottlingException", "message": "Rate exceeded"})
    cloud[0].script = staticmethod(
        lambda operation, number, body: (
            (status, error) if operation == "GetProducts" and number == 1 else healthy(operation, number, body)
        )
    )
    assert prices(cloud[1])(NOW).received == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, json.dumps({"__type": "AccessDeniedException", "message": "not yours"})), "AccessDenied"),
        ((200, '{"PriceList": ["{}"'), "aws get_products"),
        ((200, "{}"), "page 1 of 1 came without PriceList"),
        ((200, json.dumps({"PriceList": ['{"terms":']})), "not whole"),
        ((200, json.dumps({"PriceList": [product("a lot")]})), "not whole"),
        ((200, json.dumps({"PriceList": [product("NaN"), product("1")], "NextToken": "1"})), "same next token"),
        (
            (200, json.dumps({"PriceList": [product("1"), product("1"), product("2")]})),
            "two on-demand prices for .* 1 and 2",
        ),
    ],
)
def test_half_an_answer_is_a_fault(cloud: Any, answer: Answer, message: str) -> None:
    """No page that is refused, cut off, without its list or with broken products yields a shorter table."""
    cloud[0].script = staticmethod(
        lambda operation, number, body: answer if operation == "GetProducts" else healthy(operation, number, body)
    )
    with pytest.raises(SourceFault, match=message):
        prices(cloud[1])(NOW)


def test_the_second_page_failing_fails_the_whole(cloud: Any) -> None:
    """A fault in the middle of the pages is a fault of the fetch."""
    denied = (400, json.dumps({"__type": "ExpiredNextTokenException", "message": "expired"}))
    cloud[0].script = staticmethod(
        lambda operation, number, body: denied if "NextToken" in body else healthy(operation, number, body)
    )
    with pytest.raises(SourceFault, match="ExpiredNextToken"):
        prices(cloud[1])(NOW)


def test_a_source_that_hangs_is_given_up(cloud: Any) -> None:
    """No answer within the time limit is a fault that names the call, after few tries."""

    def hang(operation: str, number: int, body: str) -> Answer:
        time.sleep(1.0)
        return healthy(operation, number, body)

    cloud[0].script = staticmethod(hang)
    started = time.monotonic()
    with pytest.raises(SourceFault, match=r"aws get_products.*[Tt]imeout"):
        prices(cloud[1], read_s=0.1)(NOW)
    assert time.monotonic() - started < 60


def newest_object(address: str) -> SourceBatch:
    """Two objects and a temporary under a prefix of moto's S3; what the source takes for the newest."""
    client = client_factory(endpoint_url=address)("s3", "us-east-1")
    client.create_bucket(Bucket="plans")
    for key, data in (("demand/a.csv", b"first"), ("demand/b.csv", b"second"), ("demand/c.csv.tmp", b"half")):
        client.put_object(Bucket="plans", Key=key, Body=data)
    batch = S3PrefixSource(table="demand", bucket="plans", prefix="demand/", client=client)(NOW)
    with pytest.raises(SourceFault, match="no CSV or Parquet object"):
        S3PrefixSource(table="demand", bucket="plans", prefix="prices/", client=client)(NOW)
    with pytest.raises(SourceFault, match="NoSuchBucket"):
        S3PrefixSource(table="demand", bucket="absent", prefix="", client=client)(NOW)
    return batch


def test_prices_of_moto_are_read_and_refused_by_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moto's server gives a spot price of 0.00001: read as it is, and stopped by the jump rule against what we knew."""
    from dataclasses import replace

    from moto.server import ThreadedMotoServer

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        source = prices(f"http://{host}:{port}")
        spot = source._spot("us-east-2", NOW)
        batch = newest_object(f"http://{host}:{port}")
    finally:
        server.stop()
    assert spot["g6.xlarge"] == 0.00001
    assert (batch.data, batch.source) == (b"second", "s3://plans/demand/b.csv")
    contract = contract_of("prices")
    known = contract.example_table(NOW)
    rows = [
        {**row, "price_usd_per_hour": spot["g6.xlarge"]} if row["market"] == "spot" else row
        for row in known.to_pylist()
    ]
    report = check_table(contract, contract.table(rows), replace(GateContext(now=NOW), previous=known)).report
    assert [finding.rule for finding in report.findings] == ["price_usd_per_hour_jump"]


OPERATIONS = {
    "GetProducts": ("PriceList", {"PriceList": ['{"product": {}}']}),
    "ListServiceQuotas": ("Quotas", {"Quotas": [{"QuotaCode": "L-DB2E81BA"}]}),
    "DescribeSpotPriceHistory": (
        "SpotPriceHistory",
        SPOT_SECOND.replace("<spotPrice>0.275600</spotPrice>", ""),
    ),
    "DescribeInstanceTypes": ("InstanceTypes", TYPES.replace("<defaultVCpus>4</defaultVCpus>", "")),
    "DescribeCapacityReservations": (
        "CapacityReservations",
        RESERVED.replace("<totalInstanceCount>2</totalInstanceCount>", ""),
    ),
}
"""By operation: the list it must have, and an answer whose entry lacks a field."""


def aws_source(operation: str, address: str) -> AwsPrices | AwsAvailability:
    """The source that calls the operation."""
    kind = AwsPrices if operation in ("GetProducts", "DescribeSpotPriceHistory") else AwsAvailability
    return kind(offers=OFFERS, regions=("us-east-2",), clients=client_factory(endpoint_url=address, read_s=0.3))


def faulty(operation: str, kind: str) -> Answer:
    """An answer of the operation that is none."""
    is_json = operation in ("GetProducts", "ListServiceQuotas")
    entry = OPERATIONS[operation][1]
    error = (
        json.dumps({"__type": "ThrottlingException", "message": "slow down"})
        if is_json
        else "<Response><Errors><Error><Code>Throttled</Code><Message>slow down</Message></Error></Errors></Response>"
    )
    whole = healthy(operation, 1, "")[1]
    answers: dict[str, Answer] = {
        "429": (429, error),
        "500": (500, error),
        "refused": (403, error),
        "cut": (CUT, whole[: len(whole) // 2]),
        "half of a document": (200, whole[: len(whole) // 2]),
        "a web page": (200, "<html><body>502 Bad Gateway</body>"),
        "an entry without its field": (200, json.dumps(entry) if is_json else str(entry)),
    }
    return answers[kind]


FAULTS = ["429", "500", "refused", "cut", "half of a document", "a web page", "an entry without its field"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", [*FAULTS, "hangs"])
def test_no_fault_of_any_aws_call_becomes_a_shorter_table(
    cloud: Any, monkeypatch: pytest.MonkeyPatch, operation: str, kind: str
) -> None:
    """Price list, spot history, quotas, machine sizes and reservations: each fault of each ends the whole fetch."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))

    def script(called: str, number: int, body: str) -> Answer:
        if called != operation:
            return healthy(called, number, body)
        if kind == "hangs":
            time.sleep(0.6)
            return healthy(called, number, body)
        return faulty(operation, kind)

    cloud[0].script = staticmethod(script)
    with pytest.raises(SourceFault, match=r"aws |AWS"):
        aws_source(operation, cloud[1])(NOW)


class Bucket(BaseHTTPRequestHandler):
    """An S3 with one object; ``fault``: what is wrong with which of the two calls."""

    fault: tuple[str, str] = ("", "")

    def do_GET(self) -> None:
        call = "list" if "list-type=2" in self.path else "get"
        listing = (
            "<ListBucketResult><Contents><Key>demand/a.csv</Key><Size>5</Size>"
            "<LastModified>2026-11-29T11:00:00.000Z</LastModified></Contents></ListBucketResult>"
        )
        text, status, length = listing if call == "list" else "a,b\n1", 200, None
        where, kind = type(self).fault
        if where == call:
            if kind == "hangs":
                time.sleep(0.6)
            status = {"429": 429, "500": 500, "503": 503, "refused": 403}.get(kind, 200)
            text = "<Error><Code>SlowDown</Code></Error>" if status != 200 else text
            length = len(text) + 100 if kind == "cut" else None
            text = {"a web page": "<html>", "cut": text[: len(text) // 2]}.get(kind, text)
        self.send_response(status)
        self.send_header("Content-Length", str(length or len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("call", ["list", "get"])
@pytest.mark.parametrize("kind", ["429", "500", "503", "refused", "cut", "hangs", "a web page"])
def test_no_fault_of_an_s3_call_becomes_an_older_or_shorter_file(
    monkeypatch: pytest.MonkeyPatch, call: str, kind: str
) -> None:
    """Listing and reading: each fault is named with the bucket; an object of another length is not taken."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))

    class Faulty(Bucket):
        fault = (call, kind)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        client = client_factory(endpoint_url=address, read_s=0.3)("s3", "us-east-1")
        with pytest.raises(SourceFault, match=r"demand: .*s3://plans/demand/"):
            S3PrefixSource(table="demand", bucket="plans", prefix="demand/", client=client)(NOW)
    finally:
        server.shutdown()
        server.server_close()
