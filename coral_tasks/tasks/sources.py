"""Which source each input comes from: ``<home>/sources.json``, checked as a whole, with the secrets left out.

Example::

    {"demand": {"kind": "prometheus", "address": "http://prometheus:9090", "num_intervals": 12},
     "prices": {"kind": "aws", "cache_s": 300, "keep_s": 86400},
     "availability": {"kind": "s3", "bucket": "plans", "prefix": "availability/", "region": "us-east-2"},
     "running": {"kind": "folder", "path": "/var/lib/coral/inputs"}}

Kinds: demo, file, folder, s3, prometheus (demand), aws (prices, availability). A table that is not named comes from the
drop folder if it holds a file of it, else from the demo data. Credentials are boto3's own matter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation
from coral_tasks.settings import Settings

if TYPE_CHECKING:
    from coral_tasks.ingestion.aws import MachineOffer
    from coral_tasks.ingestion.batch import Source
    from coral_tasks.ingestion.prometheus import MetricsTarget

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


class Prometheus(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="prometheus"):
    """vLLM's metrics. ``targets``: engines, unless the caller passes those that run."""

    address: str
    targets: tuple[Target, ...] = ()
    interval_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    num_intervals: Annotated[int, msgspec.Meta(ge=1, le=2000)] = 1


class Aws(_Base, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="aws"):
    """Price list and spot history, or quotas and reservations. ``regions`` empty: the setup's."""

    regions: tuple[str, ...] = ()
    endpoint_url: str | None = None


SourceConfig = Demo | File | Folder | S3 | Prometheus | Aws


class Sources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file as a whole."""

    demand: Demo | File | Folder | S3 | Prometheus | None = None
    prices: Demo | File | Folder | S3 | Aws | None = None
    availability: Demo | File | Folder | S3 | Aws | None = None
    running: Demo | File | Folder | S3 | None = None


def read_sources(settings: Settings) -> Sources:
    """``<home>/sources.json``, or nothing named. Raises ValidationFailed or StorageFault."""
    path = settings.home / "sources.json"
    if not path.exists():
        return Sources()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Sources)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror or error}"
        raise StorageFault(message) from error
    except msgspec.DecodeError as error:
        raise ValidationFailed([Violation(table=str(path), row="", value="", rule=str(error))]) from error


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
    from coral_tasks.ingestion.files import FileSource, FolderSource, S3PrefixSource

    match config:
        case File(path=path):
            return FileSource(table=table, path=Path(path))
        case Folder(path=path):
            return FolderSource(table=table, folder=Path(path))
        case S3(bucket=bucket, prefix=prefix):
            client = _client(config.endpoint_url, "s3", config.region)
            return S3PrefixSource(table=table, bucket=bucket, prefix=prefix, client=client)
        case Prometheus():
            return _prometheus(settings, config, targets)
        case Aws():
            return _aws(settings, table, config)
        case Demo():
            from coral_tasks.tasks.inputs import demo_source

            return demo_source(settings, table)


def _client(endpoint_url: str | None, service: str, region: str) -> Any:
    from coral_tasks.ingestion.aws import client_factory

    return client_factory(endpoint_url=endpoint_url)(service, region)


def _prometheus(settings: Settings, config: Prometheus, targets: tuple[MetricsTarget, ...]) -> Source:
    from coral_tasks.catalog import load_catalog
    from coral_tasks.domain.names import ModelId, Phase
    from coral_tasks.ingestion.prometheus import MetricsTarget, PrometheusSource

    models = load_catalog().setup(settings.setup).models
    named = tuple(
        MetricsTarget(instance=one.instance, model=ModelId(one.model), phase=Phase(one.phase)) for one in config.targets
    )
    return PrometheusSource(
        address=config.address,
        targets=targets or named,
        model_names={one.model.hub_name: one.model.id for one in models},
        shapes={one.model.id: one.shape for one in models},
        interval_s=config.interval_s,
        num_intervals=config.num_intervals,
    )


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
