"""What torch says about a GPU, asked in a process that ends afterwards."""

from __future__ import annotations

from typing import Any

from app.engine.machine import versions


def probe(device: str) -> dict[str, Any]:
    """Facts on a CUDA device, in the form of `Engine.device_info`."""
    import torch

    facts: dict[str, Any] = {"versions": versions() | {"cuda": torch.version.cuda or "none"}}
    if not torch.cuda.is_available():
        return facts | {"error": "no NVIDIA GPU that torch can use was found"}
    index = int(device.partition(":")[2])
    count = torch.cuda.device_count()
    if index >= count:
        return facts | {"error": f"there is no {device}: {count} GPU(s) were found"}
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return facts | {
        "name": properties.name,
        "memory_total_mib": total / 2**20,
        "memory_free_mib": free / 2**20,
        "capability": (properties.major, properties.minor),
        "error": "",
    }
