"""Secrets of sources: from private files, never from an address, never repeated in messages or files."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from coral_tasks.domain.errors import CoralError, SourceFault, StorageFault, ValidationFailed
from coral_tasks.settings import Settings
from coral_tasks.tasks.inputs import ingest_table
from coral_tasks.tasks.sources import configured_source, read_secret

SECRET = "planted-7hW2"
NOW = datetime(2026, 11, 30, tzinfo=UTC)


class Server(BaseHTTPRequestHandler):
    """Keeps the Authorization headers it saw; answers with ``status``, redirecting to ``elsewhere`` if that is set."""

    seen: ClassVar[list[str | None]] = []
    status = 403
    elsewhere = ""

    def do_GET(self) -> None:
        type(self).seen.append(self.headers.get("Authorization"))
        self.send_response(307 if self.elsewhere else self.status)
        if self.elsewhere:
            self.send_header("Location", self.elsewhere)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[tuple[type[Server], str]]]:
    """Two servers, each with a record of its own."""
    made, running = [], []
    for _ in range(2):
        handler = type("One", (Server,), {"seen": []})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        made.append((handler, f"http://127.0.0.1:{server.server_port}"))
    yield made
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.fixture
def settings(tmp_path, monkeypatch) -> Settings:
    """An empty home."""
    monkeypatch.setenv("CORAL_HOME", str(tmp_path))
    return Settings()


def _configure(settings: Settings, **demand: object) -> None:
    targets = [{"instance": "127.0.0.1:1", "model": "phi-4-14b", "phase": "decode"}]
    config = {"kind": "prometheus", "targets": targets, **demand}
    (settings.home / "sources.json").write_text(json.dumps({"demand": config}), encoding="utf-8")


def _token_file(settings: Settings, mode: int = 0o600, text: str = SECRET + "\n") -> str:
    path = settings.home / "token"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


def test_the_token_is_sent_and_appears_nowhere(settings, servers, caplog) -> None:
    """The server gets it; message, log, run folder and representation do not."""
    (handler, address), _ = servers
    _configure(settings, address=address, token_file=_token_file(settings))
    configured = configured_source(settings, "demand")
    assert configured is not None
    assert SECRET not in repr(configured)
    with pytest.raises(SourceFault, match="HTTP 403") as refused:
        ingest_table(settings, "r", "demand", NOW)
    assert handler.seen == [f"Bearer {SECRET}"]
    assert SECRET not in str(refused.value)
    assert SECRET not in caplog.text
    kept = [path for path in settings.home.rglob("*") if path.is_file() and path.name != "token"]
    assert kept
    assert all(SECRET.encode() not in path.read_bytes() for path in kept)


def test_the_token_does_not_follow_a_redirect(settings, servers) -> None:
    """A redirect to another server must not hand the token over."""
    (first, address), (second, elsewhere) = servers
    first.elsewhere = f"{elsewhere}/api"
    _configure(settings, address=address, token_file=_token_file(settings))
    with pytest.raises(SourceFault):
        ingest_table(settings, "r", "demand", NOW)
    assert first.seen == [f"Bearer {SECRET}"]
    assert second.seen == [None]


@pytest.mark.parametrize("address", [f"http://me:{SECRET}@127.0.0.1:9", f"http://{SECRET}@127.0.0.1:9/x"])
def test_credentials_in_an_address_are_refused_without_being_repeated(settings, address) -> None:
    """The message names the field and not the password."""
    _configure(settings, address=address)
    with pytest.raises(
        ValidationFailed, match=r"demand\.address: an address must not hold a user or a password"
    ) as error:
        configured_source(settings, "demand")
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660, 0o620, 0o777])
def test_a_secret_that_others_can_read_is_refused(settings, mode) -> None:
    """Named with its cure; the content is not told."""
    path = settings.home / "token"
    _token_file(settings, mode)
    with pytest.raises(ValidationFailed, match="chmod 600") as error:
        read_secret(path)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440, 0o640])
def test_private_secrets_are_read(settings, mode) -> None:
    """As files of the owner, or of the group that containers get."""
    assert read_secret(settings.home / _token_file(settings, mode)) == SECRET


@pytest.mark.parametrize("text", ["", "\n", f"{SECRET} more", f"{SECRET}\n{SECRET}", f"{SECRET}é"])
def test_a_secret_is_one_word(settings, text) -> None:
    """Anything else would break the header or is a mistake; no part of it is told."""
    path = settings.home / _token_file(settings, text=text)
    with pytest.raises(CoralError) as error:
        read_secret(path)
    assert SECRET not in str(error.value)


def test_a_missing_secret_is_named(settings) -> None:
    """The path and the system's reason."""
    with pytest.raises(StorageFault, match="nowhere cannot be read: No such file"):
        read_secret(settings.home / "nowhere")
