"""The controller's sockets: one DEALER with CURVE for each agent. Owns connections, no protocol state.

IMMEDIATE: nothing is queued for an agent that is not connected, so a command never waits to surprise an agent that
comes back later; what is lost is sent again by the state machine. libzmq reconnects by itself with back-off.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import zmq

from coral_tasks.domain.errors import ProtocolFault
from coral_tasks.protocol.keyfiles import Role, read_key_pair, read_public_key
from coral_tasks.protocol.messages import (
    MAX_MESSAGE_BYTES,
    ToAgent,
    ToController,
    decode_for_controller,
    encode_message,
)

_LOG = logging.getLogger("coral.dispatch")
_BATCH = 64


class AgentLinks:
    """Connections to agents. Use as a context manager."""

    def __init__(self, endpoints: Mapping[str, str], keys: Path, *, controller: str = "controller") -> None:
        """Connect to every agent. Raises UnknownName if a key is missing, StorageFault if one is unusable."""
        self._keys = keys
        self._pair = read_key_pair(keys, Role.CONTROLLER, controller)
        self.malformed: Counter[str] = Counter()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 65_000)
        self._poller = zmq.Poller()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._names: dict[zmq.Socket[bytes], str] = {}
        try:
            self.connect(endpoints)
        except BaseException:
            self.close()
            raise

    def connect(self, endpoints: Mapping[str, str], *, key: str = "") -> None:
        """Connect to agents not connected to yet. ``key``: name of the key they share, "" if each has its own.

        Raises UnknownName if a key is missing, a shared one also before there is anybody to connect to: machines are
        launched only where they could be talked to.
        """
        if key:
            read_public_key(self._keys, Role.AGENT, key)
        publics = {name: read_public_key(self._keys, Role.AGENT, key or name) for name in endpoints}
        for name, endpoint in sorted(endpoints.items()):
            if name not in self._sockets:
                socket = self._new_socket(publics[name])
                socket.connect(endpoint)
                self._sockets[name] = socket
                self._names[socket] = name
                self._poller.register(socket, zmq.POLLIN)

    def disconnect(self, names: Iterable[str]) -> None:
        """Forget these agents, as far as they are known: their machines are gone."""
        for name in sorted(set(names) & self._sockets.keys()):
            socket = self._sockets.pop(name)
            del self._names[socket]
            self._poller.unregister(socket)
            socket.close()

    def _new_socket(self, public: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.CURVE_SERVERKEY, public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        return socket

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of all agents connected to, reachable or not."""
        return tuple(self._sockets)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections at once."""
        for socket in self._sockets.values():
            socket.close()
        self._context.destroy(linger=0)

    def send(self, agent: str, message: ToAgent) -> bool:
        """Send if the agent is connected and reads; False if it is not."""
        try:
            self._sockets[agent].send(encode_message(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, timeout_s: float) -> list[tuple[str, ToController]]:
        """Messages that came within ``timeout_s``, with the agent each came from; malformed ones are dropped.

        An agent is known by the connection it was authenticated on, not by what it says.
        """
        found: list[tuple[str, ToController]] = []
        for socket, _ in self._poller.poll(max(0, int(timeout_s * 1000))):
            name = self._names[socket]
            found += [(name, message) for message in self._drain(socket, name)]
        return found

    def _drain(self, socket: zmq.Socket[bytes], name: str) -> Iterable[ToController]:
        for _ in range(_BATCH):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            try:
                yield decode_for_controller(frames[0] if len(frames) == 1 else b"")
            except ProtocolFault as fault:
                self.malformed[name] += 1
                # the 1st, 2nd, 4th, 8th, …: an agent gone mad must not fill the log
                if self.malformed[name].bit_count() == 1:
                    _LOG.warning("agent %s: malformed message no. %d: %s", name, self.malformed[name], fault)
