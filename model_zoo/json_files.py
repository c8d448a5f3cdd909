"""JSON files of models, which anybody may have written. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_object"]


def read_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: missing, no JSON, or no object; one line.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no JSON object")
    return data
