"""`reader-rag verify --against`: what is measured, on which answers, and what a person reads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from costs_stub import EverythingPays
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from reader_rag.bench.verify.against import ComparedPrompt, Comparison, Divergence, compare, kl_divergence, show
from reader_rag.cli.main import app
from reader_rag.config import SamplingParams
from reader_rag.engine.engine import Engine
from reader_rag.errors import ConfigError

TEXTS = ("the cat and the dog and the cat and the", "in the of the and", "to be or not to be or not to")
TOKENS = 16
SETTINGS = SamplingParams(max_tokens=TOKENS)


def engine_of(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Engine:
    made = Engine(model, tokenizer)
    made.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return made


@pytest.fixture(scope="module")
def reference(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Engine:
    return engine_of(tiny_model, tiny_tokenizer)


@pytest.fixture(scope="module")
def noisy_model(tiny_model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with noise in its weights, enough to change some answers."""
    model = copy.deepcopy(tiny_model)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def asked(reference: Engine) -> list[ComparedPrompt]:
    return [ComparedPrompt(f"p{n}", "ab"[n % 2], reference.encode(text)) for n, text in enumerate(TEXTS)]


@torch.no_grad()
def expected(model: Any, other: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Divergence:
    """The divergence by the models' own forward over the whole text."""
    ids = torch.tensor([[*prompt, *answer]])
    ours, theirs = (m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in (model, other))
    agreed = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
    total = float((theirs.exp() * (theirs - ours)).sum())
    return Divergence(1, len(answer), agreed, total, [] if agreed == len(answer) else ["different"])


def test_a_model_does_not_diverge_from_itself(reference: Engine, asked: list[ComparedPrompt]) -> None:
    said: list[str] = []
    outcome = compare(reference, reference, asked, TOKENS, said.append)
    assert list(outcome.categories) == ["a", "b"]
    everything = outcome.overall
    assert (everything.answers, everything.agreement, everything.mean_kl, everything.different) == (3, 1.0, 0.0, [])
    assert everything.tokens == everything.agreed > 3
    assert said == ["1/3 p0", "2/3 p1", "3/3 p2"]


def test_figures_are_those_of_the_models_own_passes_over_the_reference_answers(
    reference: Engine,
    asked: list[ComparedPrompt],
    tiny_model: LlamaForCausalLM,
    noisy_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    outcome = compare(engine_of(noisy_model, tiny_tokenizer), reference, asked, TOKENS)
    wanted: dict[str, Divergence] = {}
    different = []
    for task in asked:
        answer = tuple(reference.generate(task.prompt, SETTINGS).token_ids)
        one = expected(noisy_model, tiny_model, tuple(task.prompt.token_ids), answer)
        different += [task.id] if one.different else []
        wanted.setdefault(task.category, Divergence()).add(one)
    assert different  # else the noise shows nothing
    assert sorted(outcome.overall.different) == sorted(different)
    for category, one in wanted.items():
        found = outcome.categories[category]
        assert (found.answers, found.tokens, found.agreed) == (one.answers, one.tokens, one.agreed)
        assert found.mean_kl == pytest.approx(one.mean_kl, rel=1e-3)
        assert found.mean_kl > 0.0
    answers = [reference.generate(task.prompt, SETTINGS).token_ids for task in asked]
    own = engine_of(noisy_model, tiny_tokenizer)
    others = [own.generate(task.prompt, SETTINGS).token_ids for task in asked]
    assert different == [task.id for task, a, b in zip(asked, answers, others, strict=True) if a != b]


def test_recorded_answers_are_compared_as_they_are(
    reference: Engine,
    tiny_model: LlamaForCausalLM,
    noisy_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = reference.encode(TEXTS[0])
    answer = (5, 2, 9, 2, 17, 30)  # with tokens that would end an answer of the model's own
    outcome = compare(
        engine_of(noisy_model, tiny_tokenizer), reference, [ComparedPrompt("p", "c", prompt, answer)], TOKENS
    )
    one = expected(noisy_model, tiny_model, tuple(prompt.token_ids), answer)
    assert (outcome.overall.tokens, outcome.overall.agreed) == (6, one.agreed)
    assert outcome.overall.mean_kl == pytest.approx(one.mean_kl, rel=1e-3)
    assert compare(reference, reference, [ComparedPrompt("p", "c", prompt, answer)], 4).overall.tokens == 4


def test_recorded_tokens_that_the_model_does_not_have_are_refused(reference: Engine) -> None:
    task = ComparedPrompt("p", "c", reference.encode(TEXTS[0]), (5, 100_000))
    with pytest.raises(ConfigError, match="p: its recorded answer has token ids that this model does not have"):
        compare(reference, reference, [task], TOKENS)


def test_divergence_of_distributions() -> None:
    half, skewed = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.75]).log()
    assert kl_divergence(half, half) == 0.0
    assert kl_divergence(half, skewed) == pytest.approx(0.1438, abs=1e-4)  # 0.5 ln 2 + 0.5 ln (2/3)
    certain = torch.tensor([1.0, 0.0]).log()
    assert kl_divergence(certain, half) == pytest.approx(0.6931, abs=1e-4)
    assert kl_divergence(half, certain) == torch.inf


def test_the_table_fits_60_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    one = Divergence(40, 8683, 8480, 73.8, ["x"] * 31)
    show(Comparison({"model": "m", "dtype": "int8"}, {"dtype": "float32"}, {"summarization": one, "rag": one}))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 60
    assert text.startswith("m\n")
    assert "int8 against float32" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows[0] == ["summarization", "8683", "0.9766", "0.00850", "31/40"]
    assert rows[2] == ["all", "17366", "0.9766", "0.00850", "62/80"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_the_command_compares_types_on_prompts_and_on_traces(tiny_model_folder: Path, tmp_path: Path) -> None:
    prompts, traces = tmp_path / "prompts.jsonl", tmp_path / "traces.jsonl"
    prompts.write_text(json.dumps({"id": "q", "category": "a", "turns": [TEXTS[0]]}))
    traces.write_text(json.dumps({"id": "t", "category": "b", "model": "m", "prompt": [5, 6, 7], "output": [8, 9, 10]}))
    common = [
        "--model",
        tiny_model_folder,
        "--device",
        "cpu",
        "--dtype",
        "bfloat16",
        "--against",
        "float32",
        "--max-tokens",
        8,
    ]
    done = run(*common, "--prompts", prompts, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["machine"]["dtype"], report["reference"]["dtype"]) == ("bfloat16", "float32")
    assert report["all"]["answers"] == 1
    assert 0.0 < report["all"]["mean_kl"] < 0.1
    assert report["categories"] == {"a": report["all"]}
    done = run(*common, "--replay", traces)
    assert done.exit_code == 0, done.output
    assert "bfloat16 against float32" in done.stdout
    assert "all" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replay", "t.jsonl"], "--replay goes with --against"),
        (["--against", "float32", "--replay", "t.jsonl", "--prompts", "p.jsonl"], "either --prompts FILE or --replay"),
        (["--against", "float32", "--replay", "/no/such/file"], "cannot read /no/such/file"),
        (["--against", "float32", "--temperature", "0.5"], "--against compares greedy answers"),
        (["--against", "float32", "--batch", "2"], "--against compares greedy answers"),
        (["--against", "int8"], "--against"),
    ],
)
def test_bad_settings_are_refused_before_the_model_is_loaded(arguments: list[str], message: str) -> None:
    done = run("--model", "/no/such/model", *arguments)
    assert done.exit_code != 0
    assert message in done.output
