"""The engine's side of a worker process: start it, talk to it, notice when it dies."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from app.engine.channel import LAST, LOADED, read_message, write_message
from app.engine.spec import WorkerSpec

_POSIX = os.name == "posix"
_STDERR_LINES = 40


class WorkerDiedError(RuntimeError):
    """The process ended; the message says how, in one line."""


class Worker:
    """One worker process.

    The process gets a group of its own, so that compilers which it started end with it and
    Ctrl-C in the terminal reaches the engine alone. When the engine's process dies, however
    it dies, the worker's standard input closes and the worker ends.

    Args:
        spec: what the worker will hold; `None` for a worker that only answers questions.
        main: name of the module whose `main(spec)` the process runs.
        env: the whole environment of the process.
    """

    _ids = itertools.count(1)

    def __init__(self, spec: WorkerSpec | None, main: str, env: Mapping[str, str]) -> None:
        self.spec = spec
        self.loaded = False
        self.pending: int | None = None
        self.suspended = False
        self._messages: queue.Queue[tuple[Any, ...] | None] = queue.Queue()
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)
        self._process = subprocess.Popen(
            _command(main),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            start_new_session=_POSIX,
            creationflags=0 if _POSIX else subprocess.CREATE_NEW_PROCESS_GROUP,  # type: ignore[attr-defined,unused-ignore]
        )
        self._dead = threading.Event()
        for target in (self._read, self._drain_stderr):
            threading.Thread(target=target, name=f"worker-{self.pid}", daemon=True).start()
        with contextlib.suppress(OSError):
            self._write(("spec", 0, spec))

    @property
    def pid(self) -> int:
        """Id of the process, and on POSIX of its group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is still running."""
        return not self._dead.is_set()

    def send(self, name: str, payload: Any = None, *, id: int | None = None) -> int:
        """Send a command and return its id.

        Raises:
            WorkerDiedError: when the process is gone.
        """
        self.resume()
        number = next(self._ids) if id is None else id
        try:
            self._write((name, number, payload))
        except OSError:
            self._dead.wait(5)
            raise WorkerDiedError(self.death()) from None
        if id is None:
            self.pending = number
        return number

    def receive(self, timeout: float) -> tuple[int, str, dict[str, Any]] | None:
        """The next report, or `None` when there is none within `timeout` seconds.

        Raises:
            WorkerDiedError: when the process is gone and everything it said was read.
        """
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            self._messages.put(None)
            raise WorkerDiedError(self.death())
        number, name, fields = message
        if name == LOADED:
            self.loaded = True
        if name in LAST and number == self.pending:
            self.pending = None
        return number, name, fields

    def suspend(self) -> None:
        """Freeze the process, so that it takes no time from another one being timed."""
        if self.alive and not self.suspended:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.pid).suspend()
                self.suspended = True

    def resume(self) -> None:
        """Let a frozen process go on."""
        if self.suspended:
            with contextlib.suppress(psutil.Error):
                psutil.Process(self.pid).resume()
            self.suspended = False

    def close(self, patience: float = 1.0) -> None:
        """Ask the process to end, and kill it if it does not."""
        if self.alive and self.pending is None:
            with contextlib.suppress(WorkerDiedError, OSError, ValueError):
                self.send("exit", id=0)
                self._dead.wait(patience)
        self.kill()

    def kill(self) -> None:
        """End the process and what it started, now."""
        if not self._dead.is_set():
            if _POSIX:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            else:
                with contextlib.suppress(psutil.Error):
                    for child in psutil.Process(self.pid).children(recursive=True):
                        child.kill()
                self._process.kill()
        self._dead.wait(10)

    def death(self) -> str:
        """One line that says how the process ended."""
        code = self._process.poll()
        if code is None:
            return "its worker process stopped answering"
        if code < 0:
            try:
                name = signal.Signals(-code).name
            except ValueError:
                name = f"signal {-code}"
            hint = "; the machine may have run out of memory" if -code == 9 else ""
            return f"its worker process was ended by {name}{hint}"
        last = next((line for line in reversed(self._stderr) if line.strip()), "")
        return f"its worker process ended with exit code {code}" + (f": {last}" if last else "")

    def _write(self, message: tuple[Any, ...]) -> None:
        assert self._process.stdin is not None
        try:
            write_message(self._process.stdin, message)  # type: ignore[arg-type]
        except ValueError as error:  # the stream is closed already
            raise BrokenPipeError(str(error)) from None

    def _read(self) -> None:
        stream = self._process.stdout
        assert stream is not None
        with contextlib.suppress(OSError, EOFError, ValueError):
            while (message := read_message(stream)) is not None:  # type: ignore[arg-type]
                self._messages.put(message)
        # A closed pipe means that the process has ended or is ending.
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._dead.set()
        self._messages.put(None)

    def _drain_stderr(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                self._stderr.append(line.decode(errors="replace").rstrip())


def _command(main: str) -> Sequence[str]:
    # The child gets the parent's import path as it is, and none of its main module.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; import importlib; "
        f"importlib.import_module({main!r}).main()"
    )
    return [sys.executable, "-c", code]
