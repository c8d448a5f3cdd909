"""Messages between the engine and a worker, over the worker's standard input and output.

Commands go in as `(name, id, payload)`, reports come out as `(id, name, fields)`. Both ends are
this program, started by it, so pickle is safe here; nothing from outside is ever unpickled.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")

LOADED = "loaded"
ANSWERED = "answered"
RESULT = "result"
FAILED = "failed"
STOPPED = "stopped"
WARMED = "warmed"
LAST = frozenset({ANSWERED, RESULT, FAILED, STOPPED, WARMED})
"""Reports that end a command."""


def write_message(stream: BinaryIO, message: tuple[Any, ...]) -> None:
    """Write one message.

    Raises:
        OSError: when the other end is gone.
    """
    data = pickle.dumps(message, protocol=5)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[Any, ...] | None:
    """Read one message; `None` when the other end is gone."""
    header = _read_exactly(stream, _LENGTH.size)
    if header is None:
        return None
    data = _read_exactly(stream, _LENGTH.unpack(header)[0])
    return None if data is None else pickle.loads(data)


def _read_exactly(stream: BinaryIO, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = stream.read(size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
