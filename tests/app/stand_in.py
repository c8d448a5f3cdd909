"""The engine's stand-in, as the page calls it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app_engine"))

from fake_engine import FakeEngine

from app.engine import BackendStatus


class Engine(FakeEngine):
    """The stand-in, with the keyword of the real engine."""

    def backend_status(
        self, model: str, variant: str, *, untrained: bool = False
    ) -> list[BackendStatus]:
        return super().backend_status(model, variant)
