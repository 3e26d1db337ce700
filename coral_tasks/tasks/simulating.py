"""Simulating a plan on files: trace and plan in, summary and per-request Parquet out; timings from the profiles.

Joins catalogue, profiling and simulation; holds no rule of the simulated fleet.

API::

    simulate_files(request) -> SimulationResult
    read_request_trace(path, model=None) -> RequestTrace      # Azure columns, or arrival_s,model,prompt_tokens,…
    ProfileTimings(setup)                                     # a TimingSource from the profiles' own step times
    transfer_timings(setup) -> {model: TransferTiming}
    result_as_json(result) -> dict
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from coral_tasks.domain.errors import StorageFault, UnknownName, ValidationFailed, Violation
from coral_tasks.domain.names import Market, ModelId, NodeConfigurationId, Phase, RegionId
from coral_tasks.domain.timing import StageTiming, TransferTiming
from coral_tasks.domain.validation import Checks

if TYPE_CHECKING:
    import pandas as pd

    from coral_tasks.catalog import Setup, SetupModel
    from coral_tasks.profiling.costs import CostSource, LayerCosts, Work
    from coral_tasks.simulation import RequestTrace, SimulationResult
    from coral_tasks.simulation.state import Records

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
TRACE_COLUMNS: Final = ("arrival_s", "model", "prompt_tokens", "output_tokens")
TRANSFER_FIXED_S: Final = 0.002
"""Set-up of one KV transfer: two round trips of the control channel and the first block, an assumption."""

ZONE_NETWORK_BYTES_PER_S: Final = 1.25e9
"""10 Gbit/s, what one flow gets inside a placement group (EC2, network bandwidth page); several would be faster."""

PROMPT_STRETCHES: Final = (0.25, 0.5, 1.0, 2.0)
_MAX_SEQUENCES: Final = 512
_SHOWN: Final = 10
"""Rows or names that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What ``coral simulate`` is asked for. ``traces``: (model or None, file). ``out``: Parquet of every request.

    ``slowdown``: every stage takes this many times its profiled time. ``timing``: "profile" or "promise".
    """

    plan: Path
    traces: tuple[tuple[str | None, Path], ...]
    setup: str = "extended"
    prices: Path | None = None
    out: Path | None = None
    requests_per_s: float | None = None
    startup_s: float = 0.0
    shed_late: bool = False
    timing: str = "profile"
    slowdown: float = 1.0
    max_in_flight: int = 100_000

    def __post_init__(self) -> None:
        checks = Checks("simulate")
        checks.positive(slowdown=self.slowdown)
        if self.requests_per_s is not None:
            checks.positive(rate=self.requests_per_s)
        checks.require(self.out is None or not self.out.is_dir(), "--out is a folder, it must be a file", str(self.out))
        checks.raise_if_any()


def simulate_files(request: SimulationRequest) -> SimulationResult:
    """Replay trace files on a plan file. Raises ValidationFailed (bad input) or StorageFault (unreadable file)."""
    from coral_tasks.catalog import load_catalog
    from coral_tasks.simulation import SimulationOptions, merge_traces, scale_rate, simulate
    from coral_tasks.tasks.planning import read_plan

    plan = read_plan(request.plan)
    setup = load_catalog().setup(request.setup)
    trace = merge_traces(read_request_trace(path, model) for model, path in request.traces)
    if request.requests_per_s is not None:
        trace = scale_rate(trace, requests_per_s=request.requests_per_s)
    options = SimulationOptions(
        timing=timing_source(setup, request.timing, slowdown=request.slowdown),
        transfer=transfer_timings(setup),
        startup_s=request.startup_s,
        shed_late=request.shed_late,
        max_in_flight=request.max_in_flight,
    )
    prices = catalog_prices() if request.prices is None else read_price_list(request.prices)
    sink = None if request.out is None else RequestRows(models=trace.models)
    result = simulate(plan, trace, prices=prices, options=options, sink=sink)
    if sink is not None and request.out is not None:
        sink.write(request.out)
    return result


def timing_source(setup: Setup, name: str, *, slowdown: float = 1.0) -> ProfileTimings | None:
    """Source by name: "profile", or "promise" (None: templates' own figures)."""
    if name not in ("profile", "promise"):
        raise UnknownName(kind="timing", name=name, known=["profile", "promise"])
    return ProfileTimings(setup=setup, slowdown=slowdown) if name == "profile" else None


def catalog_prices() -> dict[tuple[RegionId, NodeConfigurationId, Market], float]:
    """Every price of the catalogue."""
    from coral_tasks.catalog import load_catalog

    prices = load_catalog().all_prices
    return {(one.region, one.configuration, one.market): one.price_usd_per_hour for one in prices}


def read_price_list(path: Path) -> dict[tuple[RegionId, NodeConfigurationId, Market], float]:
    """Prices from CSV or Parquet with columns region, configuration, market and price_usd_per_hour.

    Raises ValidationFailed with every row at fault: an unknown market, a price that is no number of at least 0, a node
    listed twice; StorageFault for an unreadable file.
    """
    import pandas as pd

    frame = read_frame(path, ("region", "configuration", "market", "price_usd_per_hour"))
    prices = pd.to_numeric(frame["price_usd_per_hour"], errors="coerce").to_numpy(dtype=np.float64)
    names = frame[["region", "configuration", "market"]].astype(str)
    keys, repeated = list(names.itertuples(index=False, name=None)), names.duplicated()
    markets = {market.value for market in Market}
    bad = [
        Violation(table=path.name, row=f"row {k} {' '.join(key)}", value=str(value), rule=rule)
        for k, (key, price) in enumerate(zip(keys, prices, strict=True))
        for fits, value, rule in (
            (key[2] in markets, key[2], f"unknown market; known: {', '.join(sorted(markets))}"),
            (bool(0 <= price < math.inf), frame["price_usd_per_hour"].iloc[k], "price must be a number of at least 0"),
            (not repeated.iloc[k], " ".join(key), "listed twice"),
        )
        if not fits
    ]
    if bad:
        raise ValidationFailed(bad)
    return {
        (RegionId(region), NodeConfigurationId(name), Market(market)): float(price)
        for (region, name, market), price in zip(keys, prices, strict=True)
    }


def read_frame(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """A CSV (maybe gzip) or Parquet file that must have the columns."""
    import pandas as pd

    try:
        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, encoding="utf-8-sig")
    except pd.errors.EmptyDataError as error:
        raise ValidationFailed([Violation(table=path.name, row="", value="", rule="the file is empty")]) from error
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, ValueError) as error:
        message = f"{path} cannot be read: {error}"
        raise StorageFault(message) from error
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        rule = f"needs the columns {', '.join(columns)}; missing: {', '.join(missing)}"
        raise ValidationFailed([Violation(table=path.name, row="", value="", rule=rule)])
    return frame


