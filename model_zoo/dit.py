"""DiT (Peebles and Xie, arXiv 2212.09748) from diffusers' ``DiTPipeline`` folders."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL, DiTPipeline, DiTTransformer2DModel
from diffusers.models.attention_processor import Attention, FusedAttnProcessor2_0
from diffusers.models.embeddings import PatchEmbed
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from safetensors import SafetensorError
from torch import nn

from blr_kernels.nn import BLRLinear
from blr_kernels.ops import Backend
from model_zoo.checkpoint import CheckpointError, VariantFile, fill_base_
from model_zoo.convert import Rule, Saving
from model_zoo.headers import read_header
from model_zoo.json_files import read_object
from model_zoo.registry import ModelEntry
from model_zoo.sampling import Denoiser, decode, denoise
from model_zoo.sources import entry_of, folder_of, variant_file
from model_zoo.untrained import PaperSizes, untrained_variant_
from model_zoo.weights import fill_random_, move_buffers_, open_weights, weights_file

__all__ = [
    "Denoiser",
    "DiT",
    "decode",
    "denoise",
    "dit_rules",
    "fuse_qkv_",
    "load_dit",
    "save_dit",
]

PAPER_LAYERS = (r"attn1\.to_qkv", r"ff\.net\.0\.proj", r"norm1\.linear")
OTHER_LAYERS = (r"attn1\.to_out\.0", r"ff\.net\.2")
BLOCKS = 9

PAPER_SIZES = PaperSizes(
    width=1152,
    ranks={"attn1.to_qkv": 384, "ff.net.0.proj": 256, "norm1.linear": 256},
    blocks={"monarch": BLOCKS, "blast": BLOCKS},
)
"""Of DiT-XL/2."""

# The published configurations, for untrained models: facebook/DiT-XL-2-256 and -512.
_TRANSFORMER: dict[str, Any] = {
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "patch_size": 2,
    "num_embeds_ada_norm": 1000,
}
_VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "norm_num_groups": 32,
    "sample_size": 256,
    "scaling_factor": 0.18215,
}
# Sizes beyond these are a mistake, or meant to fill the memory.
_MOST = {
    "num_layers": 1000, "num_attention_heads": 1000, "attention_head_dim": 1000,
    "sample_size": 512, "patch_size": 512,
}  # fmt: skip
_UNTRAINED_SAMPLE_SIZE = {"dit-xl-2-256": 32, "dit-xl-2-512": 64}


@dataclass
class DiT:
    """A class-conditional image generator, ready to run.

    Attributes:
        transformer: predicts noise; ``(n, c, s, s)`` latents -> ``(n, 2c, s, s)``. May be replaced
            by a compiled form of itself.
        vae: decodes latents.
        scheduler: of the folder; each run takes a copy.
        labels: names of the classes by id.
        model: id of the model.
        untrained: whether the weights are random, so that pictures mean nothing.
        config: of the transformer.
        scaling_factor: of the latents.
        out_channels: of the transformer.
    """

    transformer: nn.Module
    vae: nn.Module
    scheduler: Any
    labels: dict[int, str]
    model: str
    untrained: bool
    config: Mapping[str, Any]
    scaling_factor: float
    out_channels: int

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        return next(self.transformer.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of the transformer's parameters."""
        return next(self.transformer.parameters()).dtype

    @property
    def num_classes(self) -> int:
        """Valid class ids are below it; it is itself the id of "no class" in guidance."""
        return int(self.config["num_embeds_ada_norm"])

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """``(channels, height, width)`` of the latents of one image."""
        size = int(self.config["sample_size"])
        return int(self.config["in_channels"]), size, size

    @property
    def tokens(self) -> int:
        """Patches of one image in the transformer."""
        return (int(self.config["sample_size"]) // int(self.config["patch_size"])) ** 2


def load_dit(
    source: ModelEntry | str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    fuse_qkv: bool = True,
    untrained: bool = False,
    variant: str | Path | None = None,
    backend: Backend = Backend.AUTO,
) -> DiT:
    """Load a ``DiTPipeline`` folder, or build it with random weights.

    The transformer is made on ``meta`` and filled from the file tensor by tensor: no parameter
    exists twice, and the dense weights of a variant's converted layers are never read.

    Args:
        source: entry, id or folder. Weights may be ``.safetensors`` or ``.bin`` and class names may
            be the legacy ones of the published models.
        dtype: of all parameters.
        device: where they go.
        fuse_qkv: make one linear of the query, key and value projections.
        untrained: random weights, for timing only; needs no file for a model known by name.
        variant: kind ("low_rank", "monarch", "blast") or file of a converted form. With
            ``untrained`` a kind, at the paper's ranks.
        backend: of the block low-rank layers.

    Raises:
        ValueError: weights or variant are not here, or do not fit; one line.
    """
    entry = entry_of(source, "generate")
    folder = entry.folder()
    if untrained and entry.untrained in _UNTRAINED_SAMPLE_SIZE:
        config = {**_TRANSFORMER, "sample_size": _UNTRAINED_SAMPLE_SIZE[entry.untrained]}
        vae_config, scheduler = _VAE, diffusers.DDIMScheduler(clip_sample=False)
    else:
        if not untrained or folder is None:
            folder = folder_of(entry)
        config = _transformer_config(folder)
        vae_config = AutoencoderKL.load_config(folder / "vae", local_files_only=True)
        scheduler = _scheduler(folder / "scheduler")

    try:
        transformer = _transformer_on_meta(config)
    except Exception as error:  # diffusers raises all sorts of errors for sizes that do not fit
        raise ValueError(f"{entry.id}: its config makes no transformer: {error}") from None
    if fuse_qkv:
        fuse_qkv_(transformer)
    if untrained:
        if variant is not None:
            untrained_variant_(transformer, str(variant), PAPER_SIZES, backend=backend)
        _embed_positions_(transformer)
        fill_random_(transformer, device=device, dtype=dtype)
        with torch.device("meta"):
            vae = AutoencoderKL.from_config(vae_config)
        fill_random_(vae, device=device, dtype=dtype)
    else:
        assert folder is not None
        path = None if variant is None else variant_file(entry, variant)
        _fill_transformer(transformer, folder / "transformer", path, device, dtype, backend)
        vae = _load_vae(folder / "vae", dtype).to(device)
    scaling_factor = float(vae.config.scaling_factor)
    if not 0 < scaling_factor < math.inf:
        raise ValueError(f"{entry.id}: scaling_factor must be positive, got {scaling_factor}")
    return DiT(
        transformer=transformer.eval(),
        vae=vae.eval(),
        scheduler=scheduler,
        labels=entry.labels(),
        model=entry.id,
        untrained=untrained,
        config=dict(transformer.config),
        scaling_factor=scaling_factor,
        out_channels=int(transformer.out_channels),
    )


@torch.no_grad()
def fuse_qkv_(model: nn.Module) -> int:
    """Make one linear ``to_qkv`` of ``to_q``, ``to_k``, ``to_v`` in every self-attention, in place.

    The three are removed, so nothing is stored twice. Works on ``meta``; what is fused stays so.

    Returns:
        How many attentions were fused.
    """
    count = 0
    for attention in model.modules():
        if not isinstance(attention, Attention) or not hasattr(attention, "to_q"):
            continue
        parts = [attention.to_q, attention.to_k, attention.to_v]
        if attention.is_cross_attention or any(type(part) is not nn.Linear for part in parts):
            continue
        weight = parts[0].weight
        fused = nn.Linear(
            parts[0].in_features,
            sum(part.out_features for part in parts),
            bias=parts[0].bias is not None,
            device="meta",
            dtype=weight.dtype,
        )
        fused.weight = nn.Parameter(
            torch.cat([part.weight for part in parts]), requires_grad=weight.requires_grad
        )
        if parts[0].bias is not None:
            fused.bias = nn.Parameter(
                torch.cat([part.bias for part in parts]), requires_grad=weight.requires_grad
            )
        fused.train(parts[0].training)
        attention.to_qkv = fused
        del attention.to_q, attention.to_k, attention.to_v
        attention.fused_projections = True
        attention.set_processor(FusedAttnProcessor2_0())
        count += 1
    return count


def save_dit(dit: DiT, folder: str | Path) -> None:
    """Write a dense DiT as a ``DiTPipeline`` folder that diffusers reads, labels included.

    Safetensors only. Fused q, k and v are written as the three that diffusers expects.

    Raises:
        ValueError: the transformer has block low-rank layers (see ``checkpoint.save_variant``).
    """
    if any(isinstance(module, BLRLinear) for module in dit.transformer.modules()):
        raise ValueError("a converted DiT is saved as a variant of its base, not as a pipeline")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in dit.transformer.state_dict().items():
        if ".to_qkv." in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                tensors[name.replace(".to_qkv.", f".to_{part}.")] = piece.contiguous()
        else:
            tensors[name] = tensor
    plain = _transformer_on_meta(dict(dit.config))
    _embed_positions_(plain)
    plain.load_state_dict(tensors, assign=True)
    pipeline = DiTPipeline(plain, dit.vae, dit.scheduler)
    pipeline.save_pretrained(folder, safe_serialization=True)
    index = Path(folder) / "model_index.json"  # diffusers does not write the labels
    content = json.loads(index.read_text(encoding="utf-8"))
    content["id2label"] = {str(key): label for key, label in sorted(dit.labels.items())}
    index.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def dit_rules(
    kind: str, *, layers: str = "paper", fraction: float = 0.5, blocks: int = BLOCKS
) -> list[Rule]:
    """Rules for :func:`model_zoo.convert.convert_` on a DiT with fused q, k and v.

    Args:
        kind: "low_rank", "monarch" or "blast".
        layers: "paper" converts q/k/v, the first feed-forward layer and adaLN, as the paper does;
            "all" also the attention's output and the second feed-forward layer.
        fraction: of each converted weight's parameters, to be removed.
        blocks: of Monarch and BLAST.

    Raises:
        TypeError, ValueError: unknown ``layers``, or what
            :class:`~model_zoo.convert.Saving` refuses.
    """
    if layers not in ("paper", "all"):
        raise ValueError(f"layers must be 'paper' or 'all', got {layers!r}")
    patterns = PAPER_LAYERS if layers == "paper" else PAPER_LAYERS + OTHER_LAYERS
    saving = Saving(kind, fraction, None if kind == "low_rank" else blocks)
    convert = rf"transformer_blocks\.\d+\.({'|'.join(patterns)})"
    return [Rule(convert, saving, regex=True), Rule(r".*", None, regex=True)]


def _transformer_config(folder: Path) -> dict[str, Any]:
    path = folder / "transformer" / "config.json"
    config = read_object(path)
    found = config.get("_class_name")
    if found not in ("DiTTransformer2DModel", "Transformer2DModel"):
        raise ValueError(f"{path} is of a {found}, expected a DiTTransformer2DModel")
    for key, most in _MOST.items():
        value = config.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ValueError(f"{path}: {key} must be between 1 and {most}, got {value!r}")
    known = inspect.signature(DiTTransformer2DModel.__init__).parameters
    return {key: value for key, value in config.items() if key in known}


def _transformer_on_meta(config: Mapping[str, Any]) -> DiTTransformer2DModel:
    with torch.device("meta"):
        return DiTTransformer2DModel(**config)


def _embed_positions_(transformer: DiTTransformer2DModel) -> None:
    """Compute the position embeddings: they are not stored, so meta and files lack them."""
    embed = PatchEmbed(
        height=transformer.config.sample_size,
        width=transformer.config.sample_size,
        patch_size=transformer.config.patch_size,
        in_channels=1,
        embed_dim=transformer.inner_dim,
    )
    transformer.pos_embed.pos_embed = embed.pos_embed


def _scheduler(folder: Path) -> Any:
    path = folder / "scheduler_config.json"
    name = str(read_object(path).get("_class_name"))
    scheduler: Any = getattr(diffusers, name, None)
    known = inspect.isclass(scheduler) and SchedulerMixin in inspect.getmro(scheduler)
    if not known:
        raise ValueError(f"{path} names {name!r}, which is no scheduler of diffusers")
    if not hasattr(scheduler, "scale_model_input"):
        raise ValueError(f"{path} names {name}, which is not for models that predict noise")
    try:
        return scheduler.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise ValueError(f"{path} makes no scheduler: {error}") from None


def _load_vae(folder: Path, dtype: torch.dtype) -> AutoencoderKL:
    # By diffusers, which also renames the attention layers of older autoencoders.
    weights = weights_file(folder, "diffusion_pytorch_model")
    safe = weights.suffix == ".safetensors"
    if safe:
        read_header(weights)  # refuses a damaged file in one line
    try:
        return AutoencoderKL.from_pretrained(
            folder,
            torch_dtype=dtype,
            use_safetensors=safe,
            local_files_only=True,
            low_cpu_mem_usage=False,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{weights} cannot be loaded: {reason}") from None


def _fill_transformer(
    transformer: DiTTransformer2DModel,
    folder: Path,
    variant_path: Path | None,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: Backend,
) -> None:
    parts = {
        f"{name}.{leaf}": [f"{name.removesuffix('qkv')}{part}.{leaf}" for part in "qkv"]
        for name, module in transformer.named_modules()
        if name.endswith(".to_qkv")
        for leaf, _ in module.named_parameters()
    }
    with open_weights(weights_file(folder, "diffusion_pytorch_model")) as reader:
        fill_base_(
            transformer,
            reader,
            None if variant_path is None else VariantFile(variant_path),
            device=device,
            dtype=dtype,
            backend=backend,
            parts=parts,
            # Older versions of diffusers stored the position embeddings too.
            ignore={"pos_embed.pos_embed"},
        )
    # Only now that the file's shapes have vouched for the sizes.
    _embed_positions_(transformer)
    move_buffers_(transformer, device=device, dtype=dtype)
