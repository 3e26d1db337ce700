"""Efficiency factors of the roofline, per GPU type and phase, with how each was fitted.

Owns reading and checking ``data/calibration.csv``. The figures are made by ``python -m coral_tasks.profiling.fit``.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coral_tasks.domain.errors import StorageFault, ValidationFailed, Violation
from coral_tasks.domain.names import Phase
from coral_tasks.domain.validation import Checks

DATA_FILE = Path(__file__).parent / "data" / "calibration.csv"
COLUMNS = (
    *("gpu", "phase", "compute", "bandwidth", "kv", "expert_compute", "expert_bandwidth", "launch_us"),
    *("link2", "link4", "link8", "link_latency_us", "step_ms", "fitted_from"),
)

KERNELS = "aiconfigurator-core"
"""How ``fitted_from`` begins where a fit rests on kernel times of that package."""

SHARES = ("compute", "bandwidth", "kv", "expert_compute", "expert_bandwidth", "link2", "link4", "link8")
MAX_SHARE = 1.0
"""No fit may claim more than a card's peak; a share at this bound says that the term does not bind there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of a card's peaks that are reached, and fixed times.

    ``compute``, ``bandwidth``: share of FLOP/s and of memory bandwidth; ``kv``: of bandwidth when reading the KV cache;
    ``expert_compute``, ``expert_bandwidth``: of experts, whose kernels are other ones. ``link2``, ``link4``, ``link8``:
    share of the link's one-way rate that an all-reduce among 2, 4 or 8 GPUs moves. ``launch_s``: per layer;
    ``link_latency_s``: per all-reduce; ``step_s``: engine overhead per step. ``fitted_from``: their origin.
    """

    compute: float
    bandwidth: float
    kv: float
    expert_compute: float
    expert_bandwidth: float
    launch_s: float
    link2: float
    link4: float
    link8: float
    link_latency_s: float
    step_s: float
    fitted_from: str

    def __post_init__(self) -> None:
        checks = Checks("calibration")
        for name in SHARES:
            value = getattr(self, name)
            checks.positive(**{name: value})
            checks.require(
                value <= MAX_SHARE, f"{name} must be a plausible share of a peak (at most {MAX_SHARE})", value
            )
        checks.not_negative(launch_s=self.launch_s, link_latency_s=self.link_latency_s, step_s=self.step_s)
        checks.named(fitted_from=self.fitted_from)
        checks.raise_if_any()

    def link_for(self, num_gpus: int) -> float:
        """Share for a node of ``num_gpus``; the next larger measured count."""
        return self.link2 if num_gpus <= 2 else self.link4 if num_gpus <= 4 else self.link8

    @property
    def from_kernels(self) -> bool:
        """Whether the factors were fitted to kernel times, which leave out what an engine adds."""
        return self.fitted_from.startswith(KERNELS)

    @property
    def provenance(self) -> str:
        """Short text for a table's provenance."""
        return self.fitted_from


@cache
def load_calibration(path: Path = DATA_FILE) -> dict[tuple[str, Phase], Efficiency]:
    """Factors by (GPU type, phase). Raises StorageFault (unreadable) or ValidationFailed (broken rows)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"calibration file {path.name} cannot be read: {error}"
        raise StorageFault(message) from error
    found: dict[tuple[str, Phase], Efficiency] = {}
    violations: list[Violation] = []
    for line, row in enumerate(csv.DictReader(text.splitlines()), start=2):
        try:
            found[row["gpu"], Phase(row["phase"])] = parse_row(row)
        except (KeyError, TypeError, ValueError, ValidationFailed) as error:
            rule = f"needs columns {', '.join(COLUMNS)} with numbers: {error}"
            violations.append(Violation(table=path.name, row=f"line {line}", value="", rule=rule))
    if violations:
        raise ValidationFailed(violations)
    return found


def parse_row(row: dict[str, str]) -> Efficiency:
    """One row of the file; microseconds and milliseconds become seconds."""
    return Efficiency(
        **{name: float(row[name]) for name in SHARES},
        launch_s=float(row["launch_us"]) * 1e-6,
        link_latency_s=float(row["link_latency_us"]) * 1e-6,
        step_s=float(row["step_ms"]) * 1e-3,
        fitted_from=row["fitted_from"],
    )
