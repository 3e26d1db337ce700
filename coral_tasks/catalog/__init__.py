"""The project's own catalogue: GPU types, machines, node configurations, models, SLOs, shapes, setups, prices.

Owns static facts and their sources (CSV files in ``data/``, each row with its source). It never plans, never
measures and never asks a cloud: live prices are ingestion's matter.

API::

    load_catalog() -> Catalog                       # read once, checked as a whole
    catalog.gpu_types / configurations / machine_types / models / slos / shapes     # mappings by name
    catalog.gpu_type(name), .configuration(id), .model(id)     # UnknownName lists the known ones
    catalog.setup("core" | "extended") -> Setup     # models with SLO, shape and rate; configurations; regions
    catalog.prices(setup) -> tuple[CatalogPrice, ...]          # with machine type, rule and source
    CatalogPrice.as_node_price(observed_at) -> NodePrice
"""

from coral_tasks.catalog.catalog import Catalog, Setup, SetupModel, load_catalog
from coral_tasks.catalog.prices import CatalogPrice, PriceRule
from coral_tasks.catalog.tables import MachineType

__all__ = ["Catalog", "CatalogPrice", "MachineType", "PriceRule", "Setup", "SetupModel", "load_catalog"]