def read_request_trace(path: Path, model: str | None = None) -> RequestTrace:
    """A trace file, in time order, starting at 0.

    With the Azure columns (TIMESTAMP, ContextTokens, GeneratedTokens) ``model`` must say whose requests they are;
    otherwise arrival_s, model, prompt_tokens and output_tokens, where ``model`` picks one. Raises ValidationFailed
    with the rows at fault: out of order, zero or absurd lengths, empty; StorageFault for an unreadable file.
    """
    import pandas as pd

    frame = read_frame(path, ())
    if set(AZURE_COLUMNS) <= set(frame.columns):
        if model is None:
            rule = "a trace without a model column needs its model: MODEL=FILE"
            raise ValidationFailed([Violation(table=path.name, row="", value="", rule=rule)])
        times = pd.to_datetime(frame["TIMESTAMP"], errors="coerce", utc=True, format="ISO8601")
        seconds = np.asarray((times - times.min()).dt.total_seconds(), dtype=np.float64)
        return _trace(path, seconds, [model] * len(frame), frame["ContextTokens"], frame["GeneratedTokens"])
    frame = read_frame(path, TRACE_COLUMNS)
    _require_names(path, frame["model"], model)
    if model is not None:
        frame = frame[frame["model"] == model]
    seconds = np.asarray(pd.to_numeric(frame["arrival_s"], errors="coerce"), dtype=np.float64)
    names = [str(name) for name in frame["model"]]
    return _trace(path, seconds, names, frame["prompt_tokens"], frame["output_tokens"])


