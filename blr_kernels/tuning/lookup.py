"""Finds tuned configs: those shipped with the package, and above them those of the user's cache.

One JSON file holds one layer on one GPU, ``<GPU>/<op>_<dims>_<dtype>.json``, with an entry for each
number of tokens that was tuned.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blr_kernels.ops.paths import Call

logger = logging.getLogger("blr_kernels.tuning")

FORMAT = 1
"""Version of the files. One of another version is ignored, with a warning."""

SHIPPED = Path(__file__).parent / "configs"

_FARTHEST = 2
_FEW_TOKENS = 1024
"""Tokens up to which launch sizes are those of a device that is not full."""


@dataclass(frozen=True)
class Result:
    """The best config that was found for one path.

    Attributes:
        config: its launch sizes.
        us: median microseconds of a call.
        rms: RMS error relative to fp32.
    """

    config: Mapping[str, int]
    us: float
    rms: float


@dataclass(frozen=True)
class Entry:
    """What tuning found for one number of tokens.

    Attributes:
        path: name of the fastest path.
        paths: the best of every path that was tried, by name.
        origin: "shipped" or "cache", where it was found.
    """

    path: str
    paths: Mapping[str, Result]
    origin: str = "cache"

    def ranked(self) -> list[str]:
        """Names of the paths, the fastest first."""
        return sorted(self.paths, key=lambda name: (name != self.path, self.paths[name].us))


def cache_dir() -> Path:
    """The folder for the user's own configs: ``BLR_KERNELS_CACHE``, else the user's cache."""
    if own := os.environ.get("BLR_KERNELS_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "blr_kernels"


def header(call: Call) -> dict[str, str | int]:
    """What a file says of itself: the layer and the GPU, without tokens."""
    return {
        "format": FORMAT,
        "gpu": call.device.name,
        "op": call.op,
        "in_features": call.in_features,
        "out_features": call.out_features,
        "blocks": call.blocks,
        "rank": call.rank,
        "dtype": str(call.dtype).removeprefix("torch."),
    }


def file_name(call: Call) -> Path:
    """Where the configs of a layer are, below a folder of configs."""
    slug = re.sub(r"[^a-z0-9]+", "-", call.device.name.lower()).strip("-")
    dims = f"{call.in_features}x{call.out_features}_b{call.blocks}_r{call.rank}"
    dtype = str(call.dtype).removeprefix("torch.")
    return Path(slug or "unknown") / f"{call.op}_{dims}_{dtype}.json"


def command(call: Call) -> str:
    """The command that tunes this call."""
    return (
        f"python -m blr_kernels.tuning --op {call.op} --in {call.in_features} "
        f"--out {call.out_features} --blocks {call.blocks} --rank {call.rank} "
        f"--tokens {call.tokens} --dtype {str(call.dtype).removeprefix('torch.')}"
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _parse_result(where: str, data: Any) -> Result:
    if not isinstance(data, dict) or not isinstance(data.get("config"), dict):
        raise ValueError(f"{where} must be an object with a config")
    for key, value in data["config"].items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise ValueError(f"{where}: config {key} must be an int from 0, got {value!r}")
    for key in ("us", "rms"):
        if not _is_number(data.get(key)):
            raise ValueError(f"{where}: {key} must be a number from 0, got {data.get(key)!r}")
    return Result(dict(data["config"]), float(data["us"]), float(data["rms"]))


def parse(text: str, expected: Mapping[str, str | int], origin: str) -> dict[int, Entry]:
    """Reads a file's text: entries by tokens.

    Args:
        text: the JSON.
        expected: the header it must have.
        origin: kept in the entries.

    Raises:
        ValueError: if it is no such file; the text says what is wrong with it.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"must hold an object, got {type(data).__name__}")
    for key, value in expected.items():
        if data.get(key) != value:
            raise ValueError(f"{key} must be {value!r}, got {data.get(key)!r}")
    if not isinstance(data.get("entries"), dict):
        raise ValueError("entries must be an object")
    entries: dict[int, Entry] = {}
    for tokens, entry in data["entries"].items():
        if not tokens.isascii() or not tokens.isdigit() or int(tokens) < 1:
            raise ValueError(f"tokens must be a positive number, got {tokens!r}")
        where = f"entry of {tokens} tokens"
        if not isinstance(entry, dict) or not isinstance(entry.get("paths"), dict):
            raise ValueError(f"{where} must be an object with paths")
        found = {
            name: _parse_result(f"{where}, path {name}", result)
            for name, result in entry["paths"].items()
        }
        if entry.get("path") not in found:
            raise ValueError(f"{where}: path must be one of its paths, got {entry.get('path')!r}")
        if entry.get("config") != found[entry["path"]].config:
            raise ValueError(f"{where}: config must be the one of path {entry['path']}")
        entries[int(tokens)] = Entry(entry["path"], found, origin)
    return entries


def read(file: Path, expected: Mapping[str, str | int], origin: str) -> dict[int, Entry]:
    """The entries of a file, none if there is no such file or, with a warning, if it is broken."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        _warn(file, str(error))
        return {}
    try:
        return parse(text, expected, origin)
    except (ValueError, RecursionError) as error:
        _warn(file, str(error))
        return {}


_warned: set[Path] = set()


def _warn(file: Path, reason: str) -> None:
    if file in _warned:
        return
    _warned.add(file)
    logger.warning(
        "ignoring the tuned configs in %s: %s; delete the file, or tune the layer again with "
        "python -m blr_kernels.tuning",
        file,
        reason,
    )


@functools.lru_cache(maxsize=1024)
def _table(name: Path, expected: tuple[tuple[str, str | int], ...]) -> Mapping[int, Entry]:
    wanted = dict(expected)
    return {
        **read(SHIPPED / name, wanted, "shipped"),
        **read(cache_dir() / name, wanted, "cache"),
    }


def entries(call: Call) -> Mapping[int, Entry]:
    """The tuned entries of a call's layer on its GPU, by tokens. Files are read once."""
    return _table(file_name(call), tuple(header(call).items()))


def nearest(call: Call) -> list[tuple[int, Entry]]:
    """Entries near enough to the call's tokens to be of use, the nearest first, by ratio.

    Near is up to twice as many tokens or half as many. Where a launch does not fill the device, its
    tiles, and the programs that share a tile's rank or output, follow from the tokens: three times
    as many take another path or tile. An entry of more than 1,024 tokens is also near to any more:
    what fills the device once fills it again and again. Not the other way, to fewer tokens, where
    the same sizes leave multiprocessors idle.
    """

    def ratio(tokens: int) -> float:
        return max(tokens, call.tokens) / min(tokens, call.tokens)

    found = entries(call)
    if not found:
        _tell_untuned(call)
    near = [
        tokens
        for tokens in found
        if ratio(tokens) <= _FARTHEST or _FEW_TOKENS < tokens < call.tokens
    ]
    return [(tokens, found[tokens]) for tokens in sorted(near, key=lambda t: (ratio(t), t))]


_told: set[Path] = set()


def _tell_untuned(call: Call) -> None:
    name = file_name(call)
    if name not in _told and call.device.capability != (0, 0):
        _told.add(name)
        logger.info("no tuned config on %s; to tune: %s", call.device.name, command(call))


def forget() -> None:
    """Forgets what was read, so that files written since are seen."""
    _table.cache_clear()
    _warned.clear()
    _told.clear()
