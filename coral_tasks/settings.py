"""Settings from the environment (prefix ``CORAL_``). Owns defaults and their meaning; reads nothing at import."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where things lie and how the pipeline behaves. Every field can be set as ``CORAL_<NAME>``."""

    model_config = SettingsConfigDict(env_prefix="CORAL_", extra="forbid", frozen=True)

    home: Path = Field(default=Path(".coral"), description="Folder for everything the pipeline writes.")
    library: str = Field(default="", description="Template library: folder or s3://bucket/prefix; empty: HOME/library.")
    setup: str = Field(default="core", description="Name of the catalogue's setup: models, configurations, regions.")
    mode: Literal["advisory", "auto"] = Field(default="auto", description="advisory plans only; auto dispatches.")
    adjustment_interval_s: float = Field(default=300.0, gt=0, description="Time between two allocation runs.")
    startup_s: float = Field(default=120.0, ge=0, description="Time from a start command to a ready instance.")
    headroom: float = Field(default=0.9, gt=0, le=1, description="Share of capacity that demand may use.")
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
    first_agent_port: int = Field(
        default=23000, ge=1024, le=60000, description="First of the ports of the demo's local node agents."
    )
    ui_port: int = Field(default=8080, ge=1024, le=65535, description="Port of Airflow's UI, on loopback.")
    seed: int = Field(default=0, description="Seed of everything random.")

    @field_validator("home")
    @classmethod
    def _absolute(cls, home: Path) -> Path:
        """Children (Airflow, agents) may work in another folder, so a relative home is taken from here, once."""
        return home.absolute()

    @property
    def startup_factor(self) -> float:
        """K of the allocation program: start-up time over adjustment interval."""
        return self.startup_s / self.adjustment_interval_s
