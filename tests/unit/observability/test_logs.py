"""Log lines: one JSON object each, with the ids of the work they belong to, whatever the message holds."""

from __future__ import annotations

import io
import json
import logging
import threading

import pytest

from coral_tasks.observability import logs


@pytest.fixture
def stream():
    """The project's lines as JSON, in memory; loggers are left as they were."""
    before = {name: (logging.getLogger(name).handlers[:], logging.getLogger(name).propagate) for name in logs.LOGGERS}
    made = io.StringIO()
    logs.configure("json", made)
    yield made
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate


def _lines(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_carries_the_ids_of_its_work_and_its_own(stream) -> None:
    """Run and plan come from the context, the command from the line; outside the block they are gone."""
    log = logging.getLogger("coral.dispatch")
    with logs.context(run="r1", plan="plan-1", task=None):
        log.info("command goes out", extra={"command": "c7", "node": "n1"})
        with logs.context(plan="plan-2"):
            log.info("inner")
        log.info("own wins", extra={"plan": "plan-3"})
    log.info("outside")
    first, inner, own, outside = _lines(stream)
    assert {name: first[name] for name in ("run", "plan", "command", "node")} == {
        "run": "r1",
        "plan": "plan-1",
        "command": "c7",
        "node": "n1",
    }
    assert first["message"] == "command goes out"
    assert first["level"] == "info"
    assert first["time"].endswith("+00:00")
    assert "task" not in first
    assert (inner["run"], inner["plan"]) == ("r1", "plan-2")
    assert own["plan"] == "plan-3"
    assert not {"run", "plan"} & set(outside)


def test_any_message_is_one_line_of_json(stream) -> None:
    """Line breaks, quotes, odd bytes and tracebacks stay inside one object."""
    log = logging.getLogger("coral_tasks.profiling.fit")
    message = 'a "quoted"\nline {}\u2028\x00 % d'
    log.warning(message)
    log.warning("object %s", object())
    try:
        int("two\nlines")
    except ValueError:
        log.exception("failed")
    lines = _lines(stream)
    assert len(stream.getvalue().split("\n")) == 4
    assert lines[0]["message"] == message
    assert "ValueError: invalid literal" in lines[2]["traceback"]


def test_text_lines_hold_the_same_ids(stream) -> None:
    """For people: one line, ids at its end."""
    text = io.StringIO()
    logs.configure("text", text)
    with logs.context(run="r1"):
        logging.getLogger("coral.tasks").info("two\nlines", extra={"seconds": 1.5})
    (line,) = text.getvalue().splitlines()
    assert line.endswith("coral.tasks two | lines run=r1 seconds=1.5")
    assert stream.getvalue() == ""


def test_configuring_twice_does_not_double_lines(stream) -> None:
    """Every task configures; a line still comes once, and other handlers stay."""
    other = logging.NullHandler()
    logging.getLogger("coral").addHandler(other)
    again = io.StringIO()
    logs.configure("json", again)
    logs.configure("json", again)
    logging.getLogger("coral").info("once")
    assert len(again.getvalue().splitlines()) == 1
    assert other in logging.getLogger("coral").handlers


def test_threads_do_not_share_their_ids(stream) -> None:
    """A line of another thread never carries this one's run."""
    with logs.context(run="mine"):
        thread = threading.Thread(target=lambda: logging.getLogger("coral").info("other thread"))
        thread.start()
        thread.join()
    assert "run" not in _lines(stream)[0]
