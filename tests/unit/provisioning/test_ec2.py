"""EC2 provisioning against a local AWS server (moto), and feedback of missing capacity."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from moto.server import ThreadedMotoServer

from coral_tasks.domain.errors import SourceFault, Unavailable, ValidationFailed
from coral_tasks.domain.names import Market, NodeConfigurationId, NodeId, RegionId
from coral_tasks.domain.transition import NodeRequest
from coral_tasks.provisioning.ec2 import Ec2Provisioner, Ec2Settings, LaunchTarget
from coral_tasks.provisioning.static import StaticProvisioner

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
REGION = RegionId("aws/us-east-2")
L4 = (REGION, NodeConfigurationId("L4x1"), Market.ON_DEMAND)
SPOT = (REGION, NodeConfigurationId("L4x1"), Market.SPOT)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a local AWS server."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def client(server: str):
    """A client of an empty account with one launch template."""
    made = boto3.client(
        "ec2",
        region_name="us-east-2",
        endpoint_url=server,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    urllib.request.urlopen(urllib.request.Request(f"{server}/moto-api/reset", method="POST"), timeout=10).close()
    made.create_launch_template(LaunchTemplateName="coral-l4", LaunchTemplateData={"ImageId": "ami-12c6146b"})
    return made


def provisioner(client, **fields) -> Ec2Provisioner:
    target = LaunchTarget(launch_template="coral-l4", machine_type="g6.xlarge", max_nodes=4)
    settings = Ec2Settings(fleet="test", targets={L4: target, SPOT: target}, agent_port=7400, agent_key="fleet")
    return Ec2Provisioner(settings=replace(settings, **fields), client_of=lambda _: client)


def request(count: int, token: str = "t1", pool=L4) -> NodeRequest:
    return NodeRequest(region=pool[0], configuration=pool[1], market=pool[2], count=count, token=token)


def test_machines_are_launched_tagged_and_found_again(client) -> None:
    """Two machines with the fleet's tags; they count as held and have addresses for their agents."""
    cloud = provisioner(client)
    assert cloud.obtainable() == {L4: 4, SPOT: 4}
    came = cloud.provision(request(2))
    assert [one.node.configuration for one in came] == ["L4x1", "L4x1"]
    assert cloud.obtainable() == {L4: 2, SPOT: 4}
    assert cloud.releasable() == {one.node.id for one in came}
    assert cloud.endpoints() == {one.machine: f"tcp://{one.address}:7400" for one in came}
    assert provisioner(client, fleet="other").machines() == ()


def test_a_machine_counts_as_booting_for_a_while_after_its_launch(client) -> None:
    """Launched now: booting for those who allow an hour, not for those whose limit (1 ns) is over."""
    came = provisioner(client).provision(request(1))
    assert provisioner(client, boot_s=3600.0).booting() == {came[0].node.id}
    assert provisioner(client, boot_s=1e-9).booting() == frozenset()


def test_the_same_token_never_launches_twice(client) -> None:
    """A retried request gets the machines of the first one; another token or fleet gets its own."""
    sent = []
    client.meta.events.register("provide-client-params.ec2.RunInstances", lambda params, **_: sent.append(params))
    cloud = provisioner(client)
    cloud.provision(request(1, "a"))
    cloud.provision(request(1, "a"))
    cloud.provision(request(1, "b"))
    provisioner(client, fleet="other").provision(request(1, "a"))
    tokens = [params["ClientToken"] for params in sent]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 3
    assert all(len(token) <= 64 and token.isascii() for token in tokens)


def test_spot_machines_are_asked_for_as_spot(client) -> None:
    """The spot market uses one-time requests that end with the machine; on demand uses none."""
    sent = []
    client.meta.events.register("provide-client-params.ec2.RunInstances", lambda params, **_: sent.append(params))
    cloud = provisioner(client)
    assert cloud.provision(request(1, pool=SPOT))[0].node.market is Market.SPOT
    cloud.provision(request(1, "t2"))
    assert sent[0]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert "InstanceMarketOptions" not in sent[1]


def test_only_our_own_machines_are_released(client) -> None:
    """A stranger's machine and an unknown id are left alone; releasing twice does no harm."""
    cloud, stranger = provisioner(client), provisioner(client, fleet="other")
    ours, theirs = cloud.provision(request(1))[0].node.id, stranger.provision(request(1, "x"))[0].node.id
    for _ in range(2):
        cloud.release((ours, theirs, NodeId("i-unknown")))
    assert cloud.machines() == ()
    assert stranger.releasable() == {theirs}


def failed(request, code: str) -> AWSResponse:
    """EC2's answer to a refused request, as it looks on the wire."""
    body = f"<Response><Errors><Error><Code>{code}</Code><Message>no</Message></Error></Errors></Response>"

    class Raw:
        def stream(self, *_args, **_kwargs):
            yield body.encode()

    return AWSResponse(request.url, 400, {}, Raw())


def fail_with(client, code: str) -> None:
    """Let every RunInstances be refused."""
    client.meta.events.register("before-send.ec2.RunInstances", lambda request, **_: failed(request, code))


