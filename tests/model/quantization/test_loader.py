"""Loading models in int8: which part has which form, from which files, and that what comes out decodes."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import COMMON, EXPERTS, MODELS, make_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from reader_rag.config import EngineConfig, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError, ModelError, ReaderWarning
from reader_rag.model.fingerprint import dtype_name, model_fingerprint, quantization_name, quantization_scheme
from reader_rag.model.loading import load_model
from reader_rag.model.quantization.int8 import quantise_weight
from reader_rag.model.quantization.loader import load_int8
from reader_rag.model.quantization.modules import Int8Embedding, Int8Linear
from reader_rag.model.target import Target

TIED: dict[str, Any] = COMMON | {"tie_word_embeddings": True}
LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LAYER += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))


def saved(folder: Path, name: str = "Llama", settings: dict[str, Any] | None = None, **options: Any) -> PreTrainedModel:
    """A tiny model, written to a folder."""
    model = make_model(name, settings)
    model.save_pretrained(folder, **options)
    return model


def int8(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model of a folder, in int8 on the CPU."""
    return load_int8(folder, dtype, torch.device("cpu"))


@torch.inference_mode()
def difference(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Relative difference of two models' logits."""
    ids = torch.arange(3, 40)[None]
    expected = other(ids).logits
    return float((model(ids).logits - expected).norm() / expected.norm())


def test_linear_layers_are_int8_and_norms_float32(tmp_path: Path) -> None:
    original = saved(tmp_path / "model")
    model = int8(tmp_path / "model")
    for index, layer in enumerate(model.model.layers):
        for name in LAYER:
            assert type(layer.get_submodule(name)) is Int8Linear
        assert layer.input_layernorm.weight.dtype == torch.float32
        torch.testing.assert_close(layer.post_attention_layernorm.weight, torch.ones(32))
        assert layer.self_attn.o_proj.in_features == original.config.hidden_size, index
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_weights_are_those_of_the_model_rounded(tmp_path: Path) -> None:
    original: Any = saved(tmp_path / "model")
    stored = int8(tmp_path / "model").model.layers[1].mlp.down_proj.quantised
    expected = quantise_weight(original.model.layers[1].mlp.down_proj.weight.detach())
    assert torch.equal(stored.values, expected.values)
    assert torch.equal(stored.scales, expected.scales)


def test_a_tied_embedding_is_one_int8_matrix(tmp_path: Path) -> None:
    original: Any = saved(tmp_path / "model", settings=TIED)
    model = int8(tmp_path / "model")
    weight = quantise_weight(original.lm_head.weight.detach())
    lookup, head = model.model.embed_tokens, model.lm_head
    assert (type(lookup), type(head)) == (Int8Embedding, Int8Linear)
    assert torch.equal(head.quantised.values, weight.values)
    assert lookup.table is head
    assert torch.equal(lookup(torch.tensor([[5, 0]]))[0, 0], weight.values[5].float() * weight.scales[5])


def test_an_untied_embedding_is_an_int8_matrix_of_its_own(tmp_path: Path) -> None:
    original: Any = saved(tmp_path / "model")
    model = int8(tmp_path / "model")
    weight = quantise_weight(original.model.embed_tokens.weight.detach())
    assert model.model.embed_tokens.table is not model.lm_head
    assert torch.equal(model.model.embed_tokens.table.quantised.values, weight.values)


def test_head_queries_keys_values_and_down_projection_multiply_activations_of_two_limbs(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    model = int8(tmp_path / "model")
    layer = model.model.layers[0]
    assert [layer.get_submodule(name).limbs for name in LAYER] == [2, 2, 2, 1, 1, 1, 2]
    assert model.lm_head.limbs == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_keys_and_values_of_the_compiled_loops_have_the_type_that_was_asked_for(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    saved(tmp_path / "model")
    model = int8(tmp_path / "model", dtype)
    assert dtype_name(model) == str(dtype).removeprefix("torch.")
    assert Target(model).new_cache(1, 1).arrays[0][0].dtype.itemsize == dtype.itemsize


@pytest.mark.parametrize(
    "name", ["Qwen2", "Gemma", "Gemma3Text", "Phi3", "OPT", "GPTBigCode", "GPTNeoX", "Bloom", "Mamba"]
)
def test_a_model_of_any_family_gives_nearly_its_own_logits(tmp_path: Path, name: str) -> None:
    original = saved(tmp_path / "model", name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReaderWarning)
        assert difference(int8(tmp_path / "model"), original) < 0.1


def test_experts_of_one_tensor_stay_in_16_bits_and_a_warning_tells_the_share(tmp_path: Path) -> None:
    original = saved(tmp_path / "model", "Mixtral", COMMON | EXPERTS | {"num_local_experts": 4})
    with pytest.warns(ReaderWarning, match=r"25% of the parameters are int8; experts .* stay in 16 bits"):
        model = int8(tmp_path / "model")
    assert model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
    assert difference(model, original) < 0.1


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "model", "GPT2")
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers that can be quantised: leave out"):
        int8(tmp_path / "model")


def _split(folder: Path) -> None:
    model = make_model("Llama")
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def _bin(folder: Path) -> None:
    model = make_model("Llama")
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def _without_prefix(folder: Path) -> None:
    """As a base model is saved, with the head beside it."""
    saved(folder)
    tensors = {name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("write", [_split, _bin, _without_prefix])
def test_the_same_weights_come_from_other_files(tmp_path: Path, write: Any) -> None:
    saved(tmp_path / "model")
    (tmp_path / "other").mkdir()
    write(tmp_path / "other")
    assert difference(int8(tmp_path / "other"), int8(tmp_path / "model")) == 0.0


def test_a_16_bit_checkpoint_whose_configuration_names_another_type_is_read_as_it_is(tmp_path: Path) -> None:
    make_model("Llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    original = saved(tmp_path / "float32")
    shutil.copy(tmp_path / "float32" / "config.json", tmp_path / "model" / "config.json")
    assert difference(int8(tmp_path / "model"), original) < 0.1


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the model's weights \(model.layers.1.mlp.up_proj.weight, ...\)"):
        int8(tmp_path / "model")


def test_tokens_that_end_an_answer_are_those_of_the_generation_config(tmp_path: Path) -> None:
    model = make_model("Llama")
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path / "model")
    assert int8(tmp_path / "model").generation_config.eos_token_id == [2, 7]


@pytest.fixture
def folder(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model folder with a tokenizer, whose model answers with many different tokens."""
    settings = MODELS["Llama"] | {"vocab_size": len(tiny_tokenizer)}
    saved(tmp_path / "model", settings=settings)
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_an_engine_is_loaded_in_int8_and_drafts_trees(folder: Path) -> None:
    engine = Engine.load(str(folder), quantization="int8", device="cpu")
    assert quantization_name(engine.model) == "int8"
    assert engine.drafting == "tree"
    prompt = engine.encode("the theory of the other")
    assert len(engine.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True)).token_ids) == 24


def test_every_scheme_has_a_fingerprint_of_its_own(folder: Path) -> None:
    keys = {
        model_fingerprint(load_model(folder, dtype=dtype, quantization=quantization, device="cpu")[0])  # type: ignore[arg-type]
        for dtype in ("float32", "bfloat16")
        for quantization in ("none", "int8")
    }
    assert len(keys) == 4


def test_auto_is_16_bits_for_what_is_not_quantised(folder: Path) -> None:
    model, _ = load_model(folder, quantization="int8", device="cpu")
    assert dtype_name(model) == "bfloat16"
    assert quantization_scheme(load_model(folder, device="cpu")[0]) is None


def test_a_model_object_is_not_quantised(folder: Path) -> None:
    model, tokenizer = load_model(folder, device="cpu")
    with pytest.raises(ConfigError, match=r"quantization is decided when a model is loaded: give it to Engine.load"):
        Engine(model, tokenizer, EngineConfig(), quantization="int8")
