"""Which source each input comes from: ``<home>/sources.json``, checked as a whole, with the secrets left out.

Example::

    {"demand": {"kind": "prometheus", "address": "http://prometheus:9090", "num_intervals": 12},
     "prices": {"kind": "aws", "cache_s": 300, "keep_s": 86400},
     "availability": {"kind": "s3", "bucket": "plans", "prefix": "availability/", "region": "us-east-2"},
     "running": {"kind": "folder", "path": "/var/lib/coral/inputs"}}

Kinds: demo, file, folder, s3; prometheus and trace (demand); aws (prices, availability); agents and merged
(availability). A table that is not named comes from the drop folder if it holds a file of it, else from the demo data.
Credentials of AWS are boto3's own matter; a token for Prometheus lies in a file of its own (``token_file``), never in
an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from coral_tasks.domain.errors import SourceFault, StorageFault, ValidationFailed, Violation
from coral_tasks.settings import Settings

if TYPE_CHECKING:
    from coral_tasks.dispatch.observation import Observation
    from coral_tasks.ingestion.aws import MachineOffer
    from coral_tasks.ingestion.batch import Source, SourceBatch
    from coral_tasks.ingestion.prometheus import MetricsTarget, PrometheusSource

Seconds = Annotated[float, msgspec.Meta(ge=0)]
TABLES: Final = ("demand", "prices", "availability", "running")


class _Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """``cache_s``: an answer up to this old is used again; ``keep_s``: up to this old when the source is down.

    ``min_completeness``: least share of a whole answer that is taken.
    """

    cache_s: Seconds = 0.0
    keep_s: Seconds = 0.0
    min_completeness: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5


class Demo(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="demo"):
    """The setup's shipped data."""


class File(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="file"):
    """One file."""

    path: str


class Folder(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="folder"):
    """Newest file of a drop folder."""

    path: str


class S3(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="s3"):
    """Newest object under a prefix."""

    bucket: str
    prefix: str
    region: str
    endpoint_url: str | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine as Prometheus names it."""

    instance: str
    model: str
    phase: Literal["prefill", "decode", "aggregated"]


class _Seen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine, and when the agents last said that it runs."""

    target: Target
    at: Annotated[datetime, msgspec.Meta(tz=True)]


class Prometheus(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="prometheus"):
    """vLLM's metrics. ``targets``: engines; empty: those that the node agents say run, asked at each fetch.

    ``token_file``: holds the bearer token that ``address`` asks for, readable by its owner and group at most.
    """

    address: str
    token_file: str = ""
    targets: tuple[Target, ...] = ()
    interval_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    num_intervals: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 1


