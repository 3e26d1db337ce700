"""What a person may give to a run started by hand: names, types, limits, as JSON schema and as a checked value.

Owns the parameters of both DAGs. Airflow checks the schema before a run starts, but lets unknown names through and is
not there in a test or a shell, so every run checks again. What the values mean for planning is not decided here.

API::

    read_allocation(params, known_models) -> AllocationParameters     # raises ValidationFailed
    read_library(params, known_models) -> LibraryParameters
    ALLOCATION_SCHEMA, LIBRARY_SCHEMA: parameter -> JSON schema with default and description
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from coral_tasks.domain.errors import UnknownName, ValidationFailed, Violation

MAX_OVERRIDES: Final = 500
_NAME: Final = {"type": "string", "minLength": 1, "maxLength": 100}
_MARKET: Final = {"enum": ["on_demand", "spot", "reserved"]}
_TOKENS: Final = {"type": "number", "minimum": 0}

Schema = Mapping[str, Mapping[str, Any]]


def _rows(needed: Mapping[str, Any], optional: Mapping[str, Any], description: str) -> dict[str, Any]:
    item = {
        "type": "object",
        "properties": {**needed, **optional},
        "required": sorted(needed),
        "additionalProperties": False,
    }
    return {"default": [], "type": "array", "maxItems": MAX_OVERRIDES, "items": item, "description": description}


_REASON: Final = {
    "default": "",
    "type": "string",
    "maxLength": 200,
    "description": "Why this run, for the record. Empty: what started it",
}
_MODELS: Final = {
    "default": [],
    "type": "array",
    "maxItems": MAX_OVERRIDES,
    "items": _NAME,
}

ALLOCATION_SCHEMA: Final[Schema] = {
    "reason": _REASON,
    "mode": {
        "default": "",
        "enum": ["", "advisory", "approve", "auto"],
        "description": "Empty: the configured mode. advisory: nothing is touched; approve: a person decides on big "
        "changes; auto",
    },
    "dry_run": {
        "default": False,
        "type": "boolean",
        "description": "Plan and explain only: nothing is sent, nothing becomes current, the inputs are not remembered",
    },
    "demand": _rows(
        {"model": _NAME, "requests_per_s": {"type": "number", "minimum": 0}},
        {
            "origin": _NAME,
            "mean_prompt_tokens": _TOKENS,
            "p95_prompt_tokens": _TOKENS,
            "mean_output_tokens": _TOKENS,
            "p95_output_tokens": _TOKENS,
        },
        'Demand to plan for instead of what is ingested: [{"model": "qwen3-32b", "requests_per_s": 3}]. Goes through '
        "the gate",
    ),
    "prices": _rows(
        {"region": _NAME, "configuration": _NAME, "price_usd_per_hour": {"type": "number", "minimum": 0}},
        {"market": _MARKET},
        'Prices instead of those ingested: [{"region": "aws/us-east-2", "configuration": "L4x1", '
        '"price_usd_per_hour": 0.9}]. Goes through the gate',
    ),
    "availability": _rows(
        {"region": _NAME, "configuration": _NAME, "available_nodes": {"type": "integer", "minimum": 0}},
        {"market": _MARKET},
        'Nodes instead of those ingested: [{"region": "aws/us-east-2", "configuration": "L4x1", '
        '"available_nodes": 0}]. Goes through the gate',
    ),
    "models": {
        **_MODELS,
        "description": "Plan as if only these were served. Such a run never dispatches. Empty: all",
    },
    "as_of": {
        "default": "",
        "type": "string",
        "description": "Plan for this moment (ISO, with zone); empty: now",
    },
}

LIBRARY_SCHEMA: Final[Schema] = {
    "reason": _REASON,
    "setup": {
        "default": "",
        "type": "string",
        "maxLength": 100,
        "description": "Setup of the catalogue; empty: the configured one",
    },
    "force": {"default": False, "type": "boolean", "description": "Publish even if the regression gate refuses"},
    "models": {
        **_MODELS,
        "description": "Profile and build these only; the others keep the sets of the version in force. Empty: all",
    },
    "dry_run": {
        "default": False,
        "type": "boolean",
        "description": "Build and compare with the version in force, publish nothing",
    },
}


class DemandOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Demand of one model, from all origins or from one; requests/s and tokens."""

    model: str
    requests_per_s: float
    origin: str | None = None
    mean_prompt_tokens: float | None = None
    p95_prompt_tokens: float | None = None
    mean_output_tokens: float | None = None
    p95_output_tokens: float | None = None


class PriceOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Price of a node configuration in a region; without a market: in all of them."""

    region: str
    configuration: str
    price_usd_per_hour: float
    market: Literal["on_demand", "spot", "reserved"] | None = None


class AvailabilityOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Nodes of a configuration that can be had in a region; without a market: in each of them."""

    region: str
    configuration: str
    available_nodes: int
    market: Literal["on_demand", "spot", "reserved"] | None = None


class AllocationParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of ``coral_allocation``; everything may be left out."""

    reason: str = ""
    mode: Literal["", "advisory", "approve", "auto"] = ""
    dry_run: bool = False
    demand: tuple[DemandOverride, ...] = ()
    prices: tuple[PriceOverride, ...] = ()
    availability: tuple[AvailabilityOverride, ...] = ()
    models: tuple[str, ...] = ()
    as_of: str = ""

    def overrides(self, table: str) -> list[dict[str, Any]]:
        """Overrides of one input table as plain rows; none for a table that has none."""
        return [msgspec.to_builtins(one) for one in getattr(self, table, ())]

    @property
    def is_partial(self) -> bool:
        """Whether it plans for some models only, as if the others were not served."""
        return bool(self.models)


class LibraryParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of ``coral_template_library``; everything may be left out."""

    reason: str = ""
    setup: str = ""
    force: bool = False
    models: tuple[str, ...] = ()
    dry_run: bool = False


def read_allocation(params: Mapping[str, Any], known_models: Sequence[str]) -> AllocationParameters:
    """Check everything; raises ValidationFailed with every wrong parameter, UnknownName for a model."""
    found = _read(params, AllocationParameters, ALLOCATION_SCHEMA)
    _require_known([*found.models, *(one.model for one in found.demand)], known_models)
    wrong = list(_contradictions(found))
    if found.as_of and moment(found.as_of) is None:
        rule = "must be an ISO date and time with a zone"
        wrong.append(Violation(table="parameters", row="as_of", value=repr(found.as_of), rule=rule))
    if wrong:
        raise ValidationFailed(wrong)
    return found


def _contradictions(found: AllocationParameters) -> list[Violation]:
    """Wishes that exclude each other: said, never resolved in silence."""
    if found.mode not in {"approve", "auto"}:
        return []
    rules = {
        "dry_run": ("a dry run sends nothing, so its mode cannot be", found.dry_run),
        "models": ("a plan for some models would stop all others, so its mode cannot be", found.is_partial),
    }
    return [
        Violation(table="parameters", row=name, value="", rule=f"{rule} {found.mode}; leave mode empty or advisory")
        for name, (rule, given) in rules.items()
        if given
    ]


def read_library(params: Mapping[str, Any], known_models: Sequence[str]) -> LibraryParameters:
    """Check everything; raises ValidationFailed, UnknownName for a model that the setup does not have."""
    found = _read(params, LibraryParameters, LIBRARY_SCHEMA)
    _require_known(found.models, known_models)
    return found


def moment(text: str) -> datetime | None:
    """A time with its zone, in UTC; None if it is no such time."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if found.tzinfo is None else found.astimezone(UTC)


def _read[Kind: msgspec.Struct](params: Mapping[str, Any], kind: type[Kind], schema: Schema) -> Kind:
    """One parameter at a time, so that every wrong one is named, not only the first."""
    wrong = [
        Violation(table="parameters", row=name, value=repr(params[name])[:200], rule=_unknown(schema))
        for name in sorted(set(params) - set(schema))
    ]
    known = {name: value for name, value in params.items() if name in schema}
    for name, value in known.items():
        try:
            msgspec.convert({name: value}, kind)
        except msgspec.ValidationError as error:
            wrong.append(Violation(table="parameters", row=name, value=repr(value)[:200], rule=str(error)))
        else:
            wrong += _too_long(name, value, schema[name])
    if wrong:
        raise ValidationFailed(wrong)
    return msgspec.convert(known, kind)


def _unknown(schema: Schema) -> str:
    return f"unknown parameter; known: {', '.join(schema)}"


def _too_long(name: str, value: Any, schema: Mapping[str, Any]) -> list[Violation]:
    limit = schema.get("maxLength") or schema.get("maxItems")
    if limit is None or len(value) <= limit:
        return []
    return [Violation(table="parameters", row=name, value=str(len(value)), rule=f"must not be longer than {limit}")]


def _require_known(models: Sequence[str], known: Sequence[str]) -> None:
    for model in models:
        if model not in known:
            raise UnknownName(kind="model", name=model, known=list(known), table="parameters")
