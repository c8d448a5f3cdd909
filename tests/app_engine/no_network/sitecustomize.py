"""On the path of a Python process, this refuses every connection that leaves the machine.

Python imports it by itself when it starts, and so do all processes that one starts with the same
environment. Each refusal is written to the file that BLR_LAB_NETWORK_LOG names, so that it is
seen even where the caller swallows the error.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Any


def _local(host: object) -> bool:
    name = host.decode() if isinstance(host, bytes) else str(host)
    if name in ("", "localhost", "None"):
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _refuse(what: str) -> None:
    log = os.environ.get("BLR_LAB_NETWORK_LOG")
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {what}\n")
    raise PermissionError(f"this process may not leave the machine: {what}")


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto"):
        sock, address = args[0], args[1]
        inet = sock.family in (socket.AF_INET, socket.AF_INET6)
        if inet and isinstance(address, tuple) and not _local(address[0]):
            _refuse(f"{event} {address}")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname") and not _local(args[0]):
        _refuse(f"{event} {args[0]!r}")


if os.environ.get("BLR_LAB_FORBID_NETWORK") == "1":
    sys.addaudithook(_audit)
