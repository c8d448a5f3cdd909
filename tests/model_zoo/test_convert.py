from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from blr_kernels import Backend, BLRLinear
from blr_kernels.structures import Blast, LowRank, Monarch, Structure
from model_zoo import convert
from model_zoo.convert import Rule, Saving, convert_, plan, replace_linears_
from model_zoo.factorize import Factorization, factorize


def network() -> nn.Module:
    torch.manual_seed(0)
    body = nn.ModuleDict({"up": nn.Linear(12, 24), "down": nn.Linear(24, 12, bias=False)})
    return nn.ModuleDict({"body": body, "odd": nn.Linear(10, 11), "head": nn.Linear(12, 3)})


RULES = [
    Rule("head", None),
    Rule("odd", Monarch(3, 6)),
    Rule(r"body\.d.*", Saving("blast", 0.4, blocks=3), regex=True),
    Rule(r"body\..*", LowRank(4), regex=True),
]


def test_first_matching_rule_holds_and_outputs_follow_the_factors() -> None:
    model = network()
    dense = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    seen: list[tuple[int, int, str]] = []
    report = convert_(model, RULES, backend=Backend.TORCH, progress=lambda *call: seen.append(call))
    assert [layer.name for layer in report.layers] == ["body.up", "body.down", "odd"]
    assert report.skipped == ("head",)
    assert seen == [(0, 3, "body.up"), (1, 3, "body.down"), (2, 3, "odd"), (3, 3, "")]
    assert type(model.get_submodule("head")) is nn.Linear
    for layer in report.layers:
        new, old = model.get_submodule(layer.name), dense[layer.name]
        assert isinstance(new, BLRLinear)
        assert new.structure == layer.structure
        error = (new.to_dense() - old.weight).norm() / old.weight.norm()
        assert layer.relative_error == pytest.approx(error.item(), abs=1e-5)
        x = torch.randn(2, old.in_features)
        expected = x @ new.to_dense().T + (0 if old.bias is None else old.bias)
        torch.testing.assert_close(new(x), expected, atol=1e-5, rtol=1e-5)
    total = sum(p.numel() for p in model.parameters())
    # The whole model's totals count biases and skipped layers as well.
    assert report.parameters_after == total
    assert report.parameters_before == sum(
        p.numel() for m in dense.values() for p in m.parameters()
    )