def _require_names(path: Path, names: pd.Series[Any], wanted: str | None) -> None:
    """Every request must name its model, and the wanted one must be among them. Raises ValidationFailed."""
    unnamed = np.flatnonzero(names.isna() | (names.astype(str).str.strip() == ""))
    if len(unnamed):
        rule = f"model must be named ({len(unnamed)} requests without)"
        raise ValidationFailed([Violation(table=path.name, row=f"request {unnamed[0]}", value="", rule=rule)])
    known = sorted({str(name) for name in names})
    if wanted is not None and known and wanted not in known:
        rule = f"no request of this model in the file; it has: {', '.join(known[:_SHOWN])}"
        raise ValidationFailed([Violation(table=path.name, row="", value=wanted, rule=rule)])


def _trace(
    path: Path, seconds: NDArray[np.float64], names: Sequence[str], prompt: pd.Series[Any], output: pd.Series[Any]
) -> RequestTrace:
    from coral_tasks.simulation import RequestTrace

    models = tuple(ModelId(name) for name in dict.fromkeys(names))
    number = {name: k for k, name in enumerate(models)}
    bad = [*_not_whole(path, prompt), *_not_whole(path, output)]
    try:
        trace = RequestTrace(
            models=models,
            arrival_s=seconds,
            model=np.array([number[ModelId(name)] for name in names], dtype=np.int64),
            prompt_tokens=_whole(prompt),
            output_tokens=_whole(output),
        )
    except ValidationFailed as failure:
        bad += [dataclasses.replace(one, table=path.name) for one in failure.violations]
        raise ValidationFailed(bad) from failure
    if bad:
        raise ValidationFailed(bad)
    return trace


def _not_whole(path: Path, column: pd.Series[Any]) -> list[Violation]:
    """The first values that are no whole number, with their rows, and how many there are."""
    rows = np.flatnonzero(~are_whole(column))
    rule = f"{column.name} must be a whole number"
    found = [
        Violation(table=path.name, row=f"request {row}", value=str(column.iloc[row]), rule=rule)
        for row in rows[:_SHOWN]
    ]
    if len(rows) > _SHOWN:
        found.append(Violation(table=path.name, row="", value=f"{len(rows)} requests in all", rule=rule))
    return found


def are_whole(values: pd.Series[Any], *, least: float = -math.inf) -> NDArray[np.bool_]:
    """Which values are whole numbers of at least ``least``; shape (N,)."""
    import pandas as pd

    if values.dtype == bool:
        return np.zeros(len(values), dtype=np.bool_)
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64)
    whole = np.isfinite(numbers) & (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53)
    return np.asarray(whole & (numbers >= least))


def _whole(values: pd.Series[Any]) -> NDArray[np.int64]:
    """Whole numbers; 1 stands in for what is none, which ``_not_whole`` has told."""
    import pandas as pd

    numbers = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64)
    return np.where(are_whole(values), numbers, 1).astype(np.int64)


def transfer_timings(setup: Setup) -> dict[ModelId, TransferTiming]:
    """KV transfer by model: whole cache of the prompt over one 10 Gbit/s flow."""
    return {
        one.model.id: TransferTiming(
            fixed_s=TRANSFER_FIXED_S, per_token_s=_kv_bytes_per_token(one) / ZONE_NETWORK_BYTES_PER_S
        )
        for one in setup.models
    }