@pytest.mark.parametrize("code", ["InsufficientInstanceCapacity", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"])
def test_missing_capacity_is_an_expected_answer(client, code: str) -> None:
    """EC2 has none: Unavailable, which is fed back as availability, not a fault to be retried."""
    fail_with(client, code)
    with pytest.raises(Unavailable, match=code):
        provisioner(client).provision(request(1))


def test_where_all_cannot_be_had_as_many_as_there_are_come(client) -> None:
    """Asked for three where EC2 refuses three at once, the second request accepts any number from one."""
    sent = []

    def refuse_all_or_nothing(request, **_):
        body = request.body.decode() if isinstance(request.body, bytes) else str(request.body)
        sent.append("MinCount=3" in body)
        return failed(request, "InsufficientInstanceCapacity") if sent[-1] else None

    client.meta.events.register("before-send.ec2.RunInstances", refuse_all_or_nothing)
    assert len(provisioner(client).provision(request(3))) == 1
    assert sent == [True, False]


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "InvalidLaunchTemplateName.NotFoundException"])
def test_other_answers_are_faults(client, code: str) -> None:
    """Wrong permissions or templates are faults with EC2's own words."""
    fail_with(client, code)
    with pytest.raises(SourceFault, match=code):
        provisioner(client).provision(request(1))


def test_an_unconfigured_pool_is_unavailable(client) -> None:
    """Without a launch template for the pool nothing is guessed."""
    pool = (REGION, NodeConfigurationId("H100x8"), Market.ON_DEMAND)
    with pytest.raises(Unavailable, match="no launch template for aws/us-east-2 H100x8 on_demand"):
        provisioner(client).provision(request(1, pool=pool))


def test_interrupted_spot_machines_are_named(client) -> None:
    """Machines that EC2 marked for termination are ours to drain; strangers' and healthy ones are not listed."""
    cloud = provisioner(client)
    machine = cloud.provision(request(1, pool=SPOT))[0].node.id
    pages = [
        {"InstanceId": machine, "Status": {"Code": "marked-for-termination"}},
        {"InstanceId": "i-stranger", "Status": {"Code": "marked-for-termination"}},
        {"InstanceId": machine, "Status": {"Code": "fulfilled"}},
    ]

    class Client:
        def get_paginator(self, name: str):
            found = {"SpotInstanceRequests": pages}
            paginator = client.get_paginator(name)
            return type("P", (), {"paginate": lambda _, **a: [found] if "spot" in name else paginator.paginate(**a)})()

    assert replace(cloud, client_of=lambda _: Client()).interrupted() == {machine}


def test_a_machine_whose_tags_say_nothing_blinds_nobody(client, caplog) -> None:
    """Of three, one lost a tag and one has a market of its own: all are asked, one may be ended; 4 - 1 - 2 are left.

    The two may be of either pool, so that they count in both: 4 - 0 - 2 of the spot machines.
    """
    cloud = provisioner(client)
    good, lost, odd = (str(one.node.id) for one in cloud.provision(request(3)))
    client.delete_tags(Resources=[lost], Tags=[{"Key": "coral:configuration"}])
    client.create_tags(Resources=[odd], Tags=[{"Key": "coral:market", "Value": "free"}])
    assert set(cloud.endpoints()) == {good, lost, odd}
    assert cloud.releasable() == cloud.booting() == {good}
    assert cloud.obtainable() == {L4: 1, SPOT: 2}
    assert lost in caplog.text
    cloud.release((NodeId(good), NodeId(lost), NodeId(odd)))
    assert set(cloud.endpoints()) == {lost, odd}


def test_what_was_launched_is_known_without_its_tags(client) -> None:
    """EC2 may show tags a moment later; a launch that fails to be read would be bought again."""
    client.meta.events.register(
        "after-call.ec2.RunInstances", lambda parsed, **_: [one.pop("Tags", None) for one in parsed["Instances"]]
    )
    (came,) = provisioner(client).provision(request(1))
    assert (came.node.configuration, came.node.market) == ("L4x1", Market.ON_DEMAND)


def test_settings_check_themselves() -> None:
    """Regions of another provider and negative limits are refused."""
    target = LaunchTarget(launch_template="t", machine_type="m", max_nodes=-1)
    pool = (RegionId("gcp/us-central1"), NodeConfigurationId("L4x1"), Market.SPOT)
    with pytest.raises(ValidationFailed, match=r"2 violations(.|\n)*must begin with aws/(.|\n)*must not be negative"):
        Ec2Settings(fleet="f", targets={pool: target}, agent_port=1, agent_key="k")


def test_a_static_fleet_gives_nothing() -> None:
    """Nothing to obtain, nothing to release, and asking is an expected no."""
    fixed = StaticProvisioner()
    assert (fixed.obtainable(), fixed.endpoints()) == ({}, {})
    assert fixed.releasable() == fixed.booting() == fixed.interrupted() == frozenset()
    with pytest.raises(Unavailable, match="the fleet is static"):
        fixed.provision(request(1))
