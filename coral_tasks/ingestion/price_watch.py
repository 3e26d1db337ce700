"""Price watch: decides whether prices moved enough for a new plan. A pure step and the form of its state file.

Owns the rule. A used pool (region, configuration, market) *fires* when its price differs from its anchor, the price at
the last firing, by more than ``threshold`` of the anchor. Hysteresis: after firing, the anchor is the new price, and
the pool is armed again only after ``rearm_checks`` checks in a row have seen it within ``rearm`` of the anchor; while
it goes on swinging it stays quiet unless it has moved by twice the threshold. A pool without a price keeps its anchor:
unknown is not a change, but is noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coral_tasks.domain.errors import StorageFault
from coral_tasks.domain.market import NodePrice
from coral_tasks.domain.validation import Checks

FORMAT: Final = 1
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Shares of the anchor price: fire above ``threshold``, arm again after ``rearm_checks`` within ``rearm``."""

    threshold: float = 0.05
    rearm: float = 0.02
    rearm_checks: int = 3

    def __post_init__(self) -> None:
        checks = Checks("price_watch")
        checks.positive(threshold=self.threshold)
        checks.not_negative(rearm=self.rearm)
        checks.require(self.rearm_checks >= 1, "rearm_checks must be at least 1", self.rearm_checks)
        checks.require(self.rearm < self.threshold, "rearm must be below threshold", self.rearm)
        checks.raise_if_any()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """Price (USD/h) that a pool is compared with; ``armed``: whether the plain threshold fires.

    ``num_calm``: checks in a row that saw the price near the anchor since it fired.
    """

    price_usd_per_hour: float
    armed: bool = True
    num_calm: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceMove:
    """One pool that fired: prices in USD/h; ``share``: signed change over the anchor (infinite from 0)."""

    pool: str
    before_usd_per_hour: float
    now_usd_per_hour: float

    @property
    def share(self) -> float:
        """Signed change over the price before."""
        if self.before_usd_per_hour == 0:
            return float("inf") if self.now_usd_per_hour > 0 else 0.0
        return self.now_usd_per_hour / self.before_usd_per_hour - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchResult:
    """State after the check, pools that fired (largest move first), and used pools that have no price."""

    anchors: Mapping[str, Anchor]
    moves: tuple[PriceMove, ...]
    unpriced: tuple[str, ...] = field(default=())

    @property
    def fired(self) -> bool:
        """Whether the price-change asset is to be updated."""
        return bool(self.moves)


def pool_name(price: NodePrice) -> str:
    """Readable name of a price's pool: ``aws/us-east-2 L4x1 spot``."""
    return f"{price.region} {price.configuration} {price.market.value}"


def watch(
    anchors: Mapping[str, Anchor], prices: Iterable[NodePrice], used: Iterable[str], settings: WatchSettings
) -> WatchResult:
    """One check. ``used``: names of the pools that the plan in force uses; others only keep their anchors.

    A pool seen for the first time gets its anchor and does not fire. Same input, same result.
    """
    now = {pool_name(price): price.price_usd_per_hour for price in prices}
    wanted = sorted(set(used))
    state, moves = dict(anchors), []
    for pool in wanted:
        if pool not in now:
            continue
        old = anchors.get(pool)
        state[pool], moved = _step(pool, old, now[pool], settings)
        moves += [moved] if moved else []
    return WatchResult(
        anchors={pool: state[pool] for pool in sorted(state)},
        moves=tuple(sorted(moves, key=lambda move: (-abs(move.share), move.pool))),
        unpriced=tuple(pool for pool in wanted if pool not in now),
    )


def _step(pool: str, old: Anchor | None, price: float, settings: WatchSettings) -> tuple[Anchor, PriceMove | None]:
    if old is None:
        return Anchor(price_usd_per_hour=price), None
    anchor = old.price_usd_per_hour
    distance = abs(price - anchor)
    limit = settings.threshold * (1 if old.armed else 2) * anchor
    # a price of exactly the threshold is not above it, whatever rounding says
    if distance > limit * (1 + _ROUNDING):
        move = PriceMove(pool=pool, before_usd_per_hour=anchor, now_usd_per_hour=price)
        return Anchor(price_usd_per_hour=price, armed=False), move
    num_calm = old.num_calm + 1 if distance <= settings.rearm * anchor else 0
    armed = old.armed or num_calm >= settings.rearm_checks
    return Anchor(price_usd_per_hour=anchor, armed=armed, num_calm=0 if armed else num_calm), None


def state_to_json(anchors: Mapping[str, Anchor]) -> dict[str, Any]:
    """Content of the state file."""
    pools = {pool: [one.price_usd_per_hour, one.armed, one.num_calm] for pool, one in sorted(anchors.items())}
    return {"format": FORMAT, "pools": pools}


def state_from_json(content: Any, source: str) -> dict[str, Anchor]:
    """The reverse. Raises StorageFault, naming ``source``, for anything that is no such state."""
    try:
        state = {
            str(pool): Anchor(price_usd_per_hour=float(price), armed=bool(armed), num_calm=int(calm))
            for pool, (price, armed, calm) in content["pools"].items()
        }
        known_format = content["format"] == FORMAT
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"{source} is no price watch state: {error}"
        raise StorageFault(message) from error
    odd = sorted(pool for pool, one in state.items() if not 0 <= one.price_usd_per_hour < float("inf"))
    if odd:
        # a pool whose anchor is no price would never fire again
        message = f"{source} is no price watch state: no price of {', '.join(odd)}"
        raise StorageFault(message)
    if not known_format:
        message = f"{source} is a price watch state of format {content['format']}; this code reads {FORMAT}"
        raise StorageFault(message)
    return state
