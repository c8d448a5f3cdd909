"""The demo's data: which module may read the test designer's pictures, and the fixed views."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

import model_zoo.demo
from model_zoo.demo import dataset, testset
from model_zoo.demo.augment import fixed_views, light_views, strong_views
from model_zoo.demo.names import CLASSES, LABELS, TRAINING_DESIGNERS

FOLDER = Path(model_zoo.demo.__file__).parent
MAY_TEST = {"evaluate", "testset"}


def _imports(path: Path, *, nested: bool) -> set[str]:
    """Demo modules that a demo module imports; with `nested` also inside its functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            if name.startswith("model_zoo.demo."):
                found.add(name.split(".")[2])
    return found


def test_only_the_evaluation_imports_the_test_set() -> None:
    modules = {path.stem: path for path in FOLDER.glob("*.py")}
    graph = {name: _imports(path, nested=True) & set(modules) for name, path in modules.items()}
    graph.pop("train")  # dispatches, and is checked below

    def reachable(name: str, seen: set[str]) -> set[str]:
        for other in graph.get(name, set()) - seen:
            reachable(other, seen | {other})
            seen |= {other} | reachable(other, seen)
        return seen

    readers = {name for name in graph if "testset" in reachable(name, {name})}
    assert readers == MAY_TEST
    for name in set(modules) - MAY_TEST:
        text = modules[name].read_text(encoding="utf-8")
        assert "emojione" not in text, name
        assert "test.npz" not in text, name


def test_the_driver_loads_no_stage_before_it_runs() -> None:
    assert _imports(FOLDER / "train.py", nested=False) == {"runtime"}
    tree = ast.parse((FOLDER / "train.py").read_text(encoding="utf-8"))
    users = set()
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            text = ast.unparse(function)
            if "testset" in text or "evaluate" in text:
                users.add(function.name)
    assert users == {"_icons", "_evaluate"}


def _pack(path: Path, designers: list[str]) -> None:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGBA", (128, 128), (200, 30, 30, 255)).save(buffer, "WEBP", lossless=True)
    one = buffer.getvalue()
    np.savez(
        path,
        blob=np.frombuffer(one * len(designers), np.uint8),
        ends=np.cumsum([len(one)] * len(designers)),
        designers=np.array(designers),
        names=np.array([CLASSES[i] for i in range(len(designers))]),
    )


def test_training_refuses_another_designer(tmp_path: Path) -> None:
    _pack(tmp_path / dataset.TRAINING_FILE, ["noto", testset.TEST_DESIGNER])
    with pytest.raises(ValueError, match="got emojione"):
        dataset.load_training(tmp_path)
    _pack(tmp_path / dataset.TRAINING_FILE, list(TRAINING_DESIGNERS))
    icons = dataset.load_training(tmp_path)
    assert icons.designers == TRAINING_DESIGNERS
    assert icons.classes.tolist() == [0, 1, 2, 3, 4]
    assert icons.rgba[0, :, 64, 64].tolist() == [200, 30, 30, 255]
    assert len(icons.by(("noto", "twemoji"))) == 2


def test_test_set_refuses_training_designers(tmp_path: Path) -> None:
    _pack(tmp_path / testset.TEST_FILE, ["twemoji"])
    with pytest.raises(ValueError, match="expected pictures of emojione"):
        testset.load_test(tmp_path)


def test_classes_are_many_and_their_labels_differ() -> None:
    assert len(CLASSES) >= 120
    assert len(set(CLASSES)) == len(CLASSES)
    assert len(set(LABELS)) == len(LABELS)
    assert testset.TEST_DESIGNER not in TRAINING_DESIGNERS


def test_views_stay_pictures() -> None:
    rgba = torch.zeros(3, 4, 128, 128, dtype=torch.uint8)
    rgba[:, 0, 32:96, 32:96] = 255
    rgba[:, 3, 32:96, 32:96] = 255
    for views in (light_views(rgba), strong_views(rgba), fixed_views(rgba, 2, 7)):
        assert views.shape[1:] == (3, 128, 128)
        assert bool(views.isfinite().all())
        assert float(views.min()) >= -1.001
        assert float(views.max()) <= 1.001
    light = light_views(rgba)
    torch.testing.assert_close(light[:, :, 0, 0], torch.ones(3, 3))
    torch.testing.assert_close(light[:, :, 64, 64], torch.tensor([[1.0, -1.0, -1.0]] * 3))


def test_fixed_views_depend_on_the_seed_alone() -> None:
    rgba = torch.full((2, 4, 128, 128), 128, dtype=torch.uint8)
    first = fixed_views(rgba, 3, seed=1)
    torch.manual_seed(99)
    torch.testing.assert_close(first, fixed_views(rgba, 3, seed=1), rtol=0, atol=0)
    assert not torch.equal(first, fixed_views(rgba, 3, seed=2))
