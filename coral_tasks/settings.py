"""Settings from the environment (prefix ``CORAL_``). Owns defaults and their meaning; reads nothing at import."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, TypeAdapter, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

_OTHER_NAMES: Final = frozenset(
    f"CORAL_{name}"
    for name in (
        *("AGENT_STATE", "LAUNCH"),
        *("METRICS_PORT", "POSTGRES", "REDIS", "SECRETS"),
        *("REGENERATE_GOLDEN", "SCREENSHOTS"),
    )
)
"""Variables of the same prefix that are no settings: marks on engine processes, of ``docker/``, of the tests."""


class Settings(BaseSettings):
    """Where things lie and how the pipeline behaves. Every field can be set as ``CORAL_<NAME>``."""

    model_config = SettingsConfigDict(env_prefix="CORAL_", extra="forbid", frozen=True)

    home: Path = Field(default=Path(".coral"), description="Folder for everything the pipeline writes.")
    library: str = Field(default="", description="Template library: folder or s3://bucket/prefix; empty: HOME/library.")
    shared: str = Field(
        default="",
        description="s3://bucket/prefix where workers on several machines share runs, state and library; empty: HOME.",
    )
    setup: str = Field(default="core", description="Name of the catalogue's setup: models, configurations, regions.")
    mode: Literal["advisory", "approve", "auto"] = Field(
        default="auto", description="advisory plans only; approve asks a person beyond the limits; auto dispatches."
    )
    approval_cost_change: float = Field(
        default=0.2,
        ge=0,
        description="Mode approve: relative change of cost, at today's prices, that needs a person.",
    )
    approval_fleet_change: float = Field(
        default=0.3, ge=0, description="Mode approve: nodes started or stopped, relative to those in use, likewise."
    )
    approval_timeout_s: float = Field(
        default=1800.0, gt=0, description="Time for an answer, plan_max_age_s at most; without one nothing changes."
    )
    approval_drift: float = Field(
        default=0.1,
        ge=0,
        description="Relative change of a used price or of a model's demand since planning that voids an approval.",
    )
    plan_max_age_s: float = Field(
        default=3600.0, gt=0, description="Age of a run at which its plan is not dispatched any more."
    )
    slo_step: float = Field(
        default=0.8,
        ge=0,
        lt=1,
        description="Factor on both latency limits of the second set of templates that the library holds of each "
        "model, to tell what a tighter SLO costs; 0: none, which halves the building time.",
    )
    keep_runs: int = Field(default=600, ge=1, description="Run folders, dispatch results and task logs to keep.")
    adjustment_interval_s: float = Field(default=300.0, gt=0, description="Time between two allocation runs.")
    startup_s: float = Field(default=120.0, ge=0, description="Time from a start command to a ready instance.")
    headroom: float = Field(default=0.7, gt=0, le=1, description="Share of capacity that demand may use.")
    solve_time_limit_s: float = Field(default=60.0, gt=0, description="Limit of one solve; the best plan counts.")
    runtimes: tuple[Literal["vllm", "hybrid"], ...] = Field(
        default=("vllm",),
        min_length=1,
        description="Runtimes that templates may need; hybrid ones need more than stock vLLM can do.",
    )
    measurement_max_age_s: float = Field(
        default=30 * 86400.0, gt=0, description="Age at which the nightly run measures a node configuration again."
    )
    measurement_timeout_s: float = Field(
        default=1200.0, gt=0, le=6000, description="Limit of measuring one model on one node."
    )
    measurement_slots: int = Field(
        default=1, ge=1, description="Measurements at once on one GPU type: slots of its pool when it is made."
    )
    gpu_queues: bool = Field(
        default=False, description="Measuring tasks go to the queue gpu-<GPU type> instead of the default one."
    )
    first_agent_port: int = Field(
        default=23000, ge=1024, le=60000, description="First of the ports of the demo's local node agents."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Lines of logs on standard error: text, or one JSON object a line."
    )
    ui_port: int = Field(default=8080, ge=1024, le=65535, description="Port of Airflow's UI, on loopback.")
    seed: int = Field(default=0, description="Seed of everything random.")

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        """Children (Airflow, agents) may work in another folder, so a relative home is taken from here, once."""
        return home.absolute()

    @model_validator(mode="after")
    def _known_names(self) -> Self:
        """Names that are no settings are told once: a mistyped one has no effect, which nobody would notice."""
        _warn_once(tuple(sorted(os.environ)))
        return self

    @property
    def startup_factor(self) -> float:
        """K of the allocation program: start-up time over adjustment interval."""
        return self.startup_s / self.adjustment_interval_s


def unknown_settings(names: Iterable[str]) -> list[str]:
    """A sentence for each ``CORAL_`` name that is no setting, with the nearest one that is."""
    known = {f"CORAL_{field.upper()}" for field in Settings.model_fields}
    given = {name for name in names if name.upper().startswith("CORAL_")}
    return [
        f"{name} is no setting of Coral and has no effect{_nearest(name.upper(), known)}"
        for name in sorted(given)
        if name.upper() not in known | _OTHER_NAMES
    ]


def _nearest(name: str, known: Iterable[str]) -> str:
    """Compared without the prefix, which makes any two names look alike."""
    endings = sorted(one.removeprefix("CORAL_") for one in known)
    found = difflib.get_close_matches(name.removeprefix("CORAL_"), endings, n=1, cutoff=0.6)
    return f"; did you mean CORAL_{found[0]}?" if found else ""


@lru_cache(maxsize=8)
def _warn_once(names: tuple[str, ...]) -> None:
    for sentence in unknown_settings(names):
        logging.getLogger("coral").warning(sentence)


def gpu_queues() -> bool:
    """The one setting that DAG files read: alone, so that a mistake in another does not hide every DAG."""
    return TypeAdapter(bool).validate_python(os.environ.get("CORAL_GPU_QUEUES", "0"))
