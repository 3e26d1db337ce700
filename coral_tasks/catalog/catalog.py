"""The catalogue as a whole: loading, look-up by name, setups.

Owns the checks between files (a setup names only what exists) and the error for an unknown name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from coral_tasks.catalog.prices import CatalogPrice, read_prices
from coral_tasks.catalog.rows import Row, Table
from coral_tasks.catalog.tables import (
    MachineType,
    read_configurations,
    read_gpu_types,
    read_machine_types,
    read_models,
    read_shapes,
    read_slos,
)
from coral_tasks.domain.errors import UnknownName
from coral_tasks.domain.hardware import GpuType, NodeConfiguration
from coral_tasks.domain.models import LatencySlo, RequestShape, ServedModel
from coral_tasks.domain.names import GpuTypeName, ModelId, NodeConfigurationId, RegionId

DATA_FOLDER = Path(__file__).parent / "data"
SETUP_COLUMNS = ["setup", "kind", "name", "requests_per_s", "source"]


class SetupModel(NamedTuple):
    """A model on offer in a setup, with its limits, the shape of its requests and their rate."""

    model: ServedModel
    slo: LatencySlo
    shape: RequestShape
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What one evaluation or deployment plans over (paper 6.1)."""

    name: str
    models: tuple[SetupModel, ...]
    configurations: tuple[NodeConfiguration, ...]
    regions: tuple[RegionId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SetupRow:
    setup: str
    kind: str
    name: str
    requests_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Everything the data files state. Mappings are keyed by name or id, in file order."""

    gpu_types: Mapping[GpuTypeName, GpuType]
    machine_types: Mapping[str, MachineType]
    configurations: Mapping[NodeConfigurationId, NodeConfiguration]
    models: Mapping[ModelId, ServedModel]
    slos: Mapping[ModelId, LatencySlo]
    shapes: Mapping[ModelId, RequestShape]
    setups: Mapping[str, Setup]
    all_prices: tuple[CatalogPrice, ...]

    def gpu_type(self, name: str) -> GpuType:
        """GPU type by short name. Raises UnknownName with the known ones."""
        return _look_up(self.gpu_types, "GPU type", name)

    def machine_type(self, name: str) -> MachineType:
        """Machine type by the cloud's name. Raises UnknownName with the known ones."""
        return _look_up(self.machine_types, "machine type", name)

    def configuration(self, name: str) -> NodeConfiguration:
        """Node configuration by id, for example ``L40Sx4``. Raises UnknownName with the known ones."""
        return _look_up(self.configurations, "node configuration", name)

    def model(self, name: str) -> ServedModel:
        """Served model by id. Raises UnknownName with the known ones."""
        return _look_up(self.models, "model", name)

    def setup(self, name: str) -> Setup:
        """Setup by name. Raises UnknownName with the known ones."""
        return _look_up(self.setups, "setup", name)

    def prices(self, setup: Setup) -> tuple[CatalogPrice, ...]:
        """Prices of the setup's configurations in its regions, every market; what is not sold has no row."""
        wanted = {configuration.id for configuration in setup.configurations}
        return tuple(
            price for price in self.all_prices if price.region in setup.regions and price.configuration in wanted
        )


@cache
def load_catalog(folder: Path = DATA_FOLDER) -> Catalog:
    """Read and check every file of ``folder``.

    Raises StorageFault (missing or unreadable file) or ValidationFailed (every broken row with file, row and rule).
    """
    gpus = read_gpu_types(folder)
    configurations = read_configurations(folder, gpus)
    models = read_models(folder)
    slos, shapes = read_slos(folder, models), read_shapes(folder, models)
    prices = read_prices(folder, configurations)
    regions = {price.region for price in prices}
    offers = {model: (models[model], slos[model], shapes[model]) for model in slos if model in shapes}
    return Catalog(
        gpu_types=gpus,
        machine_types=read_machine_types(folder, gpus),
        configurations=configurations,
        models=models,
        slos=slos,
        shapes=shapes,
        setups=_read_setups(folder, offers, configurations, regions),
        all_prices=prices,
    )


def _look_up[K, V](mapping: Mapping[K, V], kind: str, name: str) -> V:
    for key, value in mapping.items():
        if key == name:
            return value
    raise UnknownName(kind=kind, name=name, known=[str(key) for key in mapping])


def _read_setups(
    folder: Path,
    offers: Mapping[ModelId, tuple[ServedModel, LatencySlo, RequestShape]],
    configurations: Mapping[NodeConfigurationId, NodeConfiguration],
    regions: set[RegionId],
) -> dict[str, Setup]:
    """Setups from ``setups.csv``; a name no other file holds is a violation of its row."""
    table = Table(folder / "setups.csv", SETUP_COLUMNS)
    known = {"model": tuple(offers), "configuration": tuple(configurations), "region": tuple(sorted(regions))}
    rows = [_setup_row(row, known) for row in table.rows]
    table.unique([(row.setup, row.kind, row.name) for row in rows])
    table.raise_if_any()
    names = dict.fromkeys(row.setup for row in rows)
    return {name: _build_setup(name, rows, offers, configurations) for name in names}


def _setup_row(row: Row, known: Mapping[str, tuple[str, ...]]) -> _SetupRow:
    kind = row.choice("kind", tuple(known))
    row.text("source")
    rate = row.number("requests_per_s") if kind == "model" else None
    return _SetupRow(setup=row.text("setup"), kind=kind, name=row.choice("name", known[kind]), requests_per_s=rate)


def _build_setup(
    name: str,
    rows: list[_SetupRow],
    offers: Mapping[ModelId, tuple[ServedModel, LatencySlo, RequestShape]],
    configurations: Mapping[NodeConfigurationId, NodeConfiguration],
) -> Setup:
    mine = [row for row in rows if row.setup == name]
    return Setup(
        name=name,
        models=tuple(
            SetupModel(*offers[ModelId(row.name)], row.requests_per_s)
            for row in mine
            if row.kind == "model" and row.requests_per_s is not None
        ),
        configurations=tuple(
            configurations[NodeConfigurationId(row.name)] for row in mine if row.kind == "configuration"
        ),
        regions=tuple(RegionId(row.name) for row in mine if row.kind == "region"),
    )