def _kv_bytes_per_token(one: SetupModel) -> float:
    from coral_tasks.profiling.memory import Parallelism, kv_bytes_per_layer

    tokens = one.shape.mean_prompt_tokens
    return float(kv_bytes_per_layer(one.model, Parallelism(tp=1), tokens).sum() / tokens)


@dataclass(slots=True, kw_only=True)
class ProfileTimings:
    """Stage timings from the profiles' step times: the source the tables were reduced from, before the reduction.

    Prefill: constant and seconds per prompt token, over batches of prompts of a quarter to twice the mean. Decode:
    constant, seconds per sequence at mean context, and the part of it that grows with context, from a second context
    twice as long. Aggregated: one line through both. Fits minimise relative error. ``slowdown`` multiplies every time:
    profiles too fast by that much.
    Limits: one line over the memory/compute knee, attention's growth with prompt length only on average.
    """

    setup: Setup
    slowdown: float = 1.0
    sources: tuple[CostSource, ...] | None = None
    _known: dict[tuple[str, Phase, str, int], StageTiming | None] = field(default_factory=dict)
    _costs: dict[tuple[str, Phase, str, float], tuple[Work, LayerCosts] | None] = field(default_factory=dict)

    def stage_timing(
        self, *, model: ModelId, phase: Phase, configuration: NodeConfigurationId, num_layers: int
    ) -> StageTiming | None:
        """Timing of a node that holds ``num_layers`` layers; None for what the setup or the sources do not know."""
        key = (model, phase, configuration, num_layers)
        if key not in self._known:
            self._known[key] = self._timing(model, phase, configuration, num_layers)
        return self._known[key]

    def _timing(
        self, model: ModelId, phase: Phase, configuration: NodeConfigurationId, num_layers: int
    ) -> StageTiming | None:
        if phase is Phase.AGGREGATED:
            return self._aggregated(model, configuration, num_layers)
        first = self._measured(model, phase, configuration, 1.0)
        if first is None:
            return None
        work, costs = first
        seconds = self._stage_s(work, costs, num_layers)
        room = self._room(work, num_layers)
        if phase is Phase.PREFILL:
            return self._scaled(work, *self._prefill_line(model, configuration, num_layers), 0.0, 0.0, room)
        fixed, per_unit = fit_line(work.tokens, seconds)
        per_context = self._per_context(work, seconds, num_layers)
        per_sequence = max(per_unit - per_context * work.context_tokens, 0.0)
        per_prompt = self._prefill_line(model, configuration, num_layers)[1]
        return self._scaled(work, fixed, per_prompt, per_sequence, per_context, room)

    def _aggregated(self, model: ModelId, configuration: NodeConfigurationId, num_layers: int) -> StageTiming | None:
        """One line through prefill batches and decode batches at two contexts: a step may hold both at once."""
        found = [
            (phase, *one)
            for phase, stretches in ((Phase.PREFILL, PROMPT_STRETCHES), (Phase.DECODE, (1.0, 2.0)))
            for stretch in stretches
            if (one := self._measured(model, phase, configuration, stretch)) is not None
        ]
        if {phase for phase, _, _ in found} != {Phase.PREFILL, Phase.DECODE}:
            return None
        features = np.concatenate([step_features(work) for _, work, _ in found])
        seconds = np.concatenate([self._stage_s(work, costs, num_layers) for _, work, costs in found])
        fixed, per_prompt, per_sequence, per_context = fit_terms(features, seconds)
        decode = next(work for phase, work, _ in found if phase is Phase.DECODE)
        room = self._room(decode, num_layers)
        return self._scaled(decode, fixed, per_prompt, per_sequence, per_context, room)

    def _prefill_line(self, model: ModelId, configuration: NodeConfigurationId, num_layers: int) -> tuple[float, float]:
        """Constant and seconds per prompt token, over batches of prompts of a quarter to twice the mean length."""
        asked = [self._measured(model, Phase.PREFILL, configuration, stretch) for stretch in PROMPT_STRETCHES]
        known = [one for one in asked if one is not None]
        if not known:
            return 0.0, 0.0
        units = np.concatenate([work.tokens for work, _ in known])
        return fit_line(units, np.concatenate([self._stage_s(work, costs, num_layers) for work, costs in known]))

    def _scaled(
        self, work: Work, fixed: float, per_prompt: float, per_sequence: float, per_context: float, room: float
    ) -> StageTiming:
        from coral_tasks.profiling.memory import MemoryParameters

        return StageTiming(
            fixed_s=fixed * self.slowdown,
            per_prompt_token_s=per_prompt * self.slowdown,
            per_sequence_s=per_sequence * self.slowdown,
            per_context_token_s=per_context * self.slowdown,
            max_batch_tokens=MemoryParameters().batched_tokens(work.configuration.gpu),
            max_batch_sequences=_MAX_SEQUENCES,
            kv_capacity_tokens=room,
        )

    def _measured(
        self, model: ModelId, phase: Phase, configuration: NodeConfigurationId, stretch: float
    ) -> tuple[Work, LayerCosts] | None:
        key = (model, phase, configuration, stretch)
        if key not in self._costs:
            self._costs[key] = self._ask(model, phase, configuration, stretch)
        return self._costs[key]

    def _ask(
        self, model: ModelId, phase: Phase, configuration: NodeConfigurationId, stretch: float
    ) -> tuple[Work, LayerCosts] | None:
        from coral_tasks.profiling.build import best_costs, default_sources
        from coral_tasks.profiling.costs import work_for
        from coral_tasks.profiling.memory import MemoryParameters, choose_parallelism

        entry = next((one for one in self.setup.models if one.model.id == model), None)
        node = next((one for one in self.setup.configurations if one.id == configuration), None)
        if entry is None or node is None:
            return None
        if self.sources is None:
            self.sources = default_sources()
        split = choose_parallelism(entry.model, node)
        work = work_for(entry.model, node, split, phase, entry.shape, MemoryParameters())
        work = dataclasses.replace(work, context_tokens=work.context_tokens * stretch)
        costs = best_costs(work, self.sources)
        return None if costs is None else (work, costs)

    @staticmethod
    def _stage_s(work: Work, costs: LayerCosts, num_layers: int) -> NDArray[np.float64]:
        from coral_tasks.profiling.costs import hop_s

        return np.asarray(costs.stage_s()[:, num_layers - 1] + hop_s(work), dtype=np.float64)

    def _per_context(self, work: Work, seconds: NDArray[np.float64], num_layers: int) -> float:
        """Seconds per token of context: median over batches of the growth when the context doubles."""
        longer = self._measured(work.model.id, work.phase, work.configuration.id, 2.0)
        if longer is None:
            return 0.0
        growth = (self._stage_s(*longer, num_layers) - seconds) / (np.array(work.sequences) * work.context_tokens)
        return max(float(np.median(growth)), 0.0)

    @staticmethod
    def _room(work: Work, num_layers: int) -> float:
        """Tokens of cache of the node beside its layers, by the profiles' memory model; at least one."""
        from coral_tasks.profiling.memory import MemoryParameters, stage_memory

        tokens = work.context_tokens
        memory = stage_memory(work.model, work.configuration, work.split, tokens, MemoryParameters())
        free, per_sequence = memory.free[num_layers - 1], memory.kv_of_sequence[num_layers - 1]
        return max(float(max(free, 0.0) / per_sequence * tokens), 1.0)


