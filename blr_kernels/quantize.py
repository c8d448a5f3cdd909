"""BLAST layers with 8-bit integers in place of their factors, for inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blr_kernels.nn import BlastLinear
from blr_kernels.ops.backend import Backend
from blr_kernels.ops.checks import check_activation, check_dims, check_shape
from blr_kernels.ops.int8 import blast_linear_int8, quantize_rows
from blr_kernels.reference import Activation
from blr_kernels.structures import Blast


class Int8Blast(NamedTuple):
    """Factors as ``blast_linear_int8`` takes them.

    Attributes:
        left: ``(b, q, r)`` int8.
        left_scale: ``(b, q)`` fp32.
        coupling: ``(b, b, r)`` fp16, the scales of right folded in.
        right: ``(b, r, p)`` int8.
    """

    left: Tensor
    left_scale: Tensor
    coupling: Tensor
    right: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the four tensors."""
        return sum(tensor.nbytes for tensor in self)

    def to_dense(self) -> Tensor:
        """The weight ``(b*q, b*p)`` in fp32 that they stand for."""
        rows = [self._rows(block) for block in range(self.left.shape[0])]
        return torch.cat(rows)

    def error(self, left: Tensor, coupling: Tensor, right: Tensor) -> float:
        """RMS of the difference to the weight of these factors, relative to that weight's RMS."""
        difference = wanted = 0.0
        for block in range(left.shape[0]):
            weight = _dense_rows(left[block].float(), coupling[block].float(), right.float())
            difference += float((self._rows(block) - weight).square().sum())
            wanted += float(weight.square().sum())
        return (difference / wanted) ** 0.5 if wanted else 0.0

    def _rows(self, block: int) -> Tensor:
        left = self.left[block] * self.left_scale[block, :, None]
        return _dense_rows(left, self.coupling[block].float(), self.right.float())


def _dense_rows(left: Tensor, coupling: Tensor, right: Tensor) -> Tensor:
    """``left (q, r)``, ``coupling (j, r)``, ``right (j, r, p)`` -> ``(q, j*p)``."""
    blocks = (left.unsqueeze(0) * coupling.unsqueeze(1)) @ right  # (j, q, p)
    return blocks.transpose(0, 1).flatten(1)


@torch.no_grad()
def quantize_blast(left: Tensor, coupling: Tensor, right: Tensor) -> Int8Blast:
    """Rounds BLAST factors to 8-bit integers with scales, symmetric around zero.

    A factor between left and the coupling of one block and rank leaves the weight as it is. It is
    chosen so that, for uncorrelated inputs, rank values of left and of the intermediate vary
    alike: a scale that rows of left, and tiles of the intermediate, share then suits all of them.

    Args:
        left: ``(b, q, r)``.
        coupling: ``(b, b, r)``.
        right: ``(b, r, p)``.

    Raises:
        ValueError: for shapes that do not fit, or values that are not finite.
    """
    check_dims("left", left, "(b, q, r)")
    blocks, _, rank = left.shape
    check_shape("coupling", coupling, (blocks, blocks, rank))
    check_dims("right", right, "(b, r, p)")
    check_shape("right", right, (blocks, rank, right.shape[2]))
    for name, tensor in {"left": left, "coupling": coupling, "right": right}.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} must be finite, got NaN or an infinity")
    left, coupling, right = left.float(), coupling.float(), right.float()

    spread = torch.einsum("ijr,jr->ir", coupling.square(), right.square().sum(2)).sqrt()
    balance = _positive(left.square().mean(1).sqrt()).div(_positive(spread)).sqrt()
    size = _positive((spread * balance).square().mean(1).sqrt())  # of the intermediate, by block
    left8, left_scale = quantize_rows(left / balance.unsqueeze(1))
    right8, right_scale = quantize_rows(right)
    coupling = coupling * right_scale * (balance / size.unsqueeze(1)).unsqueeze(1)
    largest = _positive(coupling.abs().sum(1).amax())
    return Int8Blast(
        left8,
        left_scale * size.unsqueeze(1) * largest,
        (coupling / largest).half(),
        right8,
    )


