"""The page's unit tests run on the engine's stand-in, which needs no model."""

from __future__ import annotations

import pytest
from stand_in import Engine

from app.context import Context
from app.forms import Models


@pytest.fixture
def context() -> Context:
    return Context(Engine(speed=0.0), Models(), "cpu")