def test_a_saving_removes_at_least_its_fraction() -> None:
    for kind in ("low_rank", "monarch", "blast"):
        structure = Saving(kind, 0.5).structure(144, 432)
        kept = structure.parameter_count(144, 432) / (144 * 432)
        assert 0.42 < kept <= 0.5
    with pytest.raises(ValueError, match="between 0 and 1"):
        Saving("blast", 1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("blast", "x"), TypeError, "fraction must be a number between 0 and 1, got str 'x'"),
        (("blast", None), TypeError, "got NoneType None"),
        (("blast", True), TypeError, "got bool True"),
        (("blast", float("nan")), ValueError, "fraction must be between 0 and 1, got nan"),
        (("blast", float("inf")), ValueError, "between 0 and 1, got inf"),
        (("blast", -0.5), ValueError, "between 0 and 1, got -0.5"),
        (("blast", 0), ValueError, "between 0 and 1, got 0"),
        (("best", 0.5), ValueError, "kind must be one of low_rank, monarch, blast, got 'best'"),
        (("blast", 0.5, "3"), TypeError, "blocks must be an int, got str '3'"),
        (("blast", 0.5, 0), ValueError, "blocks must be at least 1, got 0"),
        (("low_rank", 0.5, 3), ValueError, "low_rank takes no blocks, got blocks = 3"),
    ],
)
def test_a_saving_that_cannot_be(
    arguments: tuple[object, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Saving(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("(", "missing ), unterminated subpattern"), ("a**", "multiple repeat"), ("[", "character")],
)
def test_a_rule_that_is_no_regular_expression(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match="is no regular expression: ") as caught:
        Rule(pattern, None, regex=True)
    assert repr(pattern) in str(caught.value)
    assert reason in str(caught.value)
    assert Rule(pattern, None).matches(pattern)  # a name may be anything


def test_a_rule_of_other_types_is_refused() -> None:
    with pytest.raises(TypeError, match="pattern must be a str, got int"):
        Rule(3, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="LowRank, Monarch, Blast, Saving or None, got str"):
        Rule("head", "blast")  # type: ignore[arg-type]


def test_factors_come_back_to_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight goes to the other device alone; the sweeps' limit reaches the factorizer."""
    seen = []

    def factorizer(weight: torch.Tensor, structure: Structure, **options: int) -> Factorization:
        seen.append((weight.device.type, options))
        return factorize(torch.ones(weight.shape), structure, **options)

    monkeypatch.setattr(convert, "factorize", factorizer)
    model = network()
    convert_(model, RULES, device="meta", max_iterations=3)
    assert seen == [("meta", {"max_iterations": 3})] * 3
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.gpu
def test_factorizing_on_a_gpu_gives_the_same() -> None:
    there, here = network(), network()
    convert_(there, RULES, device="cuda:0")
    convert_(here, RULES)
    assert {parameter.device.type for parameter in there.parameters()} == {"cpu"}
    for name in ("body.up", "body.down", "odd"):
        torch.testing.assert_close(
            there.get_submodule(name).to_dense(), here.get_submodule(name).to_dense(),
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip


def test_report_prints_and_saves(tmp_path: Path) -> None:
    report = convert_(network(), RULES)
    text = str(report)
    assert "Monarch b3 r6" in text
    assert "12 x 12" in text  # the padded size of the odd layer
    assert "3 layers converted, 1 left as they are" in text
    assert len({len(line) for line in text.splitlines()[:4]}) <= 2
    report.save_json(tmp_path / "report.json")
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved == report.to_dict()
    assert saved["layers"][2]["structure"] == {"kind": "monarch", "blocks": 3, "rank": 6}
    assert (saved["layers"][2]["in_padded"], saved["layers"][2]["out_padded"]) == (12, 12)


def test_mistakes_are_named_before_anything_changes() -> None:
    model = network()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"no rule matches the linear 'body\.up'"):
        convert_(model, [Rule("head", None)])
    with pytest.raises(ValueError, match="rule 'nowhere' matches no linear"):
        convert_(model, [Rule("nowhere", LowRank(2)), Rule(".*", None, regex=True)])
    with pytest.raises(ValueError, match=r"head: .*at least blocks = 4"):
        convert_(model, [Rule("head", Monarch(4, 4)), Rule(".*", LowRank(1), regex=True)])
    assert {name: type(module) for name, module in model.named_modules()} == before
    with pytest.raises(ValueError, match=r"body\.up: low rank needs rank <= min"):
        convert_(model, [Rule("body.up", LowRank(13)), Rule(".*", None, regex=True)])
    with torch.no_grad():
        model.get_submodule("odd").weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="odd: weight must be finite"):
        convert_(model, [Rule("odd", LowRank(2)), Rule(".*", None, regex=True)])


def test_shared_weights_are_refused() -> None:
    model = network()
    twin = nn.Linear(12, 24)
    twin.weight = model.get_submodule("body.up").weight  # type: ignore[assignment]
    model.add_module("twin", twin)
    with pytest.raises(ValueError, match=r"twin shares its weight with body\.up"):
        plan(model, [Rule(".*", LowRank(2), regex=True)])


def test_replacing_on_meta_allocates_nothing() -> None:
    with torch.device("meta"):
        model = network()
    replace_linears_(model, {"body.up": Blast(3, 4), "odd": LowRank(3)})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert tuple(model.get_submodule("body.up").coupling.shape) == (3, 3, 4)
    with pytest.raises(ValueError, match=r"'body\.up' is no linear"):
        replace_linears_(model, {"body.up": LowRank(2)})
