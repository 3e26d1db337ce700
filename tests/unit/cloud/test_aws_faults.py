"""Every call of AWS against a real HTTP server that answers wrongly: one fault with its reason, never a traceback.

Storage, ingestion and provisioning are asked through boto3 itself; nothing between them and the socket is replaced
but botocore's pauses between tries.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from coral_tasks.cloud.aws import make_client
from coral_tasks.domain.errors import CoralFault, SourceFault, StorageFault, Unavailable
from coral_tasks.domain.names import Market, NodeConfigurationId, NodeId, RegionId
from coral_tasks.domain.transition import NodeRequest
from coral_tasks.ingestion.aws import AwsAvailability, AwsPrices, MachineOffer
from coral_tasks.ingestion.files import S3PrefixSource
from coral_tasks.provisioning.ec2 import Ec2Provisioner, Ec2Settings, LaunchTarget
from coral_tasks.storage.objects import S3Store

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
REGION = RegionId("aws/us-east-2")
POOL = (REGION, NodeConfigurationId("L4x1"), Market.ON_DEMAND)
OFFERS = (MachineOffer("g6.xlarge", NodeConfigurationId("L4x1")),)


class Answer(NamedTuple):
    """One HTTP answer. ``missing``: bytes that its head states and that never come."""

    body: bytes
    status: int = 200
    missing: int = 0
    etag: str = '"state"'
    pause_s: float = 0.0


LISTING = """<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>plans</Name>
<IsTruncated>false</IsTruncated><Contents><Key>lib/a.csv</Key><Size>3</Size><ETag>"state"</ETag>
<LastModified>2026-11-29T11:00:00.000Z</LastModified></Contents></ListBucketResult>"""
MACHINE = """<item><instanceId>i-1</instanceId><launchTime>2026-11-29T11:00:00.000Z</launchTime>
<privateIpAddress>10.0.0.1</privateIpAddress><tagSet>
<item><key>coral:configuration</key><value>L4x1</value></item><item><key>coral:market</key><value>on_demand</value></item>
</tagSet></item>"""
TERM = {"priceDimensions": {"d": {"unit": "Hrs", "pricePerUnit": {"USD": "0.8"}}}}
WHOLE: dict[str, str] = {
    "ListObjectsV2": LISTING,
    "GetObject": "a,b",
    "PutObject": "",
    "DeleteObject": "",
    "RunInstances": f"<RunInstancesResponse><instancesSet>{MACHINE}</instancesSet></RunInstancesResponse>",
    "DescribeInstances": f"""<DescribeInstancesResponse><reservationSet><item><instancesSet>{MACHINE}</instancesSet>
</item></reservationSet></DescribeInstancesResponse>""",
    "TerminateInstances": """<TerminateInstancesResponse><instancesSet><item><instanceId>i-1</instanceId></item>
</instancesSet></TerminateInstancesResponse>""",
    "DescribeSpotInstanceRequests": """<DescribeSpotInstanceRequestsResponse><spotInstanceRequestSet><item>
<instanceId>i-1</instanceId><status><code>marked-for-termination</code></status></item></spotInstanceRequestSet>
</DescribeSpotInstanceRequestsResponse>""",
    "DescribeSpotPriceHistory": """<DescribeSpotPriceHistoryResponse><spotPriceHistorySet><item>
<instanceType>g6.xlarge</instanceType><productDescription>Linux/UNIX</productDescription><spotPrice>0.3</spotPrice>
<timestamp>2026-11-29T11:00:00.000Z</timestamp><availabilityZone>us-east-2a</availabilityZone></item>
</spotPriceHistorySet></DescribeSpotPriceHistoryResponse>""",
    "DescribeInstanceTypes": """<DescribeInstanceTypesResponse><instanceTypeSet><item>
<instanceType>g6.xlarge</instanceType>
<vCpuInfo><defaultVCpus>4</defaultVCpus></vCpuInfo></item></instanceTypeSet></DescribeInstanceTypesResponse>""",
    "DescribeCapacityReservations": """<DescribeCapacityReservationsResponse><capacityReservationSet><item>
