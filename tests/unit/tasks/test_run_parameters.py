"""What a person gives to a run: everything wrong is named, nothing unknown slips through, contradictions are said."""

from __future__ import annotations

import pytest

from coral_tasks.domain.errors import UnknownName, ValidationFailed
from coral_tasks.tasks.run_parameters import (
    ALLOCATION_SCHEMA,
    LIBRARY_SCHEMA,
    AllocationParameters,
    LibraryParameters,
    read_allocation,
    read_library,
)

MODELS = ["phi-4-14b", "qwen3-32b"]


def test_nothing_given_is_valid_and_schema_and_type_name_the_same_parameters() -> None:
    """A run of the schedule gives nothing; the form in the UI offers exactly what the code reads."""
    assert read_allocation({}, MODELS) == AllocationParameters()
    assert set(ALLOCATION_SCHEMA) == set(AllocationParameters.__struct_fields__)
    assert set(LIBRARY_SCHEMA) == set(LibraryParameters.__struct_fields__)
    defaults = {name: schema["default"] for name, schema in ALLOCATION_SCHEMA.items()}
    assert read_allocation(defaults, MODELS) == AllocationParameters()
    assert read_library({name: schema["default"] for name, schema in LIBRARY_SCHEMA.items()}, MODELS) == (
        LibraryParameters()
    )


def test_overrides_become_rows_without_what_was_left_out() -> None:
    """Only what was given replaces anything: an absent length or market stays as it was ingested."""
    found = read_allocation(
        {
            "demand": [{"model": "phi-4-14b", "requests_per_s": 3}],
            "prices": [{"region": "r", "configuration": "L4x1", "price_usd_per_hour": 0.5, "market": "spot"}],
        },
        MODELS,
    )
    assert found.overrides("demand") == [{"model": "phi-4-14b", "requests_per_s": 3.0}]
    assert found.overrides("prices") == [
        {"region": "r", "configuration": "L4x1", "price_usd_per_hour": 0.5, "market": "spot"}
    ]
    assert found.overrides("availability") == found.overrides("running") == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"budget": 5}, "budget.*unknown parameter"),
        ({"mode": "manual"}, "mode.*manual"),
        ({"mode": None}, "mode"),
        ({"dry_run": "yes"}, "dry_run.*bool"),
        ({"demand": {"phi-4-14b": 3}}, "demand.*array"),
        ({"demand": [{"model": "phi-4-14b"}]}, "requests_per_s"),
        ({"demand": [{"model": "phi-4-14b", "requests_per_s": "3"}]}, "float.*str"),
        ({"demand": [{"model": "phi-4-14b", "requests_per_s": 3, "rps": 4}]}, "rps"),
        ({"availability": [{"region": "r", "configuration": "c", "available_nodes": 1.5}]}, "int.*float"),
        ({"prices": [{"region": "r", "configuration": "c", "price_usd_per_hour": 1, "market": "free"}]}, "market|free"),
        ({"models": "phi-4-14b"}, "models.*array"),
        ({"reason": "x" * 201}, "reason.*not be longer than 200"),
        ({"models": ["phi-4-14b"] * 501}, "models.*not be longer than 500"),
        ({"as_of": "tomorrow"}, "as_of.*ISO date and time with a zone"),
        ({"as_of": "2026-11-29T12:00:00"}, "as_of.*ISO date and time with a zone"),
        ({"dry_run": True, "mode": "auto"}, "dry run sends nothing"),
        ({"dry_run": True, "mode": "approve"}, "dry run sends nothing"),
        ({"models": ["phi-4-14b"], "mode": "auto"}, "would stop all others"),
    ],
)
def test_wrong_parameters_are_refused_by_name(given, told) -> None:
    """The message names the parameter and says what is wrong with it."""
    with pytest.raises(ValidationFailed, match=told):
        read_allocation(given, MODELS)


def test_every_wrong_parameter_is_named_at_once() -> None:
    """Nobody has to start a run three times to learn of three mistakes."""
    with pytest.raises(ValidationFailed) as caught:
        read_allocation({"mode": "x", "dry_run": 1, "budget": 2, "reason": 3}, MODELS)
    assert {one.row for one in caught.value.violations} == {"mode", "dry_run", "budget", "reason"}


@pytest.mark.parametrize("given", [{"models": ["phi-4"]}, {"demand": [{"model": "phi-4", "requests_per_s": 1}]}])
def test_an_unknown_model_lists_the_known_ones(given) -> None:
    """A mistyped model is refused with the names there are."""
    with pytest.raises(UnknownName, match="phi-4-14b, qwen3-32b"):
        read_allocation(given, MODELS)
    if "models" in given:
        with pytest.raises(UnknownName, match="phi-4-14b, qwen3-32b"):
            read_library(given, MODELS)
