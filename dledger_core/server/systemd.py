"""Messages to systemd, or another service manager that speaks its protocol, ``sd_notify(3)``.

The manager names a datagram socket in the environment. Without it nothing is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["notify", "watchdog_s"]


def notify(state: str) -> None:
    """Send a state: ``READY=1``, ``STOPPING=1`` or ``WATCHDOG=1``. A manager that does not listen is ignored."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # in Linux's abstract namespace
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)  # a full socket must not stop the node
        channel.sendto(state.encode(), address)


def watchdog_s() -> float | None:
    """Return the time within which the manager expects ``WATCHDOG=1`` of this process; None = never."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6
