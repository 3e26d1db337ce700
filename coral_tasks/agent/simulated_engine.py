"""A small real HTTP server that answers as vLLM does, with a profile's timing: the engine for laptops and tests.

Routes: /health, /metrics (vLLM's metric names), /v1/models, /v1/completions, /v1/chat/completions (both with
``stream``). Runs as ``python -m coral_tasks.agent.simulated_engine``; only the standard library, so that a hundred of
them fit on a laptop. Holds no weights and computes nothing.

Timing: the instance gives out work at ``throughput`` (prompt tokens/s in prefill, output tokens/s in decode,
requests/s aggregated); a request waits its turn, then takes ``latency_s`` once (prefill) or per output token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from dataclasses import dataclass, field

_MAX_HEAD_BYTES = 16_384
_MAX_BODY_BYTES = 4 << 20
_DEFAULT_TOKENS = 16
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 413: "Content Too Large"}


_BOUNDS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
"""Upper bounds of vLLM's histograms of lengths, in tokens."""


@dataclass(slots=True)
class Lengths:
    """Histogram of one length of finished requests, in tokens."""

    total: int = 0
    counts: dict[float, int] = field(default_factory=lambda: dict.fromkeys((*_BOUNDS, float("inf")), 0))

    def add(self, tokens: int) -> None:
        """Count one request."""
        self.total += tokens
        for bound in self.counts:
            self.counts[bound] += tokens <= bound

    def lines(self, name: str, label: str) -> list[str]:
        """Prometheus text; ``label``: labels without braces."""
        shown = [("+Inf" if bound == float("inf") else str(bound), count) for bound, count in self.counts.items()]
        buckets = [f'{name}_bucket{{le="{bound}",{label}}} {float(count)}' for bound, count in shown]
        whole = self.counts[float("inf")]
        ends = [f"{name}_sum{{{label}}} {float(self.total)}", f"{name}_count{{{label}}} {float(whole)}"]
        return [f"# TYPE {name} histogram", *buckets, *ends]


@dataclass(slots=True, kw_only=True)
class SimulatedEngine:
    """One engine: its timing and its counters. Seconds are divided by ``time_scale``."""

    model: str
    phase: str
    throughput: float
    latency_s: float
    time_scale: float
    running: int = 0
    waiting: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prompt_lengths: Lengths = field(default_factory=Lengths)
    output_lengths: Lengths = field(default_factory=Lengths)
    free_at_s: float = 0.0
    started_at_s: float = field(default_factory=time.time)

    def work_of(self, prompt_tokens: int, output_tokens: int) -> float:
        """Units of throughput that a request takes."""
        return {"prefill": float(prompt_tokens), "decode": float(output_tokens)}.get(self.phase, 1.0)

    async def admit(self, prompt_tokens: int, output_tokens: int) -> None:
        """Wait for this request's turn in the queue."""
        now_s = time.monotonic()
        begin_s = max(now_s, self.free_at_s)
        self.free_at_s = begin_s + self.work_of(prompt_tokens, output_tokens) / self.throughput / self.time_scale
        self.waiting += 1
        try:
            await asyncio.sleep(begin_s - now_s)
        finally:
            self.waiting -= 1

    async def first_token(self) -> None:
        """Time to the first token."""
        await asyncio.sleep(self.latency_s / self.time_scale)

    async def next_tokens(self, count: int) -> None:
        """Time of ``count`` more tokens; a prefill instance makes one only."""
        if self.phase != "prefill" and count > 0:
            await asyncio.sleep(count * self.latency_s / self.time_scale)

    def metrics(self) -> str:
        """Prometheus text with vLLM's names."""
        bare = 'model_name="' + self.model.replace('"', "") + '"'
        label = "{" + bare + "}"
        values = {
            "vllm:num_requests_running": ("gauge", self.running),
            "vllm:num_requests_waiting": ("gauge", self.waiting),
            "vllm:prompt_tokens_total": ("counter", self.prompt_tokens),
            "vllm:generation_tokens_total": ("counter", self.output_tokens),
            "vllm:request_success_total": ("counter", self.finished),
        }
        lines = [f"# TYPE {name} {kind}\n{name}{label} {float(value)}" for name, (kind, value) in values.items()]
        lines += self.prompt_lengths.lines("vllm:request_prompt_tokens", bare)
        lines += self.output_lengths.lines("vllm:request_generation_tokens", bare)
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    method: str
    path: str
    body: bytes
    keep_alive: bool


class _BadRequest(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def _read_request(reader: asyncio.StreamReader) -> _Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise _BadRequest(400, "head too long") from error
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3:
        raise _BadRequest(400, "malformed request line")
    headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines[1:])}
    length = headers.get("content-length", "0")
    if not length.isdigit():
        raise _BadRequest(400, "malformed content-length")
    if int(length) > _MAX_BODY_BYTES:
        raise _BadRequest(413, "body too long")
    body = await reader.readexactly(int(length))
    keep_alive = headers.get("connection", "").lower() != "close"
    return _Request(method=parts[0], path=parts[1].partition("?")[0], body=body, keep_alive=keep_alive)


def _response(status: int, body: bytes, kind: str = "application/json") -> bytes:
    reason = _REASONS.get(status, "Error")
    return f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _json(status: int, value: object) -> bytes:
    return _response(status, json.dumps(value).encode())


