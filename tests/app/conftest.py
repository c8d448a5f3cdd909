"""The page's unit tests run on the engine's stand-in, which needs no model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "app_engine"))

from fake_engine import FakeEngine

from app.context import Context
from app.engine import BackendStatus
from app.forms import Models


class Engine(FakeEngine):
    """The stand-in, with the keyword of the real engine."""

    def backend_status(
        self, model: str, variant: str, *, untrained: bool = False
    ) -> list[BackendStatus]:
        return super().backend_status(model, variant)


@pytest.fixture
def context() -> Context:
    return Context(Engine(speed=0.0), Models(), "cpu")
