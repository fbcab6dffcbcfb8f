"""Folded scales change nothing in floating point, and bring int8 products nearer to it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, make_model
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from reader_rag.model.fingerprint import quantization_scheme
from reader_rag.model.loading import load_model
from reader_rag.model.quantization.calibration import Calibration, can_fold, texts
from reader_rag.model.quantization.factors import FOLDING, best_factors
from reader_rag.model.quantization.folding import ARCHITECTURES, Architecture, LayerFolding, architecture_of
from reader_rag.model.quantization.gptq import ROUNDING, InputMoments, round_weight
from reader_rag.model.quantization.int8 import quantise_rows, quantise_weight

NAMES = (
    "Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "SmolLM3", "Granite", "Gemma", "Gemma2", "Gemma3Text", "Phi3",
    "Cohere", "Cohere2", "Olmo2", "Olmo3",
)  # fmt: skip
SETTINGS: dict[str, Any] = {"vocab_size": 400}  # the tokenizer's


def model_of(name: str) -> PreTrainedModel:
    """A tiny model whose norms and biases are not what they are by default."""
    model = make_model(name, MODELS[name] | SETTINGS)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.empty_like(parameter).uniform_(-0.3, 0.3, generator=generator)
    return model


def folded(model: PreTrainedModel, foldings: list[LayerFolding]) -> PreTrainedModel:
    """A copy of the model with the factors in its parameters."""
    made = copy.deepcopy(model)
    for layer, folding in zip(made.get_decoder().layers, foldings, strict=True):
        for name, parameter in layer.named_parameters():
            parameter.data = folding.apply(name, parameter)
    return made


def declared(model: PreTrainedModel) -> Architecture:
    found = architecture_of(model.config.model_type, model.get_decoder().layers[0])
    assert found is not None
    return found


def channels(layer: nn.Module, reader: str) -> int:
    return int(layer.get_submodule(reader).in_features)  # type: ignore[arg-type]


def test_every_declared_architecture_is_tested() -> None:
    assert {make_model(name).config.model_type for name in NAMES} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_any_factors_leave_the_outputs_as_they_are(name: str) -> None:
    model = model_of(name).double()
    layers = model.get_decoder().layers
    architecture = declared(model)
    generator = torch.Generator().manual_seed(1)
    foldings = []
    for layer in layers:
        folding = LayerFolding(architecture.norm_offset)
        for fold in architecture.folds:
            factors = torch.empty(channels(layer, fold.readers[0])).uniform_(-2.0, 2.0, generator=generator).exp2()
            folding.add(fold, factors)
        foldings.append(folding)
    changed = folded(model, foldings)
    for fold in architecture.folds:
        for module in (fold.source, *fold.readers):
            before, after = (m.get_decoder().layers[-1].get_submodule(module).weight for m in (model, changed))
            assert not torch.allclose(before.float(), after), module
    ids = torch.randint(3, 96, (1, 40), generator=generator)
    # Folded weights are float32, which is what they are quantised from.
    assert torch.allclose(model.float()(ids).logits, changed.float()(ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["GPT2", "Mixtral", "Qwen3Moe", "StableLm"])
def test_what_is_not_declared_is_not_folded(name: str, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model(name)
    assert not can_fold(model)
    with pytest.raises(ValueError, match="is not known"):
        Calibration(model, tiny_tokenizer)


def test_layers_that_are_not_plain_ones_are_not_folded(tiny_model: LlamaForCausalLM) -> None:
    class Adapted(nn.Linear):
        pass

    model = copy.deepcopy(tiny_model)
    mlp: Any = model.model.layers[0].mlp
    mlp.down_proj = Adapted(mlp.down_proj.in_features, mlp.down_proj.out_features)
    assert not can_fold(model)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_layers_are_calibrated_by_the_models_own_activations(
    name: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model = model_of(name)
    layers = model.get_decoder().layers
    architecture = declared(model)
    seen: dict[nn.Module, list[torch.Tensor]] = {}

    def record(module: nn.Module, args: Any, out: Any = None) -> None:
        value = args[0] if out is None else out[0] if isinstance(out, tuple) else out
        seen.setdefault(module, []).append(value[0])

    linears = [{n: m for n, m in layer.named_modules() if isinstance(m, nn.Linear)} for layer in layers]
    handles = [m.register_forward_pre_hook(record) for of_layer in linears for m in of_layer.values()]
    handles += [layer.register_forward_hook(record) for layer in layers]
    for token_ids in texts(tiny_tokenizer, model.config.max_position_embeddings):
        model(token_ids)
    for handle in handles:
        handle.remove()
    calibration = Calibration(model, tiny_tokenizer)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    normed = {reader for fold in architecture.folds if "norm" in fold.source for reader in fold.readers}
    for index, layer in enumerate(layers):
        folding = calibration.fold_layer(index)
        residual = torch.cat(seen[layer]).square().mean(-1, keepdim=True).sqrt()
        scales = dict(folding._factors)
        assert set(scales) == set(architecture.folds)
        assert all(bool((factors > 0).all()) and bool(factors.isfinite().all()) for factors in scales.values())
        for own, module in linears[index].items():
            rows = torch.cat(seen[module])
            # Residuals are divided by the next norm, so that large ones count less.
            rows = rows if own in normed else rows / residual
            for fold, factors in scales.items():
                rows = rows / factors if own in fold.readers else rows
            expected = rows.double().T @ rows.double()
            found = torch.block_diag(*calibration._moments[own].blocks)
            assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.diagonal().max())), own
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_weights_of_16_bits_are_calibrated_in_float32(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = model_of("Qwen2").bfloat16()
    wide = copy.deepcopy(model).float()
    calibrations = [Calibration(one, tiny_tokenizer) for one in (model, wide)]
    for index, layer in enumerate(wide.model.layers):
        foldings = [one.fold_layer(index) for one in calibrations]
        for name, parameter in layer.named_parameters():
            assert torch.equal(foldings[0].apply(name, parameter), foldings[1].apply(name, parameter)), name
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_layers_are_folded_in_order(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    calibration = Calibration(tiny_model, tiny_tokenizer)
    with pytest.raises(ValueError, match="layer 0 is the next one, not 1"):
        calibration.fold_layer(1)


@torch.no_grad()
def test_parameters_are_read_with_the_factors_of_their_layer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model = model_of("Llama")
    by_name, by_layer = Calibration(model, tiny_tokenizer), Calibration(model, tiny_tokenizer)
    read = {name: by_name.folded(name, parameter) for name, parameter in model.named_parameters()}
    for index, layer in enumerate(model.model.layers):
        folding = by_layer.fold_layer(index)
        for name, parameter in layer.named_parameters():
            assert torch.equal(read[f"model.layers.{index}.{name}"], folding.apply(name, parameter))
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(read[name], model.get_parameter(name))


@pytest.mark.parametrize(("name", "folding"), [("Qwen2", FOLDING), ("StableLm", "")])
def test_loaded_models_have_folded_weights(
    name: str,
    folding: str,
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    original: Any = model_of(name)
    original.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    loaded: Any = load_model(tmp_path / "model", quantization="int8", device="cpu")[0]
    scheme = quantization_scheme(loaded)
    assert scheme is not None
    assert (scheme.folding, scheme.rounding) == (folding, ROUNDING if folding else "")
    calibration = Calibration(original, tiny_tokenizer) if folding else None
    read = calibration.folded if calibration else lambda _, parameter: parameter.detach()
    for part in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"):
        stored = loaded.get_submodule(f"model.layers.0.{part}").quantised
        floats = read(f"model.layers.0.{part}.weight", original.model.layers[0].get_submodule(part).weight)
        weight = round_weight(floats, calibration._moments[part]) if calibration else quantise_weight(floats)
        assert torch.equal(stored.values, weight.values), part
        assert torch.equal(stored.scales, weight.scales), part
    norm = read("model.layers.0.input_layernorm.weight", original.model.layers[0].input_layernorm.weight)
    assert torch.equal(loaded.model.layers[0].input_layernorm.weight, norm)
    ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        expected = original(ids).logits
        assert float((loaded(ids).logits - expected).norm() / expected.norm()) < 0.1


def int8_error(inputs: torch.Tensor, weight: torch.Tensor) -> float:
    rounded = [values.float() * scales[:, None] for values, scales in map(quantise_rows, (inputs, weight))]
    exact = inputs @ weight.T
    return float((rounded[0] @ rounded[1].T - exact).square().sum() / exact.square().sum())


def magnitudes(inputs: torch.Tensor) -> torch.Tensor:
    return inputs.square().mean(0).sqrt()


def test_factors_even_out_channels_that_are_much_larger_than_others() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, weight = torch.randn(300, 64, generator=generator), torch.randn(48, 64, generator=generator)
    inputs[:, 7] *= 100.0
    weight[:, 7] /= 100.0
    factors = best_factors(inputs, magnitudes(inputs), [weight])
    assert factors[7] > 5.0 * factors[8]
    assert int8_error(inputs / factors, weight * factors) < 0.1 * int8_error(inputs, weight)


def test_factors_of_two_limbs_suit_the_weights() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, weight = torch.randn(300, 64, generator=generator), torch.randn(48, 64, generator=generator)
    inputs[:, 7] *= 100.0
    weight[:, 9] *= 30.0

    def error(limbs: int) -> float:
        factors = best_factors(inputs, magnitudes(inputs), [weight], limbs)
        rounded = quantise_weight(weight * factors)
        weights = rounded.values.float() * rounded.scales[:, None] / factors
        return float((inputs @ (weights - weight).T).square().sum())

    assert error(2) < 0.8 * error(1)


def test_channels_that_are_never_used_get_factors_all_the_same() -> None:
    inputs, weight = torch.randn(10, 8), torch.randn(4, 8)
    inputs[:, 2] = 0.0
    weight[:, 3] = 0.0
    factors = best_factors(inputs, magnitudes(inputs), [weight])
    assert bool(factors.isfinite().all())
    assert float(factors.min()) > 0.0
    nothing = best_factors(torch.zeros(10, 8), torch.zeros(8), [torch.zeros(4, 8)])
    assert bool(nothing.isfinite().all())
    assert float(nothing.min()) > 0.0


def test_the_output_head_is_rounded_for_the_models_last_states(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    model: Any = model_of("Llama")
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        for token_ids in texts(tiny_tokenizer, model.config.max_position_embeddings):
            model(token_ids)
    handle.remove()
    moments = InputMoments(32)
    moments.add(torch.cat(seen))
    calibration = Calibration(model, tiny_tokenizer)
    early = calibration.quantised("lm_head.weight", model.lm_head.weight)
    nearest = quantise_weight(model.lm_head.weight.detach())
    assert torch.equal(early.values, nearest.values)  # the layers before it were not run yet
    for index in range(len(calibration.layers)):
        calibration.fold_layer(index)
    head = calibration.quantised("lm_head.weight", model.lm_head.weight)
    assert torch.equal(head.scales, nearest.scales)
    expected = round_weight(model.lm_head.weight, moments).values
    assert float((head.values == expected).float().mean()) > 0.99  # sums are taken in another order
    assert float((head.values == nearest.values).float().mean()) < 0.99
    table = calibration.quantised("model.embed_tokens.weight", model.model.embed_tokens.weight)
    assert torch.equal(table.values, quantise_weight(model.model.embed_tokens.weight.detach()).values)


def test_texts_have_the_models_own_form(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    templated = texts(tiny_tokenizer)
    first = tiny_tokenizer.decode(templated[0][0])
    assert first.startswith(f"{tiny_tokenizer.bos_token}user: Answer the question")
    assert {ids.shape[0] for ids in templated} == {1}
    assert 1000 < sum(ids.shape[1] for ids in templated) <= 8192
    assert [ids.shape[1] for ids in texts(tiny_tokenizer, 50)] == [50] * 28
    plain = copy.deepcopy(tiny_tokenizer)
    plain.chat_template = None
    refusing = copy.deepcopy(tiny_tokenizer)
    refusing.chat_template = "{{ raise_exception('only tools') }}"
    for one in (plain, refusing):
        assert "user:" not in one.decode(texts(one)[0][0])
        assert "Answer the question" in one.decode(texts(one)[0][0])