class Trace(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """A request log that grows (see ``ingestion.trace_source``). ``model``: whose, where it has no column for it.

    ``start``: the moment from which its times count, where they are seconds.
    """

    path: str
    model: str = ""
    start: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    interval_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    num_intervals: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 1
    quiet_after_s: Seconds = 3600.0
    settle_s: Seconds = 0.0


class Aws(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="aws"):
    """Price list and spot history, or quotas and reservations. ``regions`` empty: the setup's."""

    regions: tuple[str, ...] = ()
    endpoint_url: str | None = None


class Agents(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="agents"):
    """Nodes that node agents answer for."""


class Merged(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="merged"):
    """Several sources of one table: the lowest of the stated figures, and at least what agents hold."""

    sources: Annotated[tuple[Demo | File | Folder | S3 | Aws | Agents, ...], msgspec.Meta(min_length=1)]


SourceConfig = Demo | File | Folder | S3 | Prometheus | Trace | Aws | Agents | Merged


class Sources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as a whole."""

    demand: Demo | File | Folder | S3 | Prometheus | Trace | None = None
    prices: Demo | File | Folder | S3 | Aws | None = None
    availability: Demo | File | Folder | S3 | Aws | Agents | Merged | None = None
    running: Demo | File | Folder | S3 | None = None


def read_sources(settings: Settings) -> Sources:
    """``<home>/sources.json``, or nothing named. Raises ValidationFailed or StorageFault."""
    path = settings.home / "sources.json"
    if not path.exists():
        return Sources()
    try:
        return _with_plain_addresses(msgspec.json.decode(path.read_bytes(), type=Sources), str(path))
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise StorageFault(message) from error
    except msgspec.DecodeError as error:
        raise ValidationFailed([Violation(table=str(path), row="", value="", rule=str(error))]) from error


def _with_plain_addresses(sources: Sources, path: str) -> Sources:
    """``sources`` if their addresses can be used. Raises ValidationFailed, which does not repeat them."""
    found = [
        Violation(table=path, row=f"{table}.{name}", value="", rule=rule)
        for table in TABLES
        for name in ("address", "endpoint_url")
        if (rule := address_fault(getattr(getattr(sources, table), name, None)))
    ]
    if found:
        raise ValidationFailed(found)
    return sources


def address_fault(address: str | None) -> str:
    """Why a server's address cannot be used, "" if it can or is absent. Never repeats it: it may hold a secret."""
    if address is None:
        return ""
    if "@" in address:
        return "an address must not hold a user or a password: they would end up in logs; see token_file"
    rule = "must be an address such as https://host:8443, without a query"
    try:
        parts = urlsplit(address)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, a port that is no number or too large
        return rule
    return "" if whole and not parts.query and not parts.fragment else rule


def read_secret(path: Path) -> str:
    """One word from a file that only its owner and group can read. Raises ValidationFailed or StorageFault."""
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        message = f"secret {path} cannot be read: {getattr(error, 'strerror', None) or type(error).__name__}"
        raise StorageFault(message) from error
    rules = []
    if mode & 0o027:
        rules.append("must not be readable for others, nor writable for its group: chmod 600")
    if not text or len(text.split()) > 1:
        rules.append("must hold one word")
    if rules:
        raise ValidationFailed(Violation(table="secret", row=str(path), value="", rule=rule) for rule in rules)
    return text


def configured_source(
    settings: Settings, table: str, targets: tuple[MetricsTarget, ...] = ()
) -> tuple[Source, float] | None:
    """Source of ``table`` and the least completeness to take; None if the file does not name it.

    ``targets``: engines that run, for Prometheus.
    """
    config: SourceConfig | None = getattr(read_sources(settings), table)
    if config is None:
        return None
    source = _plain(settings, table, config, targets)
    if config.cache_s or config.keep_s:
        from coral_tasks.ingestion.cached import CachedSource

        folder = settings.home / "cache"
        source = CachedSource(
            source=source, folder=folder, name=table, fresh_s=config.cache_s, keep_s=max(config.keep_s, config.cache_s)
        )
    return source, config.min_completeness


def _plain(settings: Settings, table: str, config: SourceConfig, targets: tuple[MetricsTarget, ...]) -> Source:
    match config:
        case Prometheus() | Trace():
            return _trace(settings, config) if isinstance(config, Trace) else _prometheus(settings, config, targets)
        case Aws():
            return _aws(settings, table, config)
        case Agents():
            return _inventory(settings)
        case Merged():
            return _merged(settings, table, config)
        case Demo():
            from coral_tasks.tasks.inputs import demo_source

            return demo_source(settings, table)
        case _:
            return _files(table, config)


def _files(table: str, config: File | Folder | S3) -> Source:
    from coral_tasks.ingestion.files import FileSource, FolderSource, S3PrefixSource

    match config:
        case File(path=path):
            return FileSource(table=table, path=Path(path))
        case Folder(path=path):
            return FolderSource(table=table, folder=Path(path))
        case S3(bucket=bucket, prefix=prefix):
            client = _client(config.endpoint_url, "s3", config.region)
            return S3PrefixSource(table=table, bucket=bucket, prefix=prefix, client=client)


def _client(endpoint_url: str | None, service: str, region: str) -> Any:
    from coral_tasks.ingestion.aws import client_factory

    return client_factory(endpoint_url=endpoint_url)(service, region)


def _prometheus(settings: Settings, config: Prometheus, targets: tuple[MetricsTarget, ...]) -> Source:
    from coral_tasks.catalog import load_catalog
    from coral_tasks.domain.names import ModelId, Phase
    from coral_tasks.ingestion.prometheus import MetricsTarget, PrometheusSource
    from coral_tasks.tasks import fleet_access

    models = load_catalog().setup(settings.setup).models
    named = targets or tuple(
        MetricsTarget(instance=one.instance, model=ModelId(one.model), phase=Phase(one.phase)) for one in config.targets
    )
    source = PrometheusSource(
        address=config.address,
        targets=named,
        model_names={one.model.hub_name: one.model.id for one in models},
        shapes={one.model.id: one.shape for one in models},
        interval_s=config.interval_s,
        num_intervals=config.num_intervals,
        token=read_secret(Path(config.token_file)) if config.token_file else "",
    )
    return source if named or not fleet_access.has_fleet(settings) else _of_running(settings, source)


def _trace(settings: Settings, config: Trace) -> Source:
    from coral_tasks.catalog import load_catalog
    from coral_tasks.ingestion.trace_source import TraceSource
    from coral_tasks.tasks.inputs import load_limits

    return TraceSource(
        path=Path(config.path),
        model=config.model,
        model_names={one.model.hub_name: one.model.id for one in load_catalog().setup(settings.setup).models},
        start=config.start,
        interval_s=config.interval_s,
        num_intervals=config.num_intervals,
        quiet_after_s=config.quiet_after_s,
        settle_s=config.settle_s,
        tolerance_s=load_limits(settings).future_tolerance_s,
    )


def _of_running(settings: Settings, source: PrometheusSource) -> Source:
    """``source`` asked for the engines that agents say run at that moment, and for those they said a window ago."""

    def fetch(now: datetime) -> SourceBatch:
        current = metrics_targets(_observe_all(settings))
        window = timedelta(seconds=(source.num_intervals + 1) * source.interval_s)
        past = _remembered(settings.home / "cache" / "metrics_targets.json", current, now, window)
        return replace(source, targets=current, past=past)(now)

    return fetch


def _remembered(
    path: Path, current: Sequence[MetricsTarget], now: datetime, window: timedelta
) -> tuple[MetricsTarget, ...]:
    """Engines that were seen within ``window`` before ``now``; ``current`` is added for the next time.

    A memory that cannot be read counts as none. Raises StorageFault if it cannot be written.
    """
    from coral_tasks.domain.names import ModelId, Phase
    from coral_tasks.ingestion.prometheus import MetricsTarget
    from coral_tasks.storage.runs import write_whole

    try:
        kept = msgspec.json.decode(path.read_bytes(), type=list[_Seen])
    except (OSError, msgspec.DecodeError):
        kept = []
    recent = {one.target: one for one in kept if now - window <= one.at <= now}
    named = [Target(instance=one.instance, model=one.model, phase=one.phase.value) for one in current]
    updated = recent | {target: _Seen(target=target, at=now) for target in named}
    ordered = sorted(updated.values(), key=lambda one: (one.target.instance, one.target.model, one.target.phase))
    try:
        write_whole(path, msgspec.json.encode(ordered))
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise StorageFault(message) from error
    return tuple(
        MetricsTarget(instance=one.instance, model=ModelId(one.model), phase=Phase(one.phase)) for one in recent
    )


def _observe_all(settings: Settings) -> Observation:
    """What agents say. Raises SourceFault unless all answered: engines of a silent agent would count as gone."""
    from coral_tasks.tasks import fleet_access

    seen = fleet_access.observe(settings)
    if seen.unreachable:
        message = f"no answer from agents {', '.join(seen.unreachable)}: which engines run there is unknown, not none"
        raise SourceFault(message)
    return seen


def metrics_targets(seen: Observation) -> tuple[MetricsTarget, ...]:
    """Engines that take or finish requests, named by host and port as Prometheus labels what it scrapes."""
    from coral_tasks.domain.fleet import InstanceState
    from coral_tasks.ingestion.prometheus import MetricsTarget

    serving = (InstanceState.READY, InstanceState.DRAINING)
    return tuple(
        MetricsTarget(instance=address, model=one.model, phase=one.phase)
        for one in seen.fleet.instances
        if one.state in serving and (address := urlsplit(seen.endpoints.get(one.id, "")).netloc)
    )


def _inventory(settings: Settings) -> Source:
    def fetch(now: datetime) -> SourceBatch:
        from coral_tasks.ingestion.agents import InventorySource
        from coral_tasks.tasks import fleet_access

        seen = fleet_access.observe(settings)
        answered = len({target.agent for target in seen.targets.values()})
        return InventorySource(
            nodes=seen.fleet.nodes,
            observed_at=now,
            num_agents=answered + len(seen.unreachable),
            num_answered=answered,
            unusable={node: why or "being profiled" for node, why in seen.excluded.items()},
            trouble=(
                *seen.trouble,
                *(f"no answer from agent {one}: its nodes are unknown" for one in seen.unreachable),
            ),
        )(now)

    return fetch


def _merged(settings: Settings, table: str, config: Merged) -> Source:
    held = [_plain(settings, table, one, ()) for one in config.sources if isinstance(one, Agents)]
    stated = [_plain(settings, table, one, ()) for one in config.sources if not isinstance(one, Agents)]

    def fetch(now: datetime) -> SourceBatch:
        from coral_tasks.ingestion.agents import merged_batch
        from coral_tasks.tasks.inputs import gate_context

        context = gate_context(settings, table, now)
        return merged_batch([one(now) for one in stated], [one(now) for one in held], context)

    return fetch


def _aws(settings: Settings, table: str, config: Aws) -> Source:
    from coral_tasks.catalog import load_catalog
    from coral_tasks.ingestion.aws import AwsAvailability, AwsPrices, client_factory

    setup = load_catalog().setup(settings.setup)
    own = tuple(str(region).removeprefix("aws/") for region in setup.regions if str(region).startswith("aws/"))
    kind = AwsPrices if table == "prices" else AwsAvailability
    clients = client_factory(endpoint_url=config.endpoint_url)
    return kind(offers=aws_offers(settings.setup), regions=config.regions or own, clients=clients)


def aws_offers(setup_name: str) -> tuple[MachineOffer, ...]:
    """AWS products that are a configuration of the setup."""
    from coral_tasks.catalog import load_catalog
    from coral_tasks.ingestion.aws import MachineOffer

    catalog = load_catalog()
    wanted = {(one.gpu.name, one.num_gpus): one.id for one in catalog.setup(setup_name).configurations}
    return tuple(
        MachineOffer(machine.name, wanted[machine.gpu, machine.num_gpus])
        for machine in catalog.machine_types.values()
        if machine.cloud == "aws" and (machine.gpu, machine.num_gpus) in wanted
    )