def _count_prompt(fields: dict[str, object]) -> int:
    """Prompt tokens: of token ids exactly, of text one for every four characters, as a rule of thumb."""
    if "messages" in fields:
        return max(1, len(json.dumps(fields["messages"])) // 4)
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        return max(1, len(prompt))
    if isinstance(prompt, str):
        return max(1, len(prompt) // 4)
    raise _BadRequest(400, "prompt must be a text or a list of token ids")


def _completion_fields(engine: SimulatedEngine, body: bytes) -> tuple[int, int, bool]:
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise _BadRequest(400, "body is not JSON") from error
    if not isinstance(fields, dict):
        raise _BadRequest(400, "body must be an object")
    if fields.get("model", engine.model) != engine.model:
        raise _BadRequest(404, f"the model {fields.get('model')!r} does not exist")
    num_tokens = fields.get("max_tokens", fields.get("max_completion_tokens", _DEFAULT_TOKENS))
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or not 1 <= num_tokens <= 1_000_000:
        raise _BadRequest(400, "max_tokens must be a whole number from 1")
    return _count_prompt(fields), num_tokens, bool(fields.get("stream", False))


async def _complete(engine: SimulatedEngine, request: _Request, writer: asyncio.StreamWriter) -> None:
    prompt_tokens, num_tokens, stream = _completion_fields(engine, request.body)
    is_chat = request.path.endswith("/chat/completions")
    engine.prompt_tokens += prompt_tokens
    await engine.admit(prompt_tokens, num_tokens)
    engine.running += 1
    try:
        await engine.first_token()
        if stream:
            await _stream(engine, writer, num_tokens, is_chat=is_chat)
        else:
            await engine.next_tokens(num_tokens - 1)
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens}
            usage["total_tokens"] = prompt_tokens + num_tokens
            text = " ".join(["token"] * num_tokens)
            writer.write(_json(200, {**_chunk(engine, text, "length", is_chat=is_chat), "usage": usage}))
            await writer.drain()
        engine.finished += 1
        engine.prompt_lengths.add(prompt_tokens)
        engine.output_lengths.add(num_tokens)
        engine.output_tokens += num_tokens
    finally:
        engine.running -= 1


def _chunk(engine: SimulatedEngine, text: str, reason: str | None, *, is_chat: bool) -> dict[str, object]:
    content: dict[str, object] = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    choice = {"index": 0, "finish_reason": reason, **content}
    name = f"cmpl-{engine.finished}"
    kind = "chat.completion" if is_chat else "text_completion"
    return {"id": name, "object": kind, "created": int(time.time()), "model": engine.model, "choices": [choice]}


async def _stream(engine: SimulatedEngine, writer: asyncio.StreamWriter, num_tokens: int, *, is_chat: bool) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    for number in range(num_tokens):
        if number:
            await engine.next_tokens(1)
        reason = "length" if number == num_tokens - 1 else None
        chunk = _chunk(engine, "token ", reason, is_chat=is_chat)
        writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await writer.drain()
    writer.write(b"data: [DONE]\n\n")
    await writer.drain()
    writer.close()


async def _answer(engine: SimulatedEngine, request: _Request, writer: asyncio.StreamWriter) -> None:
    route = (request.method, request.path)
    if route == ("GET", "/health"):
        writer.write(_response(200, b"", "text/plain"))
    elif route == ("GET", "/metrics"):
        writer.write(_response(200, engine.metrics().encode(), "text/plain; version=0.0.4"))
    elif route == ("GET", "/v1/models"):
        card = {"id": engine.model, "object": "model", "created": int(engine.started_at_s), "owned_by": "coral"}
        writer.write(_json(200, {"object": "list", "data": [card]}))
    elif route in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions")):
        await _complete(engine, request, writer)
    else:
        raise _BadRequest(404, "no such route")
    await writer.drain()


async def _serve_connection(
    engine: SimulatedEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while (request := await _read_request(reader)) is not None:
            try:
                await _answer(engine, request, writer)
            except _BadRequest as error:
                writer.write(_json(error.status, {"error": {"message": str(error), "code": error.status}}))
            if not request.keep_alive or writer.is_closing():
                break
    except _BadRequest as error:
        writer.write(_json(error.status, {"error": {"message": str(error), "code": error.status}}))
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _serve(engine: SimulatedEngine, host: str, port: int, start_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await asyncio.sleep(start_s / engine.time_scale)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # idle connections when the engine ends are no fault
            await _serve_connection(engine, reader, writer)

    server = await asyncio.start_server(connected, host, port, limit=_MAX_HEAD_BYTES)
    await stop.wait()
    server.close()


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="coral-simulated-engine", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--phase", choices=["prefill", "decode", "aggregated"], required=True)
    parser.add_argument("--throughput", type=float, required=True, help="in the phase's unit")
    parser.add_argument("--latency-s", type=float, required=True, help="to the first token, and per token after it")
    parser.add_argument("--time-scale", type=float, default=1.0, help="this many times faster than real time")
    parser.add_argument("--start-s", type=float, default=0.0, help="time until it answers, as loading weights takes")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Serve until TERM."""
    arguments = _arguments(argv)
    engine = SimulatedEngine(
        model=arguments.model,
        phase=arguments.phase,
        throughput=arguments.throughput,
        latency_s=arguments.latency_s,
        time_scale=arguments.time_scale,
    )
    asyncio.run(_serve(engine, arguments.host, arguments.port, arguments.start_s))


if __name__ == "__main__":
    main(sys.argv[1:])
