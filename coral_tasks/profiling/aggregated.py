"""From engine steps to TTFT and TPOT of aggregated serving at a fixed number of requests in flight.

Owns the formula and the corrections of database times against measured points; both are fitted by ``fit`` on the
fit half of the points and stored in ``data``. Needed to validate: the public points are end to end, not layers.

With P the prefill of one prompt and D a decode step of the whole batch (both corrected), c requests in flight:

- TTFT = P (1 + queue (c - 1)^power): a new prompt waits for others' prefills, which bunch since all requests have
  the same lengths and start together;
- TPOT = D + mixing (c - 1) P / osl: during a request's osl tokens each of the c - 1 others prefills once.
"""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import StorageFault
from coral_tasks.domain.names import Phase
from coral_tasks.domain.validation import Checks

DATA_FOLDER = Path(__file__).parent / "data"
CORRECTIONS_FILE = DATA_FOLDER / "corrections.csv"
FIT_FILE = DATA_FOLDER / "aggregated_fit.json"
MIN_POINTS = 6
"""A family with fewer fit points than this is planned with the default of its kind; its own factor only validates."""

FAMILIES = (
    ("gpt-oss", "openai/gpt-oss", "moe"),
    ("qwen3-235b", "Qwen/Qwen3-235B", "moe"),
    ("minimax", "MiniMaxAI/", "moe"),
    ("kimi", "moonshotai/", "moe"),
    ("llama-8b", "nvidia/Llama-3.1-8B", "dense"),
    ("llama-8b", "meta-llama/Llama-3.1-8B", "dense"),
    ("llama-70b", "meta-llama/", "dense"),
)
"""Family, beginning of the hub name, kind. Default of dense models: llama-70b; of sparse ones: gpt-oss."""

DEFAULT_FAMILY = {"dense": "llama-70b", "moe": "gpt-oss"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatedFit:
    """Parameters of the formula. ``prefill_step_s``, ``decode_step_s``: engine overhead of a step."""

    prefill_step_s: float
    decode_step_s: float
    queue: float
    power: float
    mixing: float

    def __post_init__(self) -> None:
        checks = Checks("aggregated_fit")
        checks.not_negative(**asdict(self))
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Factors from database kernel times to what vLLM took, for one family; ``num_points``: points behind them."""

    family: str
    prefill: float
    decode: float
    num_points: int
    fitted_from: str

    def __post_init__(self) -> None:
        checks = Checks("corrections", self.family)
        checks.positive(prefill=self.prefill, decode=self.decode)
        checks.raise_if_any()

    def for_phase(self, phase: Phase) -> float:
        """Factor on times of ``phase``."""
        return self.prefill if phase is Phase.PREFILL else self.decode


def family_of(hub_name: str, *, sparse: bool) -> str:
    """Family by hub name; the default of its kind where no family fits."""
    for family, prefix, _ in FAMILIES:
        if hub_name.startswith(prefix):
            return family
    return DEFAULT_FAMILY["moe" if sparse else "dense"]


@cache
def load_corrections(path: Path = CORRECTIONS_FILE) -> dict[str, Correction]:
    """Corrections by family. Raises StorageFault if the file is missing or broken."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        found = [
            Correction(
                family=row["family"],
                prefill=float(row["prefill"]),
                decode=float(row["decode"]),
                num_points=int(row["num_points"]),
                fitted_from=row["fitted_from"],
            )
            for row in rows
        ]
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        message = f"corrections file {path.name} cannot be read: {error}"
        raise StorageFault(message) from error
    return {correction.family: correction for correction in found}


@cache
def load_fit(path: Path = FIT_FILE) -> AggregatedFit:
    """Parameters of the formula. Raises StorageFault if the file is missing or broken."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return AggregatedFit(**values["parameters"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"fit file {path.name} cannot be read: {error}"
        raise StorageFault(message) from error


def planning_correction(hub_name: str, *, sparse: bool) -> Correction:
    """Correction that tables are planned with: the family's own if enough points stand behind it."""
    corrections = load_corrections()
    own = corrections.get(family_of(hub_name, sparse=sparse))
    if own is not None and own.num_points >= MIN_POINTS:
        return own
    return corrections[DEFAULT_FAMILY["moe" if sparse else "dense"]]


def predict(
    prefill_s: NDArray[np.float64],
    decode_s: NDArray[np.float64],
    concurrency: NDArray[np.float64],
    osl: NDArray[np.float64],
    fit: AggregatedFit,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """TTFT and TPOT in seconds from corrected kernel times; all shapes (N,)."""
    prefill, decode = prefill_s + fit.prefill_step_s, decode_s + fit.decode_step_s
    others = concurrency - 1
    ttft = prefill * (1 + fit.queue * others**fit.power)
    tpot = decode + fit.mixing * others * prefill / osl
    return ttft, tpot
