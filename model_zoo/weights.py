"""Tensors of a weights file, one at a time, and models on ``meta`` filled from them."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from blr_kernels.nn import BLRLinear
from model_zoo.headers import CheckpointError, read_header

__all__ = [
    "Reader",
    "fill_",
    "fill_random_",
    "move_buffers_",
    "open_weights",
    "parameter_count",
    "set_tensor_",
    "weights_file",
]


class Reader(Protocol):
    """Tensors of an open file by name. A tensor is read when it is asked for."""

    @property
    def path(self) -> Path:
        """Of the file."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by name, without reading one."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor on the CPU; it may share the file's own memory."""
        ...


class _SafetensorsReader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._shapes = {name: info.shape for name, info in read_header(path).tensors.items()}
        self._file = safe_open(path, framework="pt", device="cpu")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class _BinReader:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Mapped, so that a tensor is read from the disk when it is copied.
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError:
            raise CheckpointError(f"{path} holds more than weights; it is not opened") from None
        except (OSError, RuntimeError, ValueError, EOFError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{path} is no readable weights file: {reason}") from None
        if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
            raise CheckpointError(f"{path} is no dictionary of tensors")
        self._tensors: dict[str, Tensor] = found

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


@contextmanager
def open_weights(path: str | Path) -> Iterator[Reader]:
    """Open a safetensors file, or a ``.bin`` with ``weights_only=True``.

    Raises:
        CheckpointError: missing, truncated, not that format, or a pickle of more than tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        yield _BinReader(path) if path.suffix == ".bin" else _SafetensorsReader(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not readable: {error}") from None


def weights_file(folder: Path, stem: str) -> Path:
    """``<stem>.safetensors`` in ``folder``, else ``<stem>.bin``.

    Raises:
        CheckpointError: neither is there.
    """
    for suffix in (".safetensors", ".bin"):
        if (path := folder / (stem + suffix)).is_file():
            return path
    raise CheckpointError(f"{folder} has neither {stem}.safetensors nor {stem}.bin")


def fill_(
    model: nn.Module,
    reader: Reader,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None,
    parts: Mapping[str, Sequence[str]] | None = None,
    leave: Collection[str] = (),
    ignore: Collection[str] = (),
) -> None:
    """Give a model on ``meta`` its tensors, each read once and placed where it stays.

    Every name and shape is checked before the first tensor is made.

    Args:
        model: its parameters and persistent buffers are replaced.
        reader: the file.
        device: where the tensors go.
        dtype: of floating tensors; None keeps the file's.
        parts: tensors that are the rows of several tensors of the file, one after another.
        leave: modules of the model that are filled by somebody else.
        ignore: names in the file that the model does not need.

    Raises:
        CheckpointError: a missing or unexpected name, a wrong shape, or integers where the model
            has floating numbers.
    """
    parts = parts or {}
    shapes = reader.shapes()
    taken = set(ignore)
    wanted: dict[str, tuple[Sequence[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[0] in leave:
            continue
        sources = parts.get(name, (name,))
        missing = [source for source in sources if source not in shapes]
        if missing:
            raise CheckpointError(f"{reader.path} lacks {missing[0]}")
        rows = sum(shapes[source][0] for source in sources) if len(sources) > 1 else None
        found = shapes[sources[0]] if rows is None else (rows, *shapes[sources[0]][1:])
        if found != tuple(tensor.shape):
            raise CheckpointError(
                f"{reader.path}: {name} must have shape {tuple(tensor.shape)}, got {found}"
            )
        wanted[name] = (sources, tensor)
        taken.update(sources)
    unexpected = sorted(set(shapes) - taken)
    if unexpected:
        raise CheckpointError(f"{reader.path} has {unexpected[0]}, which the model lacks")
    for name, (sources, old) in wanted.items():
        new = None
        row = 0
        for source in sources:
            piece = reader.tensor(source)
            if old.is_floating_point() and not piece.is_floating_point():
                raise CheckpointError(
                    f"{reader.path}: {source} must be floating, got {piece.dtype}"
                )
            if new is None:
                kind = dtype if dtype is not None and old.is_floating_point() else piece.dtype
                new = torch.empty(old.shape, dtype=kind, device=device)
            if piece.ndim == 0:
                new.copy_(piece)
            else:
                new[row : row + piece.shape[0]].copy_(piece)
                row += piece.shape[0]
        assert new is not None
        set_tensor_(model, name, new)


def parameter_count(model: nn.Module) -> int:
    """How many parameters a model holds, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def set_tensor_(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer of this name."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    old = module._parameters.get(leaf)
    if old is not None:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = tensor


def fill_random_(
    model: nn.Module,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
) -> None:
    """Give a model on ``meta`` small random tensors, made where and as they stay.

    No weight is zero, gates of adaLN-zero included: a model whose gates are shut would show none
    of its errors and little of its work. The generators of the caller are left as they were.
    """
    device = torch.device(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        for module in model.modules():
            for leaf, old in list(module._parameters.items()):
                if old is None or not old.is_meta:
                    continue
                kind = dtype if old.is_floating_point() else old.dtype
                new = torch.empty(old.shape, dtype=kind, device=device)
                norm = "Norm" in type(module).__name__
                if leaf == "bias":
                    new.normal_(std=0.02)
                elif norm:
                    new.normal_(mean=1.0, std=0.02)
                else:
                    fan_in = new[0].numel() if new.ndim > 1 else new.numel()
                    new.normal_(std=min(0.5, fan_in**-0.5))
                module._parameters[leaf] = nn.Parameter(new, requires_grad=old.requires_grad)
            if isinstance(module, BLRLinear):
                module.reset_parameters()
    move_buffers_(model, device=device, dtype=dtype)


def move_buffers_(
    model: nn.Module, *, device: torch.device | str, dtype: torch.dtype | None
) -> None:
    """Put buffers that were computed when the model was made where its parameters are."""
    for module in model.modules():
        for leaf, old in module._buffers.items():
            if old is not None and not old.is_meta:
                kind = dtype if old.is_floating_point() else old.dtype
                module._buffers[leaf] = old.to(device=device, dtype=kind)
