"""Quantised weights, adapters, heads, large vocabularies and padded batches: the answers are those of `generate`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from costs_stub import EverythingPays
from products import neighbours_change_bits, place_changes_bits
from tiny_models import COMMON, generated, make_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from reader_rag.bench.generate.random_weights import NoText
from reader_rag.config import DraftConfig, Exactness, Forward, SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Generation, Prompt
from reader_rag.errors import PromptError, UnsupportedModelError
from reader_rag.model.compiled.forward import CpuForward
from reader_rag.model.fixed_shape import FixedShape

TOKENS = 48
PROMPTS = [[3 + 7 * k % 11 for k in range(length)] for length in (10, 60)]


def make_engine(model: PreTrainedModel, forward: Forward = "auto", exactness: Exactness = "fast") -> Engine:
    engine = Engine(
        model,
        NoText(),  # type: ignore[arg-type]
        draft=DraftConfig(max_nodes=16),
        forward=forward,
        exactness=exactness,
    )
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return engine


def answer(engine: Engine, prompt: list[int], **options: Any) -> Generation:
    return engine.generate(Prompt(prompt), SamplingParams(max_tokens=TOKENS, **options))


def answers_are_those_of_generate(engine: Engine, model: Any) -> bool:
    """Whether drafted and plain answers are `generate`'s, and some drafts were accepted and some not."""
    accepted = drafted = 0
    for prompt in PROMPTS:
        expected = generated(model, prompt, TOKENS)
        result = answer(engine, prompt)
        if not expected == result.token_ids == answer(engine, prompt, speculate=False).token_ids:
            return False
        accepted, drafted = accepted + result.stats.accepted, drafted + result.stats.drafted
    return 10 < accepted < drafted


# Quantised


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without the note that bitsandbytes makes at every product."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def quantised(folder: Path, **settings: Any) -> PreTrainedModel:
    """A Llama whose linear layers are held in a few bits, its activations in float32."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    make_model("Llama", COMMON | {"hidden_size": 64, "intermediate_size": 128}).save_pretrained(folder)
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**settings), dtype=torch.float32, device_map="cpu"
    ).eval()
    made.generation_config.eos_token_id = None
    return made


@pytest.mark.parametrize("kind", ["fp4", "nf4"])
def test_weights_of_4_bits(kind: str, tmp_path: Path) -> None:
    model = quantised(tmp_path, load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=torch.float32)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    engine = make_engine(model)
    assert engine.target.cpu is None
    assert engine.drafting == "tree"
    assert answers_are_those_of_generate(engine, model)


def check_strict(model: PreTrainedModel) -> None:
    """Drafted and plain answers agree to the last bit; where this machine's products cannot, `strict` is refused."""
    mlp = model.model.layers[0].mlp
    width = FixedShape.of(model, None).width
    layers = [(mlp.up_proj, mlp.up_proj.in_features), (mlp.down_proj, mlp.down_proj.in_features)]
    changed = [neighbours_change_bits(layer, inputs, width) for layer, inputs in layers]
    if any(changed) or place_changes_bits(torch.float32, width):
        with pytest.raises(UnsupportedModelError, match="depending on its neighbours"):
            make_engine(model, exactness="strict")
        return
    engine = make_engine(model, exactness="strict")
    accepted = 0
    for prompt in PROMPTS:
        drafted, plain = (answer(engine, prompt, record_margins=True, speculate=way) for way in (True, False))
        assert (drafted.token_ids, drafted.margins) == (plain.token_ids, plain.margins)
        accepted += drafted.stats.accepted
    assert accepted > 0


def test_strict_on_weights_of_4_bits(tmp_path: Path) -> None:
    check_strict(quantised(tmp_path, load_in_4bit=True))


@pytest.mark.usefixtures("quiet")
def test_weights_of_8_bits(tmp_path: Path) -> None:
    model = quantised(tmp_path, load_in_8bit=True, llm_int8_threshold=0.0)
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    engine = make_engine(model)
    assert engine.target.cpu is None
    assert engine.drafting == "tree"
    assert answers_are_those_of_generate(engine, model)
    check_strict(model)


@pytest.mark.usefixtures("quiet")
def test_weights_of_8_bits_with_outliers_of_the_whole_pass(tmp_path: Path) -> None:
    """By default a column is left in 16 bits if any row of the pass is large there: rows depend on their neighbours."""
    model = quantised(tmp_path, load_in_8bit=True)
    engine = make_engine(model)
    assert engine.drafting == "tree"
    check_strict(model)
    for prompt in PROMPTS:
        assert answer(engine, prompt, speculate=False).token_ids == generated(model, prompt, TOKENS)
        drafted, plain = (answer(engine, prompt, record_margins=True, speculate=way) for way in (True, False))
        assert drafted.stats.accepted > 0
        pairs = zip(drafted.token_ids, plain.token_ids, plain.margins, strict=True)
        parting = next((margin for one, other, margin in pairs if one != other), 0.0)
        assert parting < 0.1  # a near tie: the logits themselves lie several apart


# Adapters


def adapted(model: PreTrainedModel, config: Any) -> Any:
    """The model with an adapter whose weights are random, so that it matters."""
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return peft.get_peft_model(model, config).eval()


def lora(*modules: str) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, lora_alpha=16, target_modules=list(modules), init_lora_weights=False)


