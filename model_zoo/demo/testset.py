"""The test set: pictures by a designer that training never sees.

Only the final evaluation imports this module; a test keeps it so.
"""

from __future__ import annotations

from pathlib import Path

import torch

from model_zoo.demo.dataset import Icons, read_pack
from model_zoo.demo.icons import IconSet, write_pack
from model_zoo.demo.names import CLASSES

TEST_DESIGNER = "emojione"
TEST_FILE = "test.npz"


def build_test_pack(node_modules: Path, path: Path) -> int:
    """Draw every class by the test designer; -> how many pictures."""
    icons = IconSet.load(node_modules, TEST_DESIGNER)
    return write_pack(path, ((icons, name) for name in CLASSES))


def load_test(folder: Path, *, device: str | torch.device = "cpu") -> Icons:
    """The test designer's pictures, one a class."""
    return read_pack(folder / TEST_FILE, (TEST_DESIGNER,), device)