def _positive(size: Tensor) -> Tensor:
    """``size``, 1 where it is 0: what is all zeros can be scaled by anything."""
    return torch.where(size > 0, size, 1.0)


class Int8BlastLinear(nn.Module):
    """``y = activation(x @ W.T + bias)`` for inference, W a BLAST weight of 8-bit integers.

    Made by ``from_blast`` or ``quantize_``; one made by its constructor is all zeros until a
    state dict is loaded. Sizes that b does not divide are padded inside, as in ``BLRLinear``.
    Casting the module casts the bias alone.

    Attributes:
        in_features, out_features: sizes as the caller sees them.
        structure: blocks and rank.
        backend: what computes the layer; may be set at any time.
        activation: applied after the bias, None for a plain linear.
        left, left_scale, coupling, right: buffers, as ``Int8Blast`` says.
        bias: buffer ``(out_features)`` or None.
        weight_error: buffer ``()``, the RMS of the weight's change relative to the weight, NaN as
            long as it is unknown.
    """

    left: Tensor
    left_scale: Tensor
    coupling: Tensor
    right: Tensor
    bias: Tensor | None
    weight_error: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Blast,
        bias: bool = True,
        *,
        backend: Backend = Backend.AUTO,
        activation: Activation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes a layer of zeros.

        Raises:
            TypeError: if the structure is no ``Blast``.
            ValueError: if it does not fit the sizes, or the activation is unknown.
        """
        super().__init__()
        if not isinstance(structure, Blast):
            raise TypeError(f"Int8BlastLinear takes a Blast, got {structure!r}")
        check_activation(activation)
        self.in_features = in_features
        self.out_features = out_features
        self.structure = structure
        self.backend = backend
        self.activation = activation
        self.in_padded, self.out_padded = structure.padded(in_features, out_features)
        shapes = structure.parameter_shapes(in_features, out_features)
        dtypes = {"left": torch.int8, "coupling": torch.float16, "right": torch.int8}
        for name, buffer_dtype in dtypes.items():
            buffer = torch.zeros(shapes[name], device=device, dtype=buffer_dtype)
            self.register_buffer(name, buffer)
        scale = torch.zeros(shapes["left"][:2], device=device, dtype=torch.float32)
        self.register_buffer("left_scale", scale)
        self.register_buffer(
            "bias", torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        )
        self.register_buffer("weight_error", torch.full((), torch.nan, device=device))

    @staticmethod
    def from_blast(layer: BlastLinear) -> Int8BlastLinear:
        """Rounds a BLAST layer, which stays as it is, bias, backend and activation kept.

        Raises:
            TypeError: if it is no ``BlastLinear``.
            ValueError: if its factors are not finite.
        """
        if not isinstance(layer, BlastLinear):
            raise TypeError(f"layer must be a BlastLinear, got {type(layer).__name__}")
        left, coupling, right = (
            getattr(layer, name).detach() for name in ("left", "coupling", "right")
        )
        factors = quantize_blast(left, coupling, right)
        rounded = Int8BlastLinear(
            layer.in_features,
            layer.out_features,
            cast(Blast, layer.structure),
            layer.bias is not None,
            backend=layer.backend,
            activation=layer.activation,
            device="meta",
            dtype=left.dtype,
        )
        for name, tensor in factors._asdict().items():
            setattr(rounded, name, tensor)
        rounded.bias = None if layer.bias is None else layer.bias.detach().clone()
        rounded.weight_error = torch.tensor(
            factors.error(left, coupling, right), dtype=torch.float32, device=left.device
        )
        return rounded.train(layer.training)

    @property
    def factors(self) -> Int8Blast:
        """The four tensors of the weight."""
        return Int8Blast(self.left, self.left_scale, self.coupling, self.right)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, its scales included, the bias left out."""
        return self.factors.nbytes

    def to_dense(self) -> Tensor:
        """The weight ``(out_features, in_features)`` in fp32 that the integers stand for."""
        return self.factors.to_dense()[: self.out_features, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """``x (..., in_features)`` -> ``(..., out_features)``."""
        bias = self.bias
        columns = self.in_padded - self.in_features
        rows = self.out_padded - self.out_features
        if columns or rows:
            if x.dim() < 1 or x.shape[-1] != self.in_features:
                raise ValueError(
                    f"x must have shape (..., {self.in_features}), got {tuple(x.shape)}"
                )
            x = F.pad(x, (0, columns))
            bias = None if bias is None else F.pad(bias, (0, rows))
        y = blast_linear_int8(x, *self.factors, bias, self.activation, backend=self.backend)
        return y[..., : self.out_features].contiguous() if rows else y

    def extra_repr(self) -> str:
        """Sizes, structure, bytes, error of the weight, activation and backend."""
        before = 2 * self.structure.parameter_count(self.in_features, self.out_features)
        parts = [
            f"{self.in_features} -> {self.out_features}",
            f"{self.structure} in int8",
            f"bias={self.bias is not None}",
            f"{self.weight_bytes:,} bytes ({self.weight_bytes / before:.0%} of 16-bit factors)",
        ]
        if self.weight_error.device.type != "meta":
            parts.append(f"weight error {float(self.weight_error):.2%}")
        if (self.in_padded, self.out_padded) != (self.in_features, self.out_features):
            parts.append(f"padded to {self.in_padded} -> {self.out_padded}")
        if self.activation is not None:
            parts.append(f"activation={self.activation}")
        parts.append(f"backend={self.backend.value}")
        return ", ".join(parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8BlastLinear:
        kept = {name: getattr(self, name) for name in ("left_scale", "coupling", "weight_error")}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = getattr(self, name)
            if after.dtype != before.dtype:
                # A cast to another dtype; the values that it rounded come back.
                exact = before if before.device == after.device else before.to(after.device)
                setattr(self, name, exact)
        return self


@dataclass(frozen=True)
class Int8Report:
    """What rounding did to one layer.

    Attributes:
        name: where the layer is in the model.
        error: RMS of the change of its dense weight, relative to that weight.
        bytes_before, bytes_after: of its factors, scales included, the bias left out.
    """

    name: str
    error: float
    bytes_before: int
    bytes_after: int


def quantize_(
    model: nn.Module, choose: Callable[[str, BlastLinear], bool] | None = None
) -> list[Int8Report]:
    """Puts an ``Int8BlastLinear`` in the place of each BLAST layer of ``model``.

    Args:
        model: changed in place. A layer that it holds twice stays one layer.
        choose: called with name and layer, says whether to round it; None rounds all.

    Returns:
        A report per layer, in the model's order.

    Raises:
        ValueError: if there is no such layer, or the model is one itself.
    """
    if isinstance(model, BlastLinear):
        raise ValueError("the model is a BlastLinear itself: use Int8BlastLinear.from_blast")
    reports = []
    done: dict[BlastLinear, Int8BlastLinear] = {}
    for path, parent in list(model.named_modules()):
        for key, child in list(parent._modules.items()):
            if not isinstance(child, BlastLinear):
                continue
            name = f"{path}.{key}" if path else key
            if child not in done:
                if choose is not None and not choose(name, child):
                    continue
                rounded = done[child] = Int8BlastLinear.from_blast(child)
                before = sum(factor.nbytes for factor in child.factors().values())
                error = float(rounded.weight_error)
                reports.append(Int8Report(name, error, before, rounded.weight_bytes))
            setattr(parent, key, done[child])
    if not reports:
        raise ValueError("no BlastLinear was found or chosen")
    return reports
