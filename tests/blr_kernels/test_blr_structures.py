"""Shapes, sizes and costs on known numbers, and the text and dict forms."""

from __future__ import annotations

import math

import pytest

from blr_kernels.roofline import H200_BF16, Device, layer_cost
from blr_kernels.structures import (
    Blast,
    LowRank,
    Monarch,
    Structure,
    structure_from_dict,
    structure_with_budget,
)

STRUCTURES: list[Structure] = [LowRank(8), Monarch(4, 8), Blast(3, 8)]


def test_shapes() -> None:
    assert LowRank(8).parameter_shapes(12, 20) == {"left": (20, 8), "right": (8, 12)}
    assert Monarch(4, 8).parameter_shapes(12, 20) == {"left": (4, 5, 8), "right": (4, 8, 3)}
    assert Blast(2, 8).parameter_shapes(12, 20) == {
        "left": (2, 10, 8),
        "coupling": (2, 2, 8),
        "right": (2, 8, 6),
    }


def test_padding() -> None:
    assert LowRank(8).padded(13, 22) == (13, 22)
    assert Monarch(4, 8).padded(13, 20) == (16, 20)
    assert Blast(9, 8).padded(18, 22) == (18, 27)
    assert Blast(9, 8).parameter_shapes(18, 22)["left"] == (9, 3, 8)


def test_counts_of_the_papers_layers() -> None:
    """DiT-XL/2's qkv and ViT-B's fc1: parameters by hand."""
    qkv = Blast(9, 384)
    assert qkv.parameter_count(1152, 3456) == 384 * (1152 + 3456 + 81) == 1_800_576
    assert qkv.flops(1152, 3456, 512) == 2 * 1_800_576 * 512
    assert qkv.weight_bytes(1152, 3456, 2) == 3_601_152
    assert Monarch(4, 128).parameter_count(768, 3072) == 128 * (768 + 3072)
    assert LowRank(128).parameter_count(768, 3072) == 128 * (768 + 3072)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_dict_round_trip(structure: Structure) -> None:
    assert structure_from_dict(structure.to_dict()) == structure


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "butterfly", "rank": 4}, "one of low_rank, monarch, blast, got 'butterfly'"),
        ({"rank": 4}, "got None"),
        ({"kind": "blast", "rank": 4}, r"keys \['blocks', 'kind', 'rank'\], got"),
        ({"kind": "low_rank", "rank": 4, "blocks": 2}, r"keys \['kind', 'rank'\], got"),
        ({"kind": "monarch", "rank": 5, "blocks": 2}, "multiple of blocks = 2, got 5"),
    ],
)
def test_dict_that_is_wrong(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        structure_from_dict(data)


def test_dict_with_a_size_that_is_no_int() -> None:
    with pytest.raises(TypeError, match="rank must be an int, got str '4'"):
        structure_from_dict({"kind": "low_rank", "rank": "4"})


def test_text() -> None:
    assert str(Blast(9, 384)) == "BLAST b9 r384"
    assert str(Monarch(4, 128)) == "Monarch b4 r128"
    assert str(LowRank(128)) == "low rank r128"


@pytest.mark.parametrize("kind", ["low_rank", "monarch", "blast"])
@pytest.mark.parametrize("budget", [2500, 5000, 31104])
def test_budget_is_used_to_the_last_rank(kind: str, budget: int) -> None:
    structure = structure_with_budget(kind, 144, 432, budget)
    assert structure.kind == kind
    assert structure.parameter_count(144, 432) <= budget
    step = structure.blocks if isinstance(structure, Monarch) else 1
    more = (
        LowRank(structure.rank + step)
        if isinstance(structure, LowRank)
        else type(structure)(structure.blocks, structure.rank + step)
    )
    assert more.parameter_count(144, 432) > budget


def test_budget_of_half_a_layer() -> None:
    assert structure_with_budget("low_rank", 144, 432, 144 * 432 // 2) == LowRank(54)
    assert structure_with_budget("monarch", 144, 432, 144 * 432 // 2, blocks=4) == Monarch(4, 52)
    assert structure_with_budget("blast", 144, 432, 144 * 432 // 2, blocks=3) == Blast(3, 53)


def test_low_rank_budget_stops_at_full_rank() -> None:
    assert structure_with_budget("low_rank", 10, 20, 10_000) == LowRank(10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tucker", 10, 20, 100), "got 'tucker'"),
        (("low_rank", 10, 20, 29), "at least 30 parameters, got a budget of 29"),
        (("low_rank", 10, 20, 100, 2), "takes no blocks, got blocks = 2"),
        (("blast", 10, 20, 100, 11), "at least blocks = 11, got 10"),
        (("blast", 10, 20, 0), "parameters must be at least 1, got 0"),
    ],
)
def test_budget_that_cannot_be_met(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        structure_with_budget(*arguments)  # type: ignore[arg-type]


MICROSECONDS = [
    # in, out, tokens, structure, bound: worked out by hand from the H200's two ceilings
    (1152, 3456, 512, None, 5.2),
    (1152, 3456, 16384, None, 165),
    (1152, 4608, 4096, None, 55.1),
    (1152, 6912, 2, None, 3.7),
    (768, 2304, 6304, None, 28.2),
    (1152, 3456, 512, Blast(9, 384), 2.3),
    (1152, 3456, 4096, Blast(9, 384), 18.4),
    (1152, 4608, 16384, Blast(9, 256), 61),
    (1152, 6912, 2, Blast(9, 256), 1.0),
    (768, 3072, 197, Blast(3, 128), 0.6),
    (768, 2304, 6304, Monarch(4, 128), 9.2),
    (768, 3072, 6304, Monarch(4, 128), 11.5),
]


@pytest.mark.parametrize(("n_in", "n_out", "tokens", "structure", "bound"), MICROSECONDS)
def test_roofline(
    n_in: int, n_out: int, tokens: int, structure: Structure | None, bound: float
) -> None:
    cost = layer_cost(n_in, n_out, tokens, 2, structure)
    digits = 0 if bound >= 60 else 1
    assert round(cost.seconds(H200_BF16) * 1e6, digits) == pytest.approx(bound, abs=0.11)


def test_roofline_counts() -> None:
    cost = layer_cost(6, 10, 4, 2, Blast(2, 3), bias=True)
    assert cost.bytes == 2 * (3 * (6 + 10 + 4) + 4 * (6 + 10) + 10)
    assert cost.flops == 2 * 4 * 3 * (6 + 10)
    device = Device("one", bytes_per_s=1.0, flops_per_s=1.0)
    assert cost.seconds(device) == max(cost.bytes, cost.flops)
    assert cost.limit(device) == "compute"
    assert cost.limit(Device("slow memory", 1e-3, 1.0)) == "memory"
    assert layer_cost(6, 10, 0, 2).flops == 0
    assert math.isclose(layer_cost(6, 10, 1, 4).bytes, 4 * (60 + 16))


def test_roofline_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        layer_cost(6, 10, -1, 2)
    with pytest.raises(ValueError, match="itemsize must be at least 1, got 0"):
        layer_cost(6, 10, 1, 0)
    with pytest.raises(ValueError, match="bytes_per_s must be above 0, got 0"):
        Device("none", 0, 1)
