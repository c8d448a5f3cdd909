"""Which path runs a call, with which config, and why."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

from blr_kernels.ops.paths import Call, Config, Path, paths
from blr_kernels.tuning import lookup
from blr_kernels.tuning.lookup import Entry

logger = logging.getLogger("blr_kernels.tuning")


@dataclass(frozen=True)
class Choice:
    """What runs a call.

    Attributes:
        path: the path.
        config: its launch sizes.
        source: where the config is from, in words.
        entry: the tuned entry that path and config are from, None for a computed default.
        tokens: the tokens that the entry was tuned at, else those of the call.
    """

    path: Path
    config: Config
    source: str
    entry: Entry | None
    tokens: int


def _usable(call: Call, kernels_only: bool) -> dict[str, Path]:
    return {p.name: p for p in paths(call.op) if not (kernels_only and p.library)}


def _is_stale(path: Path, config: Config, call: Call) -> bool:
    return config.keys() != path.default_config(call).keys()


def _tuned(call: Call, usable: dict[str, Path]) -> Choice | None:
    for tokens, entry in lookup.nearest(call):
        there = replace(call, tokens=tokens)
        for name in entry.ranked():
            path = usable.get(name)
            if path is None or path.why_not(there):
                continue
            config = entry.paths[name].config
            if _is_stale(path, config, there):
                logger.warning(
                    "ignoring a tuned config of path %r with other sizes than it takes; "
                    "tune again: %s",
                    name,
                    lookup.command(there),
                )
                continue
            if path.why_not(call) or path.suits(call) != path.suits(there):
                # It was the best at so many tokens, but not at the call's: ask the next nearest.
                break
            where = "the package" if entry.origin == "shipped" else "the user's cache"
            near = "" if tokens == call.tokens else f", the nearest usable for {call.tokens}"
            source = f"tuned on {call.device.name} at {tokens} tokens{near} (from {where})"
            return Choice(path, config, source, entry, tokens)
    return None


@functools.lru_cache(maxsize=4096)
def choose(call: Call, kernels_only: bool = False) -> Choice:
    """The path and config for a call: as tuned at the nearest tokens, else the preferred path.

    What was tuned at other tokens counts only if its path can take the call, and suits it as it
    suits those tokens.

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
    source = "computed default, nothing tuned that this call can use"
    return Choice(path, path.default_config(call), source, None, call.tokens)


def _why_slower(path: Path, call: Call, choice: Choice) -> str:
    """Why a path that can take the call was not taken, by the entry that the choice is from."""
    unsuited = not path.suits(call)
    if choice.entry is None:
        if unsuited and choice.path.suits(call):
            return "likely slower at these sizes"
        return f"comes after {choice.path.name}"
    here = "here" if choice.tokens == call.tokens else f"at {choice.tokens} tokens"
    timed = choice.entry.paths
    if path.name not in timed:
        return f"not timed {here}" + ("; likely slower at these sizes" if unsuited else "")
    there = replace(call, tokens=choice.tokens)
    if cannot := path.why_not(there):
        return f"cannot {here}: {cannot}"
    if _is_stale(path, timed[path.name].config, there):
        return f"its config tuned {here} has other sizes than it takes"
    return f"slower {here}: {timed[path.name].us:.1f} us against {timed[choice.path.name].us:.1f}"


def why_not_others(call: Call, choice: Choice, kernels_only: bool = False) -> dict[str, str]:
    """For every path but the chosen one the reason why it was not taken.

    Times are those of the entry that the choice is from; a computed default follows from none.
    """
    reasons: dict[str, str] = {}
    for path in paths(call.op):
        if path.name == choice.path.name:
            continue
        if cannot := path.why_not(call):
            reasons[path.name] = f"cannot: {cannot}"
        elif kernels_only and path.library:
            reasons[path.name] = "calls PyTorch's library, and Backend.TRITON was asked for"
        else:
            reasons[path.name] = _why_slower(path, call, choice)
    return reasons


def forget() -> None:
    """Forgets all choices and the configs behind them, so that new tuned configs are seen."""
    choose.cache_clear()
    lookup.forget()
