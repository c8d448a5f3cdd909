"""Commands in, reports out; Stop is heard while a command runs."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO

from app.engine.channel import (
    ANSWERED,
    FAILED,
    LOADED,
    RESULT,
    STOPPED,
    WARMED,
    read_message,
    write_message,
)
from app.engine.spec import WorkerSpec

_PR_SET_PDEATHSIG = 1


class StopRequestedError(Exception):
    """Raised inside a command between two steps, when it should stop."""


class Inbox:
    """Reads commands in a thread, so that Stop and the engine's end are noticed at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._commands: queue.Queue[tuple[str, int, Any]] = queue.Queue()
        self._stopped: set[int] = set()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def next(self) -> tuple[str, int, Any]:
        """Wait for the next command: name, number and payload."""
        return self._commands.get()

    def stopped(self, number: int) -> bool:
        """Whether Stop has come for the command of this number."""
        return number in self._stopped

    def _read(self) -> None:
        while (message := read_message(self._stream)) is not None:
            name, number, payload = message
            if name == "stop":
                self._stopped.add(number)
            elif name == "exit":
                break
            else:
                self._commands.put((name, number, payload))
        end()


def end() -> None:
    """End this process now, with the compilers that it started."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


class Outbox:
    """Reports of the current command."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.number = 0

    def __call__(self, name: str, /, **fields: Any) -> None:
        try:
            write_message(self._stream, (self.number, name, fields))
        except OSError:
            end()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes to the engine, out of reach of whatever libraries print or read."""
    commands = os.fdopen(os.dup(0), "rb")
    reports = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, reports


def _die_with_parent() -> None:
    """Where the kernel offers it, be killed when the engine dies, also while frozen by it."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        end()


def one_line(error: BaseException) -> str:
    """What went wrong, in one line for a person."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    if name == "OutOfMemoryError" or isinstance(error, MemoryError) or "can't allocate" in text:
        return f"out of memory: {text}" if text else "out of memory"
    if isinstance(error, ValueError | TypeError | FileNotFoundError) and text:
        return text
    return f"{name}: {text}" if text else name


def main() -> None:
    """Serve commands until the engine closes the pipe."""
    _die_with_parent()
    commands, reports = _take_pipes()
    inbox, report = Inbox(commands), Outbox(reports)
    _, _, spec = inbox.next()
    session: Any = None
    while True:
        name, report.number, payload = inbox.next()
        number = report.number
        try:
            if name == "probe":
                from app.engine.worker.probe import probe

                report(ANSWERED, **probe(payload))
                continue
            if inbox.stopped(number):
                report(STOPPED)
                continue
            if session is None:
                session = _open(spec)
                report(LOADED)
            _serve(name, session, payload, report, partial(inbox.stopped, number))
        except StopRequestedError:
            report(STOPPED)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            report(FAILED, message=one_line(error))


def _open(spec: WorkerSpec) -> Any:
    from app.engine.worker.session import open_session

    return open_session(spec)


def _serve(
    name: str,
    session: Any,
    job: Any,
    report: Outbox,
    stopped: Callable[[], bool],
) -> None:
    def check() -> None:
        if stopped():
            raise StopRequestedError

    if name == "warm":
        session.prepare(job, report, check)
        report(WARMED)
    elif name == "run":
        report(RESULT, **session.run(job, report, check))
    else:
        raise ValueError(f"unknown command {name!r}")
