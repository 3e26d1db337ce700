"""Health check of a node agent's container: its command socket takes connections. Standard library only.

Usage: python agent-health.py AGENT_TOML. An interface name as host (tcp://eth0:7000) stands for its IPv4 address, as it
does for the agent. Not for this machine's name: that is 127.0.1.1 on many, where no agent listens.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import tomllib
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the address of an interface


def address_of(interface: str) -> str:
    """IPv4 address of a network interface. Raises OSError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    return socket.inet_ntoa(found[20:24])


def main() -> int:
    """Exit status 0 if something listens at the address of the configuration."""
    bind = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["bind"]
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    try:
        if host in {name for _, name in socket.if_nameindex()}:
            host = address_of(host)
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError as error:
        sys.stderr.write(f"{bind}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