<instanceType>g6.xlarge</instanceType><totalInstanceCount>2</totalInstanceCount></item></capacityReservationSet>
</DescribeCapacityReservationsResponse>""",
    "GetProducts": json.dumps({"PriceList": [json.dumps({"terms": {"OnDemand": {"t": TERM}}})]}),
    "ListServiceQuotas": json.dumps({"Quotas": [{"QuotaCode": "L-DB2E81BA", "Value": 130.0}]}),
}
"""A whole answer of every operation, cut down to the fields that are read."""

JSON_CALLS = ("GetProducts", "ListServiceQuotas")
S3_METHODS = {"GET": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject"}


class Cloud(BaseHTTPRequestHandler):
    """AWS's services behind one address: whole answers, but ``wrong`` for the operation ``where``."""

    # boto3 asks "Expect: 100-continue" before a put and waits a second for a server that does not know it
    protocol_version = "HTTP/1.1"
    where: str = ""
    wrong: Answer = Answer(b"")

    def _operation(self, body: bytes) -> str:
        target = self.headers.get("X-Amz-Target")
        if target:
            return target.rpartition(".")[2]
        if b"Action=" in body:
            return body.partition(b"Action=")[2].partition(b"&")[0].decode()
        return "ListObjectsV2" if "list-type=2" in self.path else S3_METHODS[self.command]

    def do_POST(self) -> None:
        operation = self._operation(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        answer = self.wrong if operation == self.where else Answer(WHOLE[operation].encode())
        time.sleep(answer.pause_s)
        self.send_response(answer.status)
        self.send_header("Content-Length", str(len(answer.body) + answer.missing))
        if answer.etag:
            self.send_header("ETag", answer.etag)
        self.end_headers()
        self.wfile.write(answer.body)
        self.close_connection = self.close_connection or bool(answer.missing)

    do_GET = do_PUT = do_DELETE = do_POST  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of the server."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), Cloud)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patched:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.setenv(name, "testing")
        patched.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None))
        yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.fixture
def at(server: str) -> Place:
    """The server, healthy."""
    Cloud.where = ""
    return Place(server, 20.0)


class Place(NamedTuple):
    """Where the services are and how long a client waits for them."""

    address: str
    read_s: float


@cache
def client(at: Place, service: str, region: str = "us-east-2") -> Any:
    """A client with its patience."""
    return make_client(service, region, SourceFault, endpoint_url=at.address, read_s=at.read_s)


def store(at: Place) -> S3Store:
    """The store ``s3://plans/lib/``."""
    return S3Store(client(at, "s3"), "plans", "lib")


def provisioner(at: Place) -> Ec2Provisioner:
    """A fleet of one pool."""
    target = LaunchTarget(launch_template="t", machine_type="g6.xlarge", max_nodes=4)
    settings = Ec2Settings(fleet="test", targets={POOL: target}, agent_port=7400, agent_key="fleet")
    return Ec2Provisioner(settings=settings, client_of=lambda _: client(at, "ec2"))


def request() -> NodeRequest:
    """One node."""
    return NodeRequest(region=POOL[0], configuration=POOL[1], market=POOL[2], count=1, token="t")


def prices(at: Place) -> Any:
    """Prices of one offer: how many came."""
    source = AwsPrices(offers=OFFERS, regions=("us-east-2",), clients=partial(client, at))
    return source(NOW).received


def availability(at: Place) -> Any:
    """Availability of one offer: how many came."""
    return AwsAvailability(offers=OFFERS, regions=("us-east-2",), clients=partial(client, at))(NOW).received


def prefix(at: Place) -> Any:
    """The newest object of a prefix."""
    return S3PrefixSource(table="demand", bucket="plans", prefix="lib/", client=client(at, "s3"))(NOW).data


Use = tuple[str, Callable[[Place], Any], Any, type[CoralFault]]
USES: dict[str, Use] = {
    "store lists": ("ListObjectsV2", lambda at: [one.key for one in store(at).list("")], ["a.csv"], StorageFault),
    "store asks": ("ListObjectsV2", lambda at: store(at).exists("a.csv"), True, StorageFault),
    "store reads": ("GetObject", lambda at: store(at).get_with_token("a.csv"), (b"a,b", '"state"'), StorageFault),
    "store writes": ("PutObject", lambda at: store(at).put("a.csv", b"x"), None, StorageFault),
    "store writes if": ("PutObject", lambda at: store(at).put_if("a.csv", b"x", None), True, StorageFault),
    "store deletes": ("DeleteObject", lambda at: store(at).delete("a.csv"), None, StorageFault),
    "prefix lists": ("ListObjectsV2", prefix, b"a,b", SourceFault),
    "prefix reads": ("GetObject", prefix, b"a,b", SourceFault),
    "fleet": ("DescribeInstances", lambda at: len(provisioner(at).machines()), 1, SourceFault),
    "launch": ("RunInstances", lambda at: len(provisioner(at).provision(request())), 1, SourceFault),
    "release": ("TerminateInstances", lambda at: provisioner(at).release((NodeId("i-1"),)), None, SourceFault),
    "interrupted": ("DescribeSpotInstanceRequests", lambda at: provisioner(at).interrupted(), {"i-1"}, SourceFault),
    "spot prices": ("DescribeSpotPriceHistory", prices, 2, SourceFault),
    "list prices": ("GetProducts", prices, 2, SourceFault),
    "machine sizes": ("DescribeInstanceTypes", availability, 1, SourceFault),
    "quotas": ("ListServiceQuotas", availability, 1, SourceFault),
    "reservations": ("DescribeCapacityReservations", availability, 1, SourceFault),
}
"""By use: the operation that goes wrong, the call, what it gives when all is well, and the fault it must raise."""

