"""Modules that take the place of ``nn.Linear`` with a block low-rank weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blr_kernels import reference
from blr_kernels.ops import Backend, blast_linear, low_rank_linear, monarch_linear
from blr_kernels.ops.checks import check_activation, check_shape
from blr_kernels.reference import Activation
from blr_kernels.structures import Blast, LowRank, Monarch, Structure

Factorizer = Callable[[Tensor, Structure], Mapping[str, Tensor]]


class BLRLinear(nn.Module):
    """``y = activation(x @ W.T + bias)`` with ``W (out, in)`` kept as block low-rank factors.

    A drop-in for ``nn.Linear`` on ``x (..., in_features)``. Sizes that ``structure.blocks`` does
    not divide are padded inside: the factors have the padded sizes, x is padded with zeros and
    the output cut. The bias is never padded. ``BLRLinear.create`` picks the subclass.

    Attributes:
        in_features, out_features: sizes as the caller sees them.
        structure: the structure and its rank.
        backend: what computes the layer; may be set at any time, the parameters stay as they are.
        activation: applied after the bias, None for a plain linear.
        left, right, coupling (BLAST only): factors, shaped as ``structure.parameter_shapes`` says.
        bias: ``(out_features)`` or None.
    """

    structure_type: ClassVar[type[Structure]]

    left: nn.Parameter
    right: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Structure,
        bias: bool = True,
        *,
        backend: Backend = Backend.AUTO,
        activation: Activation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Makes the layer with random factors.

        Raises:
            TypeError: if the structure is not the one of this class.
            ValueError: if the structure does not fit the sizes, or the activation is unknown.
        """
        super().__init__()
        if type(self) is BLRLinear:
            raise TypeError("BLRLinear is made by BLRLinear.create, which picks the subclass")
        if not isinstance(structure, self.structure_type):
            raise TypeError(
                f"{type(self).__name__} takes a {self.structure_type.__name__}, got {structure!r}"
            )
        check_activation(activation)
        self.in_features = in_features
        self.out_features = out_features
        self.structure = structure
        self.backend = backend
        self.activation = activation
        self.in_padded, self.out_padded = structure.padded(in_features, out_features)
        for name, shape in structure.parameter_shapes(in_features, out_features).items():
            factor = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(factor))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @staticmethod
    def create(
        in_features: int,
        out_features: int,
        structure: Structure,
        bias: bool = True,
        *,
        backend: Backend = Backend.AUTO,
        activation: Activation | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> BLRLinear:
        """Makes the subclass that fits ``structure``, with random factors.

        Raises:
            TypeError: if ``structure`` is none.
            ValueError: if it does not fit the sizes, or the activation is unknown.
        """
        for layer_type in (LowRankLinear, MonarchLinear, BlastLinear):
            if isinstance(structure, layer_type.structure_type):
                return layer_type(
                    in_features,
                    out_features,
                    structure,
                    bias,
                    backend=backend,
                    activation=activation,
                    device=device,
                    dtype=dtype,
                )
        raise TypeError(f"structure must be a LowRank, Monarch or Blast, got {structure!r}")

    @staticmethod
    def from_linear(
        linear: nn.Linear,
        structure: Structure,
        factorize: Factorizer,
        *,
        backend: Backend = Backend.AUTO,
    ) -> BLRLinear:
        """Approximates a dense layer.

        Args:
            linear: the layer to approximate; it stays as it is.
            structure: what its weight becomes.
            factorize: called once with the weight, padded with zeros to
                ``structure.padded(in, out)``, and the structure; returns the factors by name.
            backend: what computes the new layer.

        Returns:
            A layer of the same sizes, dtype, device and training mode, with a copy of the bias.

        Raises:
            TypeError, ValueError: if the factors are not those of the structure.
        """
        weight = linear.weight.detach()
        layer = BLRLinear.create(
            linear.in_features,
            linear.out_features,
            structure,
            linear.bias is not None,
            backend=backend,
            device="meta",
            dtype=weight.dtype,
        ).to_empty(device=weight.device)
        rows, columns = layer.out_padded - weight.shape[0], layer.in_padded - weight.shape[1]
        if rows or columns:
            weight = F.pad(weight, (0, columns, 0, rows))
        layer.load_factors_(factorize(weight, structure))
        if layer.bias is not None:
            with torch.no_grad():
                layer.bias.copy_(linear.bias)
        layer.train(linear.training)
        return layer

    @property
    def factor_names(self) -> tuple[str, ...]:
        """Names of the factors: ``left``, ``right`` and, for BLAST, ``coupling``."""
        return tuple(self.structure.parameter_shapes(self.in_features, self.out_features))

    def factors(self) -> dict[str, nn.Parameter]:
        """The factors by name, the bias left out."""
        return {name: cast(nn.Parameter, getattr(self, name)) for name in self.factor_names}

    def load_factors_(self, factors: Mapping[str, Tensor]) -> BLRLinear:
        """Copies factors in, cast to the layer's dtype and device; the bias stays.

        Raises:
            ValueError: if a name is missing or left over, or a shape differs.
        """
        own = self.factors()
        if set(factors) != set(own):
            raise ValueError(f"factors must be {sorted(own)}, got {sorted(factors)}")
        for name, parameter in own.items():
            check_shape(name, factors[name], tuple(parameter.shape))
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(factors[name])
        return self

    def reset_parameters(self) -> None:
        """Draws factors so that the dense weight has the variance of ``nn.Linear``'s default."""
        # An entry of W sums `terms` products of one value per factor, and must have the variance
        # 1 / (3 in); each factor gets its even share.
        structure = self.structure
        terms = structure.rank // (structure.blocks if isinstance(structure, Monarch) else 1)
        std = math.sqrt(1 / (3 * self.in_features * terms)) ** (1 / len(self.factor_names))
        for parameter in self.factors().values():
            nn.init.normal_(parameter, std=std)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def to_dense(self) -> Tensor:
        """The weight ``(out_features, in_features)`` that the factors stand for."""
        return self._dense()[: self.out_features, : self.in_features]

    def forward(self, x: Tensor) -> Tensor:
        """``x (..., in_features)`` -> ``(..., out_features)``."""
        if self.in_padded == self.in_features and self.out_padded == self.out_features:
            return self._linear(x, self.bias)
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise ValueError(f"x must have shape (..., {self.in_features}), got {tuple(x.shape)}")
        x = F.pad(x, (0, self.in_padded - self.in_features))
        bias = self.bias
        if bias is not None:
            bias = F.pad(bias, (0, self.out_padded - self.out_features))
        return self._linear(x, bias)[..., : self.out_features].contiguous()

    def extra_repr(self) -> str:
        """Sizes, structure, parameters kept, activation and backend."""
        before = self.in_features * self.out_features
        after = self.structure.parameter_count(self.in_features, self.out_features)
        parts = [
            f"{self.in_features} -> {self.out_features}",
            str(self.structure),
            f"bias={self.bias is not None}",
            f"{after:,} of {before:,} parameters ({after / before:.0%})",
        ]
        if (self.in_padded, self.out_padded) != (self.in_features, self.out_features):
            parts.append(f"padded to {self.in_padded} -> {self.out_padded}")
        if self.activation is not None:
            parts.append(f"activation={self.activation}")
        parts.append(f"backend={self.backend.value}")
        return ", ".join(parts)

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _dense(self) -> Tensor:
        raise NotImplementedError


class LowRankLinear(BLRLinear):
    """A linear whose weight is ``left (out, r) @ right (r, in)``."""

    structure_type = LowRank

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return low_rank_linear(
            x, self.left, self.right, bias, self.activation, backend=self.backend
        )

    def _dense(self) -> Tensor:
        return reference.low_rank_to_dense(self.left, self.right)


class MonarchLinear(BLRLinear):
    """A linear with a Monarch weight: ``left (b, q, r)``, ``right (b, r, p)``."""

    structure_type = Monarch

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return monarch_linear(x, self.left, self.right, bias, self.activation, backend=self.backend)

    def _dense(self) -> Tensor:
        return reference.monarch_to_dense(self.left, self.right)


class BlastLinear(BLRLinear):
    """A linear with a BLAST weight: ``left (b, q, r)``, ``coupling (b, b, r)``,
    ``right (b, r, p)``.
    """

    structure_type = Blast

    coupling: nn.Parameter

    def _linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return blast_linear(
            x,
            self.left,
            self.coupling,
            self.right,
            bias,
            self.activation,
            backend=self.backend,
        )

    def _dense(self) -> Tensor:
        return reference.blast_to_dense(self.left, self.coupling, self.right)


def set_backend_(model: nn.Module, backend: Backend) -> int:
    """Sets the backend of every block low-rank layer in ``model``; returns how many there are.

    Raises:
        TypeError: if ``backend`` is no ``Backend``.
    """
    if not isinstance(backend, Backend):
        raise TypeError(f"backend must be a Backend, got {type(backend).__name__} {backend!r}")
    from blr_kernels.quantize import Int8BlastLinear  # it imports this module

    kinds = (BLRLinear, Int8BlastLinear)
    layers = [module for module in model.modules() if isinstance(module, kinds)]
    for layer in layers:
        layer.backend = backend
    return len(layers)
