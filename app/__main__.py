"""The command `blr-lab`: open the page, convert a checkpoint, describe this machine, measure."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

cli = typer.Typer(
    name="blr-lab",
    help="Compare dense, compiled and block low-rank (BLR) models side by side.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


bench = typer.Typer(help="Measure speed on a GPU.", no_args_is_help=True)
cli.add_typer(bench, name="bench")


class Kind(StrEnum):
    """The structures of `model_zoo.registry.VARIANTS`, as choices."""

    LOW_RANK = "low_rank"
    MONARCH = "monarch"
    BLAST = "blast"


class Layers(StrEnum):
    """Which layers to convert: those of the paper, or all."""

    PAPER = "paper"
    ALL = "all"


@cli.command()
def app(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port; the first free one from 7860.")
    ] = None,
    share: Annotated[
        bool, typer.Option("--share", help="Also open a public link through Gradio's servers.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, or cuda:0, cuda:1, ... for a GPU.")] = "cpu",
    max_models: Annotated[
        int, typer.Option(min=1, max=16, help="How many backends stay loaded at once.")
    ] = 3,
    max_file_size: Annotated[str, typer.Option(help="Largest upload.")] = "10mb",
    model: Annotated[
        list[Path] | None, typer.Option(help="A local model folder to offer too; repeatable.")
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = False,
) -> None:
    """Open the page that compares backends on this machine."""
    from app.serve import serve

    try:
        serve(
            host=host, port=port, share=share, device=device, max_models=max_models,
            max_file_size=max_file_size, folders=model or [], open_browser=open_browser,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


@cli.command()
def convert(
    source: Annotated[str, typer.Argument(help="A model id of `blr-lab info`, or a local folder.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; by default where the app looks for it."),
    ] = None,
    structure: Annotated[Kind, typer.Option(help="The block low-rank structure.")] = Kind.BLAST,
    blocks: Annotated[
        int | None, typer.Option(min=1, help="Blocks a side, for monarch and blast.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="The rank of every layer.")] = None,
    fraction: Annotated[
        float | None, typer.Option(help="Share of each layer's parameters to remove, 0 to 1.")
    ] = None,
    layers: Annotated[
        Layers, typer.Option(help="The paper's layers, or every linear of the blocks.")
    ] = Layers.PAPER,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also write the report per layer as JSON.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it exists.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where to factorize: cpu, or cuda:0, cuda:1, ... for a GPU.")
    ] = "cpu",
    max_iterations: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Sweeps of a BLAST fit at most; by default 300. It stops by "
            "itself once ten sweeps gain less than 0.1 %.",
        ),
    ] = None,
) -> None:
    """Convert a dense checkpoint to a block low-rank variant and print what it cost."""
    from app.convert_command import convert_model

    try:
        convert_model(
            source, out, structure=structure.value, blocks=blocks, rank=rank,
            fraction=fraction, layers=layers.value, report=report, overwrite=overwrite,
            device=device, max_iterations=max_iterations,
        )  # fmt: skip
    except (OSError, TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


@cli.command()
def info(
    device: Annotated[str, typer.Option(help="cpu, or cuda:0, cuda:1, ...")] = "cpu",
) -> None:
    """Print versions, the device, the models, and which backends run here."""
    from app.info_command import print_info

    try:
        print_info(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


# The options, --help among them, are those of `python -m blr_kernels.bench`.
@bench.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)
def layers(context: typer.Context) -> None:
    """Measure single layers: dense, low rank, PyTorch and every kernel path; see --help."""
    from blr_kernels.bench.command import main as measure

    raise typer.Exit(measure(context.args, prog="blr-lab bench layers"))


def main() -> None:
    """Entry point of the installed command."""
    cli()


if __name__ == "__main__":
    main()