WITHOUT_BODY = ("PutObject", "DeleteObject")
"""Their answers hold nothing, so no body of theirs can be wrong."""


@pytest.mark.parametrize("use", USES)
def test_whole_answers_are_read(at: Place, use: str) -> None:
    """The server's whole answers give the right values, so what the faults below refuse is the fault alone."""
    _, call, wanted, _ = USES[use]
    assert call(at) == wanted


def _half(operation: str) -> bytes:
    whole = WHOLE[operation].encode()
    return whole[: len(whole) * 2 // 3]


ANYWHERE: dict[str, Callable[[str], Answer]] = {
    "429": lambda _: Answer(b"", 429),
    "500": lambda _: Answer(b"<html>Internal</html>", 500),
    "503": lambda _: Answer(b"<Error><Code>SlowDown</Code></Error>", 503),
    "403 without a word": lambda _: Answer(b"", 403),
    "400 in JSON of another shape": lambda _: Answer(b"[1]", 400),
    "moved to nowhere": lambda _: Answer(b"", 301),
}
BODIES: dict[str, Callable[[str], Answer]] = {
    "half": lambda operation: Answer(_half(operation)),
    "cut": lambda operation: Answer(_half(operation), missing=500),
    "nothing": lambda _: Answer(b"", etag=""),
    "a web page": lambda _: Answer(b"<html><body>502 Bad Gateway", etag=""),
    "a whole web page": lambda _: Answer(b"<html><body><p>login</p></body></html>", etag=""),
    "text": lambda _: Answer(b"OK", etag=""),
    "bytes": lambda _: Answer(bytes(range(256)), etag=""),
    "a JSON list": lambda _: Answer(b"[]", etag=""),
    "JSON null": lambda _: Answer(b"null", etag=""),
    "a JSON number": lambda _: Answer(b"17", etag=""),
    "deep JSON": lambda _: Answer(b"[" * 200_000, etag=""),
    "deep XML": lambda _: Answer(b"<a>" * 20_000 + b"</a>" * 20_000, etag=""),
}
CASES = [
    pytest.param(use, kind, make, id=f"{use}-{kind}")
    for use, (operation, _, _, _) in USES.items()
    for kind, make in (ANYWHERE if operation in WITHOUT_BODY else ANYWHERE | BODIES).items()
    # the store cannot know what length was meant; who listed the object before can
    if (use, kind) != ("store reads", "half")
]


@pytest.mark.parametrize(("use", "kind", "make"), CASES)
def test_no_wrong_answer_is_taken_or_ends_in_a_traceback(
    at: Place, use: str, kind: str, make: Callable[[str], Answer]
) -> None:
    """Each kind of wrong answer of each call raises the caller's fault, short enough for a log line."""
    operation, call, _, fault = USES[use]
    Cloud.where, Cloud.wrong = operation, make(operation)
    with pytest.raises(fault) as caught:
        call(at)
    assert len(str(caught.value)) < 900


FIELDS: list[tuple[str, str, str]] = [
    ("store lists", "<Size>3</Size>", "<Size>many</Size>"),
    ("store lists", "<Size>3</Size>", ""),
    ("store lists", "<Key>lib/a.csv</Key>", ""),
    ("store lists", "2026-11-29T11:00:00.000Z", "soon"),
    ("prefix lists", "2026-11-29T11:00:00.000Z", "2026-13-45"),
    ("prefix lists", "<LastModified>2026-11-29T11:00:00.000Z</LastModified>", ""),
    ("fleet", "<instanceId>i-1</instanceId>", ""),
    ("fleet", "<launchTime>2026-11-29T11:00:00.000Z</launchTime>", ""),
    ("fleet", "2026-11-29T11:00:00.000Z", "soon"),
    ("fleet", "instancesSet", "others"),
    ("launch", "instancesSet", "others"),
    ("release", "instancesSet", "others"),
    ("spot prices", "0.3", "NaN"),
    ("spot prices", "0.3", "-0.3"),
    ("spot prices", "0.3", "1e400"),
    ("spot prices", "2026-11-29T11:00:00.000Z", "yesterday"),
    ("list prices", "0.8", "NaN"),
    ("list prices", "0.8", "-0.8"),
    ("list prices", "USD", "CNY"),
    ("list prices", '\\"OnDemand\\": {', '\\"OnDemand\\": {\\"x\\": [], '),
    ("machine sizes", "<defaultVCpus>4</defaultVCpus>", "<defaultVCpus>four</defaultVCpus>"),
    ("machine sizes", "<defaultVCpus>4</defaultVCpus>", ""),
    ("quotas", "130.0", '"a lot"'),
    ("quotas", "130.0", "-1"),
    ("quotas", "130.0", "1e999"),
    ("quotas", '[{"QuotaCode"', '[null, {"QuotaCode"'),
    ("quotas", '[{"QuotaCode"', '["x", {"QuotaCode"'),
    ("reservations", "<totalInstanceCount>2</totalInstanceCount>", "<totalInstanceCount>-2</totalInstanceCount>"),
    ("reservations", "<totalInstanceCount>2</totalInstanceCount>", "<totalInstanceCount>2.5</totalInstanceCount>"),
]


@pytest.mark.parametrize(("use", "old", "new"), FIELDS)
def test_a_field_that_is_absent_or_of_another_kind_is_a_fault(at: Place, use: str, old: str, new: str) -> None:
    """A well-formed answer with one wrong field is not read as a smaller one."""
    operation, call, _, fault = USES[use]
    whole = WHOLE[operation]
    assert old in whole
    Cloud.where, Cloud.wrong = operation, Answer(whole.replace(old, new).encode())
    with pytest.raises(fault) as caught:
        call(at)
    assert len(str(caught.value)) < 900


@pytest.mark.parametrize("use", ["store lists", "store reads", "store writes", "fleet", "launch", "quotas"])
def test_a_service_that_hangs_is_given_up(at: Place, use: str) -> None:
    """No answer within the time limit is a fault after few tries."""
    operation, call, _, fault = USES[use]
    Cloud.where, Cloud.wrong = operation, Answer(WHOLE[operation].encode(), pause_s=0.5)
    with pytest.raises(fault, match=r"[Tt]imeout"):
        call(at._replace(read_s=0.15))


def test_missing_capacity_is_an_expected_no_and_a_lost_race_is_false(at: Place) -> None:
    """Error codes keep their meaning: no capacity, an object that is not there, a condition that does not hold."""
    no = "<Response><Errors><Error><Code>InsufficientInstanceCapacity</Code></Error></Errors></Response>"
    Cloud.where, Cloud.wrong = "RunInstances", Answer(no.encode(), 400)
    with pytest.raises(Unavailable, match=r"EC2 run_instances in aws/us-east-2: .*InsufficientInstanceCapacity"):
        provisioner(at).provision(request())
    Cloud.where, Cloud.wrong = "GetObject", Answer(b"<Error><Code>NoSuchKey</Code></Error>", 404)
    assert store(at).get("a.csv") is None
    Cloud.where, Cloud.wrong = "PutObject", Answer(b"<Error><Code>PreconditionFailed</Code></Error>", 412)
    assert store(at).put_if("a.csv", b"x", '"state"') is False
    with pytest.raises(StorageFault, match="PreconditionFailed"):
        store(at).put("a.csv", b"x")


def test_a_put_that_nobody_confirms_is_not_taken_for_written(at: Place) -> None:
    """S3 names the state it wrote; a page that answers 200 to everything does not."""
    Cloud.where, Cloud.wrong = "PutObject", Answer(b"<html>welcome</html>", etag="")
    for write in (lambda: store(at).put("a", b"x"), lambda: store(at).put_if("a", b"x", None)):
        with pytest.raises(StorageFault, match="cannot write a in s3://plans/lib/: the answer names no ETag"):
            write()


def test_a_folder_of_the_s3_console_is_no_file(at: Place) -> None:
    """The console makes "folders" as empty objects whose key ends in a slash; even named like a file it is none."""
    marker = LISTING.replace("lib/a.csv", "lib/z.csv/").replace("<ListBucketResult", "<x").partition("<Contents>")[2]
    both = LISTING.replace("<Contents>", f"<Contents>{marker.partition('</Contents>')[0]}</Contents><Contents>")
    Cloud.where, Cloud.wrong = "ListObjectsV2", Answer(both.encode())
    assert prefix(at) == b"a,b"


@pytest.mark.parametrize(
    ("region", "address"),
    [("us-east-2", "no address"), ("us-east-2", "http://"), ("a region", None), ("us_east_2/../x", None)],
)
def test_settings_that_make_no_client_are_a_fault(region: str, address: str | None) -> None:
    """A misspelt region or endpoint names the service instead of ending in boto3's traceback."""
    with pytest.raises(SourceFault, match="aws s3: no client: "):
        make_client("s3", region, SourceFault, endpoint_url=address)
