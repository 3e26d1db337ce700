"""Health check of a node agent's container: its command socket takes connections. Standard library only.

Usage: python agent-health.py AGENT_TOML. An interface name as host (tcp://eth0:7000) stands for this container.
"""

from __future__ import annotations

import socket
import sys
import tomllib
from pathlib import Path


def main() -> int:
    """Exit status 0 if something listens at the address of the configuration."""
    bind = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["bind"]
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    if host in {name for _, name in socket.if_nameindex()}:
        host = "127.0.0.1" if host == "lo" else socket.gethostname()
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except OSError as error:
        sys.stderr.write(f"{bind}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
