"""On the path of a Python process, this makes it one without Triton, as on a Mac or Windows.

Python imports it by itself when it starts, and so do all processes that one starts with the same
environment. The guard beside it, of which Python would import only one, works here too.
"""

from __future__ import annotations

import runpy
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


class _WithoutTriton(PathFinder):
    """Finds everything on the path but Triton: `find_spec` gives None, imports fail."""

    @classmethod
    def find_spec(cls, fullname: str, *args: Any, **kwargs: Any) -> ModuleSpec | None:
        if fullname.partition(".")[0] == "triton":
            return None
        return super().find_spec(fullname, *args, **kwargs)


sys.meta_path[:] = [_WithoutTriton if f is PathFinder else f for f in sys.meta_path]
runpy.run_path(str(Path(__file__).parents[1] / "no_network" / "sitecustomize.py"))
