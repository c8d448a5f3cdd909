"""Which path runs a call, with which config, and why."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

from blr_kernels.ops.paths import Call, Config, Path, paths
from blr_kernels.tuning import lookup

logger = logging.getLogger("blr_kernels.tuning")


@dataclass(frozen=True)
class Choice:
    """What runs a call.

    Attributes:
        path: the path.
        config: its launch sizes.
        source: where the config is from, in words.
    """

    path: Path
    config: Config
    source: str


def _usable(call: Call, kernels_only: bool) -> dict[str, Path]:
    return {p.name: p for p in paths(call.op) if not (kernels_only and p.library)}


def _tuned(call: Call, usable: dict[str, Path]) -> Choice | None:
    for tokens, entry in lookup.nearest(call):
        there = replace(call, tokens=tokens)
        for name in entry.ranked():
            path = usable.get(name)
            if path is None or path.why_not(there):
                continue
            config = entry.paths[name].config
            if config.keys() != path.default_config(there).keys():
                logger.warning(
                    "ignoring a tuned config of path %r with other sizes than it takes; "
                    "tune again: %s",
                    name,
                    lookup.command(there),
                )
                continue
            if path.why_not(call):
                # It was the best at so many tokens, but not at the call's: ask the next nearest.
                break
            where = "the package" if entry.origin == "shipped" else "the user's cache"
            near = "" if tokens == call.tokens else f", the nearest to {call.tokens}"
            source = f"tuned on {call.device.name} at {tokens} tokens{near} (from {where})"
            return Choice(path, config, source)
    return None


@functools.lru_cache(maxsize=4096)
def choose(call: Call, kernels_only: bool = False) -> Choice:
    """The path and config for a call: as tuned at the nearest tokens, else the preferred path.

    Args:
        call: the call.
        kernels_only: leave out the paths that call PyTorch's library.

    Raises:
        RuntimeError: if no path can take the call; the text says why not, path by path.
    """
    usable = _usable(call, kernels_only)
    if tuned := _tuned(call, usable):
        return tuned
    able = [path for path in usable.values() if not path.why_not(call)]
    if not able:
        reasons = "; ".join(f"{name}: {path.why_not(call)}" for name, path in usable.items())
        raise RuntimeError(f"no path can take this call of {call.op}: {reasons}")
    path = next((path for path in able if path.suits(call)), able[0])
    return Choice(path, path.default_config(call), "computed default, nothing tuned for this call")


def why_not_others(call: Call, choice: Choice, kernels_only: bool = False) -> dict[str, str]:
    """For every path but the chosen one the reason why it was not taken."""
    near = lookup.nearest(call)
    timed = next((entry.paths for _, entry in near if choice.path.name in entry.paths), {})
    reasons: dict[str, str] = {}
    for path in paths(call.op):
        if path.name == choice.path.name:
            continue
        if cannot := path.why_not(call):
            reasons[path.name] = f"cannot: {cannot}"
        elif kernels_only and path.library:
            reasons[path.name] = "calls PyTorch's library, and Backend.TRITON was asked for"
        elif path.name in timed:
            own, best = timed[path.name].us, timed[choice.path.name].us
            reasons[path.name] = f"slower here: {own:.1f} us against {best:.1f}"
        elif not path.suits(call):
            reasons[path.name] = "not timed here; likely slower at these sizes"
        else:
            reasons[path.name] = f"not timed here; comes after {choice.path.name}"
    return reasons


def forget() -> None:
    """Forgets all choices and the configs behind them, so that new tuned configs are seen."""
    choose.cache_clear()
    lookup.forget()
