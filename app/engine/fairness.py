"""Who has the device: first come, first served, and background work only when nobody waits."""

from __future__ import annotations

import threading


class Ticket:
    """A place in the line for one device."""

    def __init__(self, line: DeviceLine, background: bool) -> None:
        self._line = line
        self.background = background

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for something to change; whether the device is ours."""
        return self._line._wait(self, timeout)

    @property
    def ahead(self) -> int:
        """How many runs come before this ticket, the one that has the device included."""
        return self._line._ahead(self)

    def leave(self) -> None:
        """Give the place up; harmless when it was given up already."""
        self._line._leave(self)


class DeviceLine:
    """The line for one device."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: list[Ticket] = []
        self._background: list[Ticket] = []
        self._holder: Ticket | None = None
        self._version = 0

    def enter(self, *, background: bool = False) -> Ticket:
        """Queue up. Background tickets stand behind all others, whenever those come."""
        ticket = Ticket(self, background)
        with self._changed:
            (self._background if background else self._runs).append(ticket)
            self._advance()
        return ticket

    @property
    def wanted(self) -> bool:
        """Whether a run waits; background work that has the device then gives it up."""
        with self._changed:
            return any(ticket is not self._holder for ticket in self._runs)

    def _advance(self) -> None:
        if self._holder is None:
            self._holder = next(iter(self._runs + self._background), None)
        self._version += 1
        self._changed.notify_all()

    def _ahead(self, ticket: Ticket) -> int:
        with self._changed:
            return self._runs.index(ticket) if ticket in self._runs else len(self._runs)

    def _wait(self, ticket: Ticket, timeout: float) -> bool:
        with self._changed:
            seen = self._version
            if ticket is not self._holder:
                self._changed.wait_for(lambda: self._version != seen, timeout)
            return ticket is self._holder

    def _leave(self, ticket: Ticket) -> None:
        with self._changed:
            for line in (self._runs, self._background):
                if ticket in line:
                    line.remove(ticket)
            if ticket is self._holder:
                self._holder = None
            self._advance()
