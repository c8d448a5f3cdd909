"""Layers with the same input, computed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blr_kernels.nn import BLRLinear
from blr_kernels.ops import blast_linear_grouped, low_rank_linear_grouped, monarch_linear_grouped

_LINEAR: dict[str, Callable[..., Tensor]] = {
    "blast": blast_linear_grouped,
    "low_rank": low_rank_linear_grouped,
    "monarch": monarch_linear_grouped,
}
"""The grouped op of each kind of structure."""


class BLRGroup(nn.Module):
    """Runs ``g`` layers of one structure and equal sizes on one input as if they were one.

    The layers stay where they are in their model and keep their parameters, under the same names:
    each parameter becomes a view of a tensor that holds those of all layers, so that no memory is
    paid twice and state dicts, optimizers and ``load_state_dict`` work as before. The group itself
    has no parameters, and it does not register the layers.

    What puts other memory behind a parameter (``model.to(...)``, ``load_state_dict(assign=True)``)
    ends that. The next call notices and stacks them again, at the cost of a copy. A compiled call
    notices only where the group is a part of the model that was moved: otherwise call ``stack_``.
    """

    def __init__(self, layers: Sequence[BLRLinear]) -> None:
        """Stacks the parameters of ``layers``.

        Raises:
            TypeError: for a layer that is no ``BLRLinear``.
            ValueError: for no layers, one layer given twice, or layers that differ in sizes,
                structure, bias, activation, dtype or device; the text names both.
        """
        super().__init__()
        # A tuple, so that the layers do not become children and appear twice in a state dict.
        self._layers = tuple(layers)
        self._stacked: dict[str, Tensor] | None = None
        if not self._layers:
            raise ValueError("layers must hold at least one layer, got none")
        if len({id(layer) for layer in self._layers}) < len(self._layers):
            raise ValueError("layers must differ, got one of them twice")
        self._check()
        self.stack_()

    @property
    def layers(self) -> tuple[BLRLinear, ...]:
        """The layers, in the order of the outputs."""
        return self._layers

    def stack_(self) -> None:
        """Makes every layer's parameters views of one tensor, copying what is none yet.

        Raises:
            ValueError: if the layers differ in dtype or device by now.
        """
        self._check()
        stacked = {}
        with torch.no_grad():
            for name in self._names():
                parameters = [getattr(layer, name) for layer in self._layers]
                first = parameters[0]
                together = first.new_empty((len(parameters), *first.shape))
                for part, parameter in zip(together, parameters, strict=True):
                    part.copy_(parameter)
                    parameter.data = part
                stacked[name] = together
        self._stacked = stacked

    def is_stacked(self) -> bool:
        """Whether every parameter still is a view of the group's memory."""
        stacked = self._stacked
        return stacked is not None and all(
            parameter.data_ptr() == part.data_ptr()
            and parameter.dtype == part.dtype
            and parameter.device == part.device
            and parameter.stride() == part.stride()
            for name, together in stacked.items()
            for part, parameter in zip(
                together.unbind(), (getattr(layer, name) for layer in self._layers), strict=True
            )
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """``x (..., in_features)`` -> for each layer its ``(..., out_features)``, as views of one
        tensor.
        """
        first = self._layers[0]
        factors = self._factors()
        bias = factors.pop("bias", None)
        padded = (first.in_padded, first.out_padded) != (first.in_features, first.out_features)
        if padded:
            if x.dim() < 1 or x.shape[-1] != first.in_features:
                raise ValueError(
                    f"x must have shape (..., {first.in_features}), got {tuple(x.shape)}"
                )
            x = F.pad(x, (0, first.in_padded - first.in_features))
            if bias is not None:
                bias = F.pad(bias, (0, first.out_padded - first.out_features))
        y = _LINEAR[first.structure.kind](
            x, **factors, bias=bias, activation=first.activation, backend=self._backend()
        )
        return (y[..., : first.out_features] if padded else y).unbind()

    def __getstate__(self) -> dict[str, Any]:
        """A copy stacks its own parameters: those of the original are not views of its storage."""
        return {**self.__dict__, "_stacked": None}

    def extra_repr(self) -> str:
        """How many layers there are and what each is."""
        return f"{len(self._layers)} x [{self._layers[0].extra_repr()}]"

    def _factors(self) -> dict[str, Tensor]:
        """The stacked factors and bias; copies in a graph of gradients, where each parameter
        needs its own.
        """
        names = self._names()
        if torch.is_grad_enabled() and any(
            getattr(layer, name).requires_grad for name in names for layer in self._layers
        ):
            return {
                name: torch.stack([getattr(layer, name) for layer in self._layers])
                for name in names
            }
        # A compiler cannot follow pointers.
        if self._stacked is None or not (torch.compiler.is_compiling() or self.is_stacked()):
            self.stack_()
        assert self._stacked is not None
        return dict(self._stacked)

    def _names(self) -> tuple[str, ...]:
        first = self._layers[0]
        return (*first.factor_names, *(("bias",) if first.bias is not None else ()))

    def _backend(self) -> Any:
        backend = self._layers[0].backend
        for layer in self._layers:
            if layer.backend is not backend:
                raise ValueError(f"layers must have one backend, got {backend} and {layer.backend}")
        return backend

    def _check(self) -> None:
        for layer in self._layers:
            if not isinstance(layer, BLRLinear):
                raise TypeError(f"layers must be BLRLinear, got {type(layer).__name__}")
        first = _traits(self._layers[0])
        for layer in self._layers[1:]:
            for what, value in _traits(layer).items():
                if value != first[what]:
                    raise ValueError(
                        f"layers must have the same {what}, got {first[what]} and {value}"
                    )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> BLRGroup:
        # The layers are being moved with the model that holds both; the old memory is of no use.
        self._stacked = None
        return super()._apply(fn, recurse)


def _traits(layer: BLRLinear) -> dict[str, object]:
    return {
        "sizes": (layer.in_features, layer.out_features),
        "structure": layer.structure,
        "bias": layer.bias is not None,
        "activation": layer.activation,
        "dtype": layer.left.dtype,
        "device": layer.left.device,
    }
