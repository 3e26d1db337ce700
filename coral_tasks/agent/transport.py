"""The agent's socket: ROUTER with CURVE; only listed controllers get in (ZAP). Owns no protocol state.

The allow-list is read again when its folder changes and at least every second, so that rotated keys count. Peers are
told apart by connection; each has a rate limit. libzmq drops frames above the size limit together with the connection.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils import z85

from coral_tasks.domain.errors import ProtocolFault
from coral_tasks.protocol.keyfiles import KeyPair, Role, list_public_keys
from coral_tasks.protocol.messages import MAX_MESSAGE_BYTES

_MAX_PEERS = 256
_LIST_S = 1.0
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


@dataclass(slots=True, kw_only=True)
class _Bucket:
    tokens: float
    at_s: float


@dataclass(slots=True, kw_only=True)
class RateLimit:
    """Token bucket per peer: ``rate_per_s`` in the long run, ``burst`` at once."""

    rate_per_s: float
    burst: int
    _buckets: dict[bytes, _Bucket] = field(default_factory=dict)

    def admits(self, peer: bytes, now_s: float) -> bool:
        """Whether one more message of ``peer`` is allowed now."""
        bucket = self._buckets.pop(peer, None) or _Bucket(tokens=float(self.burst), at_s=now_s)
        gained = max(0.0, now_s - bucket.at_s) * self.rate_per_s
        tokens = min(float(self.burst), bucket.tokens + gained)
        allowed = tokens >= 1
        self._buckets[peer] = _Bucket(tokens=tokens - 1 if allowed else tokens, at_s=now_s)
        while len(self._buckets) > _MAX_PEERS:
            # the peer not heard for longest
            del self._buckets[next(iter(self._buckets))]
        return allowed


@dataclass(slots=True, kw_only=True)
class ZapHandler:
    """Answers libzmq's question who may come in. One per context; domains map to key folders."""

    context: zmq.asyncio.Context
    folders: dict[str, Path] = field(default_factory=dict)
    refused: int = 0
    _lists: dict[Path, tuple[int, float, dict[str, str]]] = field(default_factory=dict)

    async def run(self) -> None:
        """Answer until cancelled."""
        socket = self.context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(_ZAP_ENDPOINT)
        try:
            while True:
                await socket.send_multipart(self.answer(await socket.recv_multipart()))
        finally:
            socket.close()

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """ZAP 1.0 reply (rfc.zeromq.org/spec/27): 200 for a listed CURVE key, 400 for everything else."""
        request_id = frames[1] if len(frames) > 1 else b""
        name = self._name_of(frames)
        if name is None:
            self.refused += 1
            return [b"1.0", request_id, b"400", b"not listed", b"", b""]
        return [b"1.0", request_id, b"200", b"OK", name.encode(), b""]

    def _name_of(self, frames: list[bytes]) -> str | None:
        if len(frames) != 7 or frames[0] != b"1.0" or frames[5] != b"CURVE" or len(frames[6]) != 32:
            return None
        folder = self.folders.get(frames[2].decode("utf-8", "replace"))
        if folder is None:
            return None
        presented = z85.encode(frames[6]).decode()
        return self._listed(folder).get(presented)

    def _listed(self, folder: Path) -> dict[str, str]:
        """Names by key. A folder of a thousand keys takes milliseconds to read, and many peers come at once."""
        now_s = time.monotonic()
        try:
            changed_ns = folder.stat().st_mtime_ns
        except OSError:
            return {}
        known = self._lists.get(folder)
        if known is None or known[0] != changed_ns or now_s - known[1] > _LIST_S:
            found = {key: name for name, key in list_public_keys(folder, Role.CONTROLLER).items()}
            known = self._lists[folder] = (changed_ns, now_s, found)
        return known[2]


class AgentSocket:
    """The bound ROUTER socket of one agent."""

    def __init__(self, context: zmq.asyncio.Context, *, bind: str, pair: KeyPair, domain: str) -> None:
        """Bind. Raises ProtocolFault if the address cannot be had."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        self._socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode())
        # older libzmq ignore a missing ZAP handler: never serve without one
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        # libzmq's own default, said aloud: shorter, and many peers at once on a busy machine never get in
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 30000)
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ProtocolFault(f"cannot bind {bind}: {error}") from error

    async def receive(self) -> tuple[bytes, bytes]:
        """Peer and frame of the next message. Messages of another form come back with an empty frame."""
        frames = await self._socket.recv_multipart()
        return frames[0], frames[1] if len(frames) == 2 else b""

    async def send(self, peer: bytes, data: bytes) -> None:
        """Send if the peer is still there and reads; else drop, it will ask again."""
        try:
            await asyncio.wait_for(self._socket.send_multipart([peer, data]), 1.0)
        except (TimeoutError, zmq.ZMQError):
            return

    def close(self) -> None:
        """Close at once."""
        self._socket.close()
