"""apply's ``oot``: replacements for one model, or for a part of it (B53); and that no fused op passes a replacement by."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tiny_models import ids, tiny
from torch import Tensor

import opmux
from opmux import CustomOp
from opmux.core.errors import RegistrationError, UsageError
from opmux.ops import ApplyRotaryEmb, Attention, ReplicatedLinear, RMSNorm, SiluAndMul


class OtherNorm(RMSNorm):
    calls = 0

    def forward_oot(self, x: Tensor, residual: Tensor | None = None) -> Any:
        OtherNorm.calls += 1
        return self.forward_native(x, residual)


class OtherSilu(SiluAndMul):
    def forward_oot(self, x: Tensor) -> Tensor:
        return self.forward_native(x)


def classes(report: Any, op: str) -> dict[str, str]:
    return {entry["path"]: entry["class"] for entry in report.entries if entry["op"] == op}


def methods(report: Any, op: str) -> set[str]:
    return {entry["method"] for entry in report.entries if entry["op"] == op}


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def test_b53_one_model_only(model: Any) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(ids()).logits
    mine = opmux.apply(model, oot={"RMSNorm": OtherNorm})
    theirs = opmux.apply(other)
    assert set(classes(mine, "rms_norm").values()) == {"OtherNorm"}
    assert methods(mine, "rms_norm") == {"forward_oot"}
    assert set(classes(theirs, "rms_norm").values()) == {"RMSNorm"}
    assert not CustomOp.op_registry_oot
    OtherNorm.calls = 0
    with torch.no_grad():
        torch.testing.assert_close(model(ids()).logits, expected, atol=1e-5, rtol=1e-5)
    assert OtherNorm.calls == 7  # two norms in each of three layers, and the last one
    with torch.no_grad():
        other(ids())
    assert OtherNorm.calls == 7


def test_b53_one_module_prefix(model: Any) -> None:
    report = opmux.apply(model, oot={"rms_norm": {"model.layers.1": OtherNorm}})
    found = classes(report, "rms_norm")
    assert {path for path, cls in found.items() if cls == "OtherNorm"} == {
        "model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm",
    }  # fmt: skip
    assert len(found) == 7


def test_b53_a_registered_class_is_kept_from_a_model_or_a_part(model: Any) -> None:
    CustomOp.register_oot("RMSNorm")(OtherNorm)
    second = copy.deepcopy(model)
    report = opmux.apply(model, oot={RMSNorm: None})
    assert set(classes(report, "rms_norm").values()) == {"RMSNorm"}
    assert "forward_oot" not in methods(report, "rms_norm")
    report = opmux.apply(second, oot={"RMSNorm": {"model.layers": None, "model.layers.2": OtherNorm}})
    found = classes(report, "rms_norm")
    assert found["model.norm"] == "OtherNorm"
    assert {path.split(".")[2] for path, cls in found.items() if cls == "OtherNorm" and "layers" in path} == {"2"}


def test_a_prefix_is_whole_names_only() -> None:
    from opmux.apply.replacements import Replacements

    places = Replacements({RMSNorm: {"layers.1": OtherNorm, "": None}}, ["", "layers", "layers.1", "layers.11"])
    assert places.at("layers.1.norm") == {RMSNorm: OtherNorm}
    assert places.at("layers.1") == {RMSNorm: OtherNorm}
    assert places.at("layers.11.norm") == {RMSNorm: None}


def test_applying_again(model: Any) -> None:
    first = opmux.apply(model, oot={"RMSNorm": OtherNorm})
    assert opmux.apply(model, oot={RMSNorm: OtherNorm}) is first
    assert set(classes(opmux.apply(model), "rms_norm").values()) == {"RMSNorm"}


def test_copies_keep_their_classes(model: Any) -> None:
    opmux.apply(model, oot={"RMSNorm": OtherNorm})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        OtherNorm.calls = 0
        with torch.no_grad():
            torch.testing.assert_close(twin(ids()).logits, model(ids()).logits)
        assert OtherNorm.calls == 14


def test_directives_still_control_it(model: Any) -> None:
    config = opmux.CompilationConfig(custom_ops="-rms_norm")
    report = opmux.apply(model, config, oot={"RMSNorm": OtherNorm})
    assert methods(report, "rms_norm") == {"forward_native"}


@pytest.mark.parametrize(
    ("oot", "error", "message"),
    [
        ({"RMSNrom": OtherNorm}, RegistrationError, "Did you mean 'RMSNorm'"),
        ({"RMSNorm": OtherSilu}, RegistrationError, "must be a subclass"),
        ({"RMSNorm": "OtherNorm"}, RegistrationError, "takes a class, None for the op's own class"),
        ({"RMSNorm": {"model.layer": OtherNorm}}, UsageError, "names the module 'model.layer'.*'model.layers'"),
    ],
)
def test_what_does_not_fit(model: Any, oot: Any, error: type[Exception], message: str) -> None:
    before = opmux.apply(model)
    with pytest.raises(error, match=message):
        opmux.apply(model, oot=oot)
    assert opmux.apply(model) is before


def test_objects_outlive_the_scope_they_were_built_in() -> None:
    with opmux.oot_scope():
        CustomOp.register_oot("RMSNorm")(OtherNorm)
        op = RMSNorm(4)
    assert op.decision(torch.ones(2, 4)).method == "forward_oot"
    assert type(RMSNorm(4)) is RMSNorm


@pytest.mark.parametrize("target", [SiluAndMul, ReplicatedLinear, ApplyRotaryEmb, Attention])
def test_a_fused_op_does_not_pass_a_replacement_by(model: Any, target: Any) -> None:
    class Vendor(target):
        def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
            return self.forward_native(*args, **kwargs)

    fused = {"linear_silu_and_mul", "rotary_attention"}
    assert set(opmux.apply(model).counts()) >= fused
    CustomOp.register_oot(Vendor, target.__name__)
    report = opmux.apply(model, oot={"RMSNorm": OtherNorm})  # other settings, so that it starts anew
    assert set(classes(report, target.name).values()) == {"test_a_fused_op_does_not_pass_a_replacement_by.<locals>.Vendor"}
    by = "rotary_attention" if target in (ApplyRotaryEmb, Attention) else "linear_silu_and_mul"
    assert by not in report.counts()
