"""W8A8 checkpoints of the compressed-tensors format are loaded as they are; others are refused in one line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, make_model

from reader_rag.errors import ConfigError, ModelError, UnsupportedModelError
from reader_rag.model import loading
from reader_rag.model.loading import load_model
from reader_rag.model.quantization.checkpoints import stored_dtype
from reader_rag.model.quantization.modules import HalfEmbedding, HalfLinear, Int8Linear

CONFIG: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None,
                "dynamic": True,
                "num_bits": 8,
                "observer": "memoryless",
                "strategy": "token",
                "symmetric": True,
                "type": "int",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": 1.2,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""As llm-compressor writes it for W8A8."""
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def _no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "_tokenizer", lambda *_: None)  # not needed: nothing is calibrated


def write_checkpoint(folder: Path, *, tied: bool = False, **changes: Any) -> Any:
    """A tiny model as published in W8A8: `weight` int8 and `weight_scale` [features, 1]; returns the float model."""
    model: Any = make_model("Llama", COMMON | {"tie_word_embeddings": tied}).to(torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 127.5
        tensors[name] = torch.clamp(torch.round(weight / scale), -128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG | changes}))
    return model.float()


def int8(folder: Path) -> Any:
    """The model of a folder, in int8 on the CPU."""
    return load_model(folder, quantization="int8", device="cpu")[0]


@pytest.mark.parametrize("tied", [False, True])
def test_weights_and_scales_are_those_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    original = write_checkpoint(tmp_path / "model", tied=tied)
    model = int8(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    linears = [name for name, module in model.named_modules() if isinstance(module, Int8Linear)]
    assert len(linears) == 14
    for name in linears:
        weight = model.get_submodule(name).quantised
        assert torch.equal(weight.values, stored[f"{name}.weight"])
        assert torch.equal(weight.scales, stored[f"{name}.weight_scale"].float().reshape(-1))
    assert min(int(stored[f"{name}.weight"].min()) for name in linears) == -128  # which our own scheme does not use
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected = original(ids).logits
        assert (model(ids).logits - expected).norm() / expected.norm() < 0.1


def test_what_the_checkpoint_ignores_stays_in_16_bits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    model = int8(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert (type(model.lm_head), type(model.model.embed_tokens)) == (HalfLinear, HalfEmbedding)
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert model.lm_head.weight.dtype == torch.bfloat16


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", tied=True)
    model = int8(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_nothing_of_it_is_kept_a_second_time(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    int8(tmp_path / "model")
    assert not (tmp_path / "cache" / "quantized").exists()


def _changed(group: str, field: str, value: Any) -> dict[str, Any]:
    groups = copy.deepcopy(CONFIG["config_groups"])
    groups["group_0"][group][field] = value
    return {"config_groups": groups}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (_changed("weights", "num_bits", 4), "compressed-tensors with num_bits 4 of weights"),
        (_changed("weights", "strategy", "group"), "compressed-tensors with strategy group of weights"),
        (_changed("weights", "symmetric", False), "compressed-tensors with symmetric False of weights"),
        (_changed("weights", "type", "float"), "compressed-tensors with type float of weights"),
        (_changed("input_activations", "dynamic", False), "with dynamic False of input activations"),
        (_changed("input_activations", "symmetric", False), "with symmetric False of input activations"),
        (_changed("input_activations", "strategy", "tensor"), "with strategy tensor of input activations"),
        (
            {"config_groups": {"g": CONFIG["config_groups"]["group_0"] | {"input_activations": None}}},
            "without quantised",
        ),
        ({"format": "pack-quantized"}, "compressed-tensors, format pack-quantized"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "compressed-tensors with transforms"),
        ({"config_groups": {}}, "compressed-tensors without groups"),
    ],
)
def test_other_schemes_are_refused_with_what_is_supported(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write_checkpoint(tmp_path / "model", **changes)
    with pytest.raises(UnsupportedModelError) as refused:
        int8(tmp_path / "model")
    assert reason in str(refused.value)
    assert "symmetric int8 weights per channel and dynamic int8 activations per token" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_quantization_the_package_is_needed_or_int8_is_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reader_rag.model.quantization.checkpoints.find_spec", lambda _: None)
    write_checkpoint(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"has int8 weights .*: load it with quantization='int8'"):
        load_model(tmp_path / "model", device="cpu")


def _without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", [f"{UP}.weight", "model.norm.weight"])
def test_missing_weights_are_an_error(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path / "model")
    _without(tmp_path / "model", name)
    with pytest.raises(ModelError, match=rf"lacks 1 of the model's weights \({name}, ...\)"):
        int8(tmp_path / "model")


def test_int8_weights_without_a_scale_are_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    _without(tmp_path / "model", f"{UP}.weight_scale")
    with pytest.raises(ModelError, match=rf"{UP}.weight is torch.int8 .* do not belong to this config.json"):
        int8(tmp_path / "model")


def test_weights_of_another_shape_are_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"][:8].clone()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{UP}.weight is torch.int8 \(8, 32\), which does not fit the model's"):
        int8(tmp_path / "model")


def test_the_stored_type_is_that_of_most_weights(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(9, dtype=torch.float16), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert stored_dtype(tmp_path) == torch.float16
    (tmp_path / "model.safetensors").unlink()
    assert stored_dtype(tmp_path) == "auto"
