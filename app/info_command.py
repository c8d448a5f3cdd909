"""`blr-lab info`: versions, the device, the models, and which backends run here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from app.engine import BACKENDS, Engine
from model_zoo.registry import models

_PROBE_S = 60.0


def print_info(device: str, console: Console | None = None) -> None:
    """Print what this machine offers.

    Raises:
        ValueError: for a device that cannot be.
    """
    out = console or Console()
    with Engine(device=device) as engine:
        engine.wait_ready(_PROBE_S)
        known = engine.device_info()
        total, free = known.get("memory_total_mib"), known.get("memory_free_mib")
        out.print(f"[bold]{known['name']}[/bold] ({known['device']})")
        if known.get("error"):
            out.print(str(known["error"]))
        elif total is not None and free is not None:
            out.print(f"{free / 1024:.1f} of {total / 1024:.1f} GiB free")
        versions = known.get("versions") or {}
        out.print(", ".join(f"{name} {version}" for name, version in versions.items()))

        table = Table("model", "id", "task", "weights", "variants here", title="Models")
        missing = []
        for entry in models():
            variants = [variant.id for variant in entry.variants_here]
            here = entry.available()
            if not here:
                missing.append(f"{entry.id}: {entry.how_to_get()}")
            table.add_row(
                entry.title, entry.id, entry.task, "here" if here else "not here",
                ", ".join(variants) or "none",
            )  # fmt: skip
        out.print(table)
        for line in missing:
            out.print(line, soft_wrap=True, highlight=False, markup=False)

        table = Table("backend", "id", "what runs", "here", title="Backends")
        # Asked for untrained weights, so that only the machine is a reason.
        probe = next(entry for entry in models() if entry.untrained)
        status = engine.backend_status(probe.id, "blast", untrained=True)
        reasons = {item.id: "yes" if item.available else item.reason for item in status}
        for info in BACKENDS:
            table.add_row(info.title, info.id, info.description, reasons[info.id])
        out.print(table)