@pytest.mark.parametrize("forward", ["auto", "torch"])
@pytest.mark.parametrize("part", ["q_proj", "o_proj", "down_proj", "lm_head", "embed_tokens"])
def test_an_adapter_in_any_part_counts(part: str, forward: Forward) -> None:
    without = generated(make_model("Llama"), PROMPTS[1], TOKENS)
    model = adapted(make_model("Llama"), lora(part))
    engine = make_engine(model, forward)
    assert engine.target.cpu is None
    assert engine.drafting == "tree"
    assert answers_are_those_of_generate(engine, model)
    assert answer(engine, PROMPTS[1]).token_ids != without


def test_an_adapter_of_the_norms_counts() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"])
    model = adapted(make_model("Llama"), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "ln_tuning_layers" in name:
                weight.mul_(torch.linspace(-2, 2, len(weight)))
    engine = make_engine(model)
    assert engine.target.cpu is None
    assert answers_are_those_of_generate(engine, model)
    assert answer(engine, PROMPTS[1]).token_ids != generated(make_model("Llama"), PROMPTS[1], TOKENS)


def test_a_merged_adapter_runs_in_compiled_loops() -> None:
    model = adapted(make_model("Llama"), lora("q_proj", "v_proj", "up_proj"))
    expected = generated(model, PROMPTS[1], TOKENS)
    merged = model.merge_and_unload()
    engine = make_engine(merged)
    assert engine.target.cpu is not None
    assert answers_are_those_of_generate(engine, merged)
    assert answer(engine, PROMPTS[1]).token_ids == expected
    assert expected != generated(make_model("Llama"), PROMPTS[1], TOKENS)


def test_an_adapter_that_was_put_into_the_model_itself_counts() -> None:
    pytest.importorskip("peft")
    model = make_model("Llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model.add_adapter(lora("v_proj", "up_proj"))
    engine = make_engine(model.eval())
    assert engine.target.cpu is None
    assert answers_are_those_of_generate(engine, model)


def test_adapters_that_put_tokens_before_the_prompt_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = adapted(make_model("Llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(UnsupportedModelError, match="put tokens of their own before the prompt"):
        make_engine(model)


def test_a_part_of_another_library_is_never_read_as_weights() -> None:
    class Scaled(torch.nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * 0.5

    model = make_model("Llama")
    assert CpuForward.of(model) is not None
    scaled = Scaled(*model.model.embed_tokens.weight.shape)
    scaled.load_state_dict(model.model.embed_tokens.state_dict())
    model.model.embed_tokens = scaled
    assert CpuForward.of(model) is None
    assert answers_are_those_of_generate(make_engine(model), model)


# Heads and vocabularies


@pytest.mark.parametrize("forward", ["auto", "torch"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tied: bool, forward: Forward) -> None:
    model = make_model("Llama", COMMON | {"tie_word_embeddings": tied, "num_hidden_layers": 4})
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    engine = make_engine(model, forward)
    assert (engine.target.cpu is not None) == (forward == "auto")
    assert answers_are_those_of_generate(engine, model)


@pytest.mark.parametrize("forward", ["auto", "torch"])
def test_token_ids_beyond_16_bits_are_drafted_and_accepted(forward: Forward) -> None:
    vocabulary, first = 65_536 + 97, 65_536
    model = make_model("Llama", COMMON | {"vocab_size": vocabulary, "hidden_size": 16})
    with torch.no_grad():  # the others have a logit of 0, and one of 97 is above that
        model.lm_head.weight[:first] = 0
    engine = make_engine(model, forward)
    prompt = [first + token for token in PROMPTS[1]]
    expected = generated(model, prompt, TOKENS)
    assert min(expected) >= first
    for _ in range(2):  # the second answer is drafted from what the model said in the first
        result = answer(engine, prompt)
        assert result.token_ids == expected
    assert result.stats.accepted > 20
    assert answer(engine, prompt, speculate=False).token_ids == expected


# Padded batches


def test_prompts_of_a_padded_batch_have_the_answers_that_the_batch_has(tiny_tokenizer: Any, tiny_model: Any) -> None:
    engine = Engine(tiny_model, tiny_tokenizer)
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    texts = ["the cat and the dog and the cat", "in", "a the of\n" * 6]
    batch = tiny_tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    assert (batch["attention_mask"][:2, 0] == 0).all()
    with torch.inference_mode():
        rows = tiny_model.generate(**batch, max_new_tokens=30, do_sample=False)
    prompts = Prompt.unpadded(batch["input_ids"], batch["attention_mask"])
    assert [prompt.token_ids for prompt in prompts] == [engine.encode(text).token_ids for text in texts]
    for prompt, row in zip(prompts, rows[:, batch["input_ids"].shape[1] :].tolist(), strict=True):
        ends = [k for k, token in enumerate(row) if token in engine.eos_ids]
        expected = row[: ends[0] + 1] if ends else row
        assert list(engine.generate(prompt, SamplingParams(max_tokens=30)).token_ids) == expected


def test_padding_is_taken_off_either_side() -> None:
    prompts = Prompt.unpadded([[0, 0, 5, 6], [7, 8, 9, 0]], [[0, 0, 1, 1], [1, 1, 1, 0]])
    assert [prompt.token_ids for prompt in prompts] == [(5, 6), (7, 8, 9)]


@pytest.mark.parametrize(("ids", "mask"), [([[1, 2]], [[1]]), ([1, 2], [1, 1])])
def test_what_is_no_padded_batch_is_refused(ids: Any, mask: Any) -> None:
    with pytest.raises(PromptError, match="must have one shape"):
        Prompt.unpadded(ids, mask)
