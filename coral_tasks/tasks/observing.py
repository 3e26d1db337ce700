"""Metrics of this home, printed once or served to Prometheus, and the frame of logs and times around a task's work.

Joins views, agents and ``observability``. Reads only, apart from ``runs/<run>/timing/``. A part that cannot
be read becomes the metric ``coral_unreadable``, so that one broken file does not blind the rest.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coral_tasks.domain.errors import CoralError
from coral_tasks.observability import logs
from coral_tasks.observability.metrics import CONTENT_TYPE, Metrics, exposition
from coral_tasks.settings import Settings

if TYPE_CHECKING:
    from coral_tasks.protocol.messages import NodeReport

_LOG = logging.getLogger("coral.tasks")

AGENTS_WAIT_S: Final = 3.0
"""For agents' answers at a scrape: below Prometheus's own limit of ten seconds."""

_SEALED: Final = "manifest.json"


def configure_logs(settings: Settings) -> None:
    """Log lines of this process to standard error, in the form that the settings name."""
    logs.configure(settings.log_format)


# Around a task's work --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def task(settings: Settings, name: str, run_id: str | None, part: str = "") -> Iterator[None]:
    """Log a task's begin and end with its ids; keep how long its work took in the run, unless that is sealed.

    ``part``: tells the parts of a mapped task apart, which write at the same time, on several machines too.

    Lines go where the caller sends them (Airflow: the task's log); as JSON they go to standard error, which Airflow
    puts into the task's log line by line.
    """
    if settings.log_format == "json":
        configure_logs(settings)
    _allow_children()
    with logs.context(task=name, run=run_id):
        begun = time.monotonic()
        _LOG.info("begins")
        try:
            yield
        except BaseException as error:
            seconds = round(time.monotonic() - begun, 3)
            _LOG.warning("ends with %s: %s", type(error).__name__, error, extra={"seconds": seconds})
            raise
        seconds = round(time.monotonic() - begun, 3)
        _LOG.info("done", extra={"seconds": seconds})
        if run_id is not None:
            _keep_time(settings.home / "runs" / run_id, f"{name}.{part}" if part else name, seconds)


def _allow_children() -> None:
    """Let the work start processes under Celery too, as solver and template builder do.

    Celery's pool puts a process object of its own kind in multiprocessing's place: a daemon, which may have no
    children, with a key that no child can be given. The task is a process of its own and main in it.
    """
    from multiprocessing import process

    current = process.current_process()
    if not isinstance(current, process.BaseProcess):
        current._config["daemon"] = False  # noqa: SLF001 - no public way: the setter is for processes not yet started
        current._config["authkey"] = process.AuthenticationString(bytes(current.authkey))  # noqa: SLF001


def _keep_time(folder: Path, name: str, seconds: float) -> None:
    """Times are a help, never a reason to fail."""
    from coral_tasks.storage.runs import write_whole

    if not folder.is_dir() or (folder / _SEALED).exists():
        return
    with contextlib.suppress(OSError):
        write_whole(folder / "timing" / f"{name}.json", json.dumps({"seconds": seconds}).encode())


# Metrics ---------------------------------------------------------------------------------------------------------


def collect(settings: Settings) -> Metrics:
    """Everything that can be known now; asks the agents for ``AGENTS_WAIT_S`` at most."""
    from coral_tasks.tasks import views

    metrics = Metrics()
    seen = views.overview(settings)
    runs = _allocation_runs(settings)
    parts: dict[str, Callable[[], None]] = {
        "plan": lambda: _plan(metrics, settings, seen),
        "runs": lambda: _runs(metrics, runs),
        "timing": lambda: _timing(metrics, runs),
        "gate": lambda: _gate(metrics, runs),
        "dispatch": lambda: _dispatch(metrics, seen["transition"]),
        "library": lambda: _library(metrics, seen["library"]),
        "agents": lambda: _agents(metrics, settings),
    }
    for name, part in parts.items():
        try:
            part()
        except (CoralError, OSError, KeyError, TypeError, ValueError) as error:
            _LOG.warning("metrics of %s cannot be read: %s: %s", name, type(error).__name__, error)
            metrics.put("coral_unreadable", 1, name)
    return metrics


def _allocation_runs(settings: Settings) -> list[Path]:
    """Folders of allocation runs, newest first, by the moment they plan for."""
    root = settings.home / "runs"
    found = [path.parent for path in root.glob("*/run.json")] if root.is_dir() else []
    return sorted(found, key=lambda path: ((path / "run.json").stat().st_mtime_ns, path.name), reverse=True)


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _require(part: Any) -> dict[str, Any]:
    if "error" in part:
        raise ValueError(part["error"])
    found: dict[str, Any] = part
    return found


def _plan(metrics: Metrics, settings: Settings, seen: dict[str, Any]) -> None:
    if seen["plan"] is None:
        return
    plan = _require(seen["plan"])
    proof = plan["certificate"]
    modes = {one["run"]: one["mode"] for one in seen["history"]}
    metrics.put("coral_plan_info", 1, plan["id"], plan["library_version"], modes.get(plan["run"], "unknown"))
    current = settings.home / "current" / "plan.json"
    metrics.put("coral_plan_made_timestamp_seconds", current.stat().st_mtime)
    for name in ("cost", "startup", "bound"):
        metrics.put(f"coral_plan_{name}_usd_per_hour", proof[f"{name}_usd_per_hour"])
    metrics.put("coral_plan_gap_ratio", proof["gap"])
    for row in plan["instances"]:
        template = plan["templates"][row["template"]]
        metrics.add("coral_plan_instances", row["count"], template["model"], template["phase"], row["region"])
    for one in plan["models"]:
        metrics.put("coral_served_requests_per_second", one["served_requests_per_s"], one["model"])
        metrics.put("coral_shortage_requests_per_second", one["shortfall_requests_per_s"], one["model"])


def _runs(metrics: Metrics, runs: list[Path]) -> None:
    """Newest moment by outcome, and what went wrong since the last good run. A run that goes on has no outcome yet."""
    failed = {"true": 0, "false": 0}
    seen: set[str] = set()
    good = False
    for folder in runs:
        outcome = _outcome(folder)
        if outcome and outcome not in seen:
            seen.add(outcome)
            metrics.put("coral_run_timestamp_seconds", _newest_change(folder), outcome)
        good = good or outcome == "good"
        if not good and outcome:
            failed["true" if outcome == "refused" else "false"] += 1
        if len(seen) == len(_OUTCOMES):
            break
    for expected, count in failed.items() if runs else ():
        metrics.put("coral_runs_failed_since_success", count, expected)


_OUTCOMES: Final = ("good", "refused", "failed")


def _outcome(folder: Path) -> str:
    if (folder / _SEALED).is_file():
        return "good"
    failures = [json.loads(path.read_bytes()) for path in sorted(folder.glob("failures/*.json"))]
    if not failures:
        return ""
    return "refused" if all(one["expected"] for one in failures) else "failed"


def _newest_change(folder: Path) -> float:
    return max(path.stat().st_mtime for path in (folder, *folder.glob("*.json"), *folder.glob("failures/*.json")))


def _timing(metrics: Metrics, runs: list[Path]) -> None:
    """Of each task the longest part, in the newest run that has it."""
    found: dict[str, float] = {}
    for folder in runs[:5]:
        longest: dict[str, float] = {}
        for path in sorted(folder.glob("timing/*.json")):
            name, seconds = path.name.split(".")[0], float(json.loads(path.read_bytes())["seconds"])
            longest[name] = max(seconds, longest.get(name, 0.0))
        found = {**longest, **found}
    for name, seconds in sorted(found.items()):
        metrics.put("coral_task_duration_seconds", seconds, name)


def _gate(metrics: Metrics, runs: list[Path]) -> None:
    gated = next((folder for folder in runs if any(folder.glob("gate/*.json"))), None)
    if gated is None:
        return
    for path in sorted(gated.glob("gate/*.json")):
        report = json.loads(path.read_bytes())
        metrics.put("coral_gate_outcome", 1, path.stem, report["verdict"])
        for severity in ("warning", "critical"):
            count = sum(one["severity"] == severity for one in report["findings"])
            metrics.put("coral_gate_findings", count, path.stem, severity)
    for path in sorted(gated.glob("inputs/*/source.json")):
        observed = json.loads(path.read_bytes())["observed_at"]
        metrics.put("coral_input_observed_timestamp_seconds", _seconds(observed), path.parent.name)


def _dispatch(metrics: Metrics, transition: Any) -> None:
    if transition is None:
        return
    done = _require(transition)
    metrics.put("coral_dispatch_converged", done["converged"])
    metrics.put("coral_dispatch_commands", done["num_commands"])
    metrics.put("coral_dispatch_rounds", done["rounds"])
    metrics.put("coral_dispatch_epoch", done["epoch"])
    metrics.put("coral_dispatch_timestamp_seconds", _seconds(done["ended_at"]))


def _library(metrics: Metrics, part: Any) -> None:
    if part is None:
        return
    library = _require(part)
    metrics.put("coral_library_published_timestamp_seconds", _seconds(library["versions"][0]["published_at"]))
    for entry in library["sets"]:
        metrics.put("coral_library_templates", entry["num_templates"], entry["model"], entry["phase"])


def _agents(metrics: Metrics, settings: Settings) -> None:
    """Nothing where there is no inventory; an agent that does not answer is 0, and nothing is said of its nodes."""
    from coral_tasks.tasks import fleet_access

    if not fleet_access.has_fleet(settings):
        return
    seen = fleet_access.observe(settings, wait_s=AGENTS_WAIT_S, quick=True)
    for name in sorted({*seen.unreachable, *(one.agent for one in seen.targets.values())}):
        metrics.put("coral_agent_up", name not in seen.unreachable, name)
    for node in seen.nodes.values():
        _node(metrics, node)


def _node(metrics: Metrics, node: NodeReport) -> None:
    pool = (node.region, node.configuration, node.market.value, node.engine)
    metrics.add("coral_nodes", 1, *pool, node.state.value)
    metrics.add("coral_nodes_excluded", bool(node.excluded), node.region, node.configuration)
    if node.spec is not None:
        work = (node.spec.model, node.spec.phase.value)
        metrics.add("coral_engine_restarts", node.restarts, *work)
        metrics.add("coral_requests_in_flight", node.in_flight or 0, *work)


def text(settings: Settings) -> str:
    """All metrics as Prometheus text."""
    from coral_tasks.tasks import sharing

    sharing.pull_for_page(settings)
    return exposition(collect(settings)).decode()


def serve(settings: Settings, host: str, port: int) -> ThreadingHTTPServer:
    """A server of ``/metrics``; the caller runs ``serve_forever``. Raises Unavailable if the address cannot be had."""
    from coral_tasks.domain.errors import Unavailable

    class Handler(BaseHTTPRequestHandler):
        """Two routes, no state."""

        def do_GET(self) -> None:
            """``/metrics`` and ``/-/healthy``; 404 for all else."""
            if self.path == "/-/healthy":
                self._answer(200, b"ok\n")
            elif self.path == "/metrics":
                self._answer(200, text(settings).encode())
            else:
                self._answer(404, b"/metrics is here\n")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Scrapes are not worth a line each."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        message = f"port {port} on {host}, for metrics, cannot be used: {error.strerror or error}"
        raise Unavailable(message) from error