def fit_line(units: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Constant and slope, neither negative, of least relative error."""
    weight = 1 / seconds
    table = np.stack([weight, units * weight], axis=1)
    (fixed, slope), *_ = np.linalg.lstsq(table, np.ones_like(seconds), rcond=None)
    if fixed < 0:
        ratio = units * weight
        return 0.0, float(ratio.sum() / (ratio**2).sum())
    if slope < 0:
        return float(weight.sum() / (weight**2).sum()), 0.0
    return float(fixed), float(slope)


def step_features(work: Work) -> NDArray[np.float64]:
    """Of each batch: one, prompt tokens, sequences that decode, tokens of context they attend to; shape (B, 4)."""
    count = np.asarray(work.sequences, dtype=np.float64)
    nothing = np.zeros_like(count)
    if work.phase is Phase.PREFILL:
        return np.stack([nothing + 1, work.tokens, nothing, nothing], axis=1)
    return np.stack([nothing + 1, nothing, count, count * work.context_tokens], axis=1)


def fit_terms(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, ...]:
    """Coefficients of least relative error, none negative; ``features``: shape (N, K), ``seconds``: shape (N,).

    Terms that come out negative are left out one after another, the most negative first.
    """
    weighted = features / seconds[:, None]
    kept = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(seconds)), rcond=None)
        if len(kept) == 1 or (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    terms = np.zeros(features.shape[1])
    terms[kept] = np.maximum(found, 0.0)
    return tuple(float(term) for term in terms)


class RequestRows:
    """Collects finished requests for a Parquet file; a sink of the simulator."""

    def __init__(self, *, models: Sequence[ModelId]) -> None:
        self._models = tuple(models)
        self._parts: list[Records] = []

    def __call__(self, rows: Records) -> None:
        """Keep a copy: the simulator uses the array again."""
        self._parts.append(rows.copy())

    def write(self, path: Path) -> None:
        """One row per request, by request number; written beside and renamed. Raises StorageFault."""
        import pandas as pd

        rows = np.concatenate(self._parts)
        rows = rows[np.argsort(rows["index"], kind="stable")]
        frame = pd.DataFrame(request_columns(rows, self._models))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".tmp-{path.name}")
            frame.to_parquet(temporary, index=False)
            temporary.replace(path)
        except OSError as error:
            message = f"{path} cannot be written: {error}"
            raise StorageFault(message) from error


def request_columns(rows: Records, models: Sequence[ModelId]) -> dict[str, Any]:
    """Columns of the per-request table: seconds, tokens, outcome names; missing times are null."""
    from coral_tasks.simulation.outcome import client_times, time_per_output_token
    from coral_tasks.simulation.state import Outcome

    done = rows["outcome"] == Outcome.COMPLETED
    names = np.array([one.name.lower() for one in Outcome])
    client_ttft, client_tpot = client_times(rows)
    return {
        "request": rows["index"],
        "model": np.array(models)[rows["model"]],
        "outcome": names[rows["outcome"]],
        "arrival_s": rows["arrival"],
        "ttft_s": rows["first"] - rows["arrival"],
        "tpot_s": np.where(done, time_per_output_token(rows), np.nan),
        "handover_s": rows["ready"] - rows["first"],
        "client_ttft_s": client_ttft,
        "client_tpot_s": np.where(done, client_tpot, np.nan),
        "finish_s": np.where(done, rows["finish"], np.nan),
        "prompt_tokens": rows["prompt"],
        "output_tokens": rows["output"],
        "generated_tokens": rows["generated"],
        "num_preemptions": rows["preemptions"],
        "num_retries": rows["retries"],
    }


def result_as_json(result: SimulationResult) -> dict[str, Any]:
    """The result as plain JSON values; non-finite numbers become null."""
    summary = _plain(dataclasses.asdict(result))
    totals = {
        "num_requests": result.num_requests,
        "goodput_requests_per_s": result.goodput_requests_per_s,
        "goodput_tokens_per_s": result.goodput_tokens_per_s,
        "attainment": result.attainment,
    }
    return {**totals, **summary}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
