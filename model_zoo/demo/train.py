"""Make the demo models, stage by stage: `python -m model_zoo.demo.train STAGE --out FOLDER ...`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from model_zoo.demo.runtime import Run, say

KINDS = ("low_rank", "monarch", "blast")


# Each stage imports its own module, so that no training stage ever loads the test set's.
def _icons(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import dataset, icons, names, testset

    designers = (*names.TRAINING_DESIGNERS, testset.TEST_DESIGNER)
    modules = options.node_modules or icons.fetch(run.data / "npm", designers)
    trained = icons.build_training_pack(modules, run.data / dataset.TRAINING_FILE)
    tested = testset.build_test_pack(modules, run.data / testset.TEST_FILE)
    icons.write_examples(modules, options.assets / "examples")
    say("icons", f"{trained} pictures to train on, {tested} to test with")


def _autoencoder(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import autoencoder

    autoencoder.train(run)


def _dit(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import generator

    generator.train(run, options.judge)


def _vit(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import classifier

    classifier.train(
        run, options.name or "vit", auxiliary=options.auxiliary, holdout=options.holdout
    )


def _heal_dit(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import healing

    healing.heal_dit(run, options.kind)


def _heal_vit(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import healing

    healing.heal_vit(run, options.kind)


def _evaluate(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import evaluate

    evaluate.evaluate(run)


def _package(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import bundle

    bundle.write_assets(run.out, options.assets)


def _sheet(run: Run, options: argparse.Namespace) -> None:
    from model_zoo.demo import sheet

    sheet.write_sheet(options.assets / "examples" / "samples.png")


STAGES: dict[str, Callable[[Run, argparse.Namespace], None]] = {
    "icons": _icons,
    "autoencoder": _autoencoder,
    "dit": _dit,
    "vit": _vit,
    "heal-dit": _heal_dit,
    "heal-vit": _heal_vit,
    "evaluate": _evaluate,
    "package": _package,
    "sheet": _sheet,
}


def parser() -> argparse.ArgumentParser:
    """The command line of every stage."""
    p = argparse.ArgumentParser(prog="python -m model_zoo.demo.train", description=__doc__)
    p.add_argument("stage", choices=list(STAGES))
    p.add_argument("--data", type=Path, default=Path(".demo-data"), help="folder of the pictures")
    p.add_argument("--out", type=Path, default=Path(".demo-out"), help="folder of the weights")
    p.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    p.add_argument("--seconds", type=float, default=150.0, help="when the stage stops by itself")
    p.add_argument("--until", type=float, help="the same as a Unix time, for stages in a row")
    p.add_argument("--batch", type=int, help="samples a step; a tiny batch on a CPU by default")
    p.add_argument("--resume", action="store_true", help="go on from the stage's last weights")
    p.add_argument("--kind", choices=KINDS, default="blast", help="structure to heal")
    p.add_argument("--name", help="vit: name of the file to write")
    p.add_argument("--auxiliary", action="store_true", help="vit: learn the other names too")
    p.add_argument("--holdout", help="vit: measure on this training designer, left out")
    p.add_argument("--judge", type=Path, help="dit: ViT weights that judge the samples")
    p.add_argument("--node-modules", type=Path, help="icons: npm packages fetched earlier")
    p.add_argument(
        "--assets", type=Path, default=Path("assets"), help="icons, package: where to write"
    )
    return p


def main(arguments: list[str] | None = None) -> int:
    """Run one stage."""
    options = parser().parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    seconds = options.until - time.time() if options.until else options.seconds
    run = Run(options.data, options.out, device, seconds, options.batch, options.resume)
    STAGES[options.stage](run, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
