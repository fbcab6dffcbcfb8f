"""`reader-rag verify`: what is compared, what is a failure, and what a person reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from costs_stub import EverythingPays
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from reader_rag.bench.verify import verification as module
from reader_rag.bench.verify.verification import Difference, Verification, verify
from reader_rag.cli.main import app
from reader_rag.cli.verify import lines
from reader_rag.config import DraftConfig, SamplingParams
from reader_rag.draft import DraftTree
from reader_rag.engine import sequence as request_module
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Prompt
from reader_rag.model.quantization.loader import quantise_in_memory
from reader_rag.sampling.accept import accept_path

SETTINGS = SamplingParams(max_tokens=20, ignore_eos=True)
TEXTS = ("the cat and the dog and the cat and the", "in the of the and")


@pytest.fixture
def engine(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Engine:
    made = Engine(tiny_model, tiny_tokenizer)
    made.context.costs.current = EverythingPays()  # type: ignore[assignment]
    return made


@pytest.fixture
def prompts(engine: Engine) -> list[tuple[str, Prompt]]:
    return [(f"p{number}", engine.encode(text)) for number, text in enumerate(TEXTS)]


def accepts_anything(
    tree: DraftTree, target: Callable[[int], int], ends: Callable[[int], bool]
) -> tuple[list[int], list[int]]:
    """A wrong rule: the first drafted token is accepted whatever the target says."""
    if not len(tree):
        return accept_path(tree, target, ends)
    target(-1)
    first = int(tree.tokens[0])
    if ends(first):
        return [0], [first]
    second = target(0)
    ends(second)
    return [0], [first, second]


def test_what_is_equal_passes(engine: Engine, prompts: list[tuple[str, Prompt]]) -> None:
    outcome = verify(engine, prompts, SETTINGS)
    assert outcome.passed
    assert outcome.must_agree
    assert (outcome.answers, outcome.tokens, outcome.differences) == (2, 40, [])
    assert outcome.plain_tokens == outcome.reader_tokens == 38
    assert 0 < outcome.accepted < outcome.drafted


def test_sampled_answers_are_compared_for_every_seed(engine: Engine, prompts: list[tuple[str, Prompt]]) -> None:
    said: list[str] = []
    settings = replace(SETTINGS, temperature=0.8, top_p=0.9, repetition_penalty=1.1)
    outcome = verify(engine, prompts, settings, seeds=[0, 1, 2], progress=said.append)
    assert (outcome.passed, outcome.answers, outcome.tokens) == (True, 6, 120)
    assert said[:2] == ["1/6 p0 (seed 0)", "2/6 p0 (seed 1)"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_model_as_its_own_assistant_drafts_what_it_chooses(
    tiny_model: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
    prompts: list[tuple[str, Prompt]],
    temperature: float,
) -> None:
    always = DraftConfig(gated=False)
    engine = Engine(tiny_model, tiny_tokenizer, draft=always, assistant=tiny_model, prefix_bytes=0, profile="off")
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=temperature, repetition_penalty=1.1)
    outcome = verify(engine, prompts, params, seeds=[1, 2])
    assert outcome.passed
    assert outcome.draft_model is not None
    assert outcome.draft_model["right"] == outcome.draft_model["drafted"] > 20
    engine.close()


@pytest.mark.parametrize("settings", [SETTINGS, replace(SETTINGS, temperature=0.8, top_p=0.9)])
def test_prompts_of_a_batch_are_decoded_together_and_compared_in_pairs(
    engine: Engine, prompts: list[tuple[str, Prompt]], settings: SamplingParams
) -> None:
    asked = [(f"{name}-{copy}", prompt) for copy in range(3) for name, prompt in prompts]
    alone, together = verify(engine, asked, settings), verify(engine, asked, settings, batch=3)
    assert (alone.batch, alone.rows_per_step, together.batch) == (1, 1.0, 3)
    assert together.rows_per_step is not None
    assert 2.0 < together.rows_per_step <= 3.0
    assert (together.passed, together.answers, together.tokens) == (True, 6, 120)
    assert (together.differing_tokens, together.differing_bits) == (0, 0)
    assert 0 < together.accepted < together.drafted
    assert "3 at once" in lines(together)[0]
    assert "at once" not in lines(alone)[0]


def test_a_wrong_rule_is_found_in_a_batch(
    engine: Engine, prompts: list[tuple[str, Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_module, "accept_path", accepts_anything)
    outcome = verify(engine, prompts, SETTINGS, batch=2)
    assert not outcome.passed
    assert 0 < outcome.differing_tokens <= 2
    assert {one.prompt for one in outcome.differences} <= {"p0", "p1"}


def test_one_other_bit_in_compiled_loops_is_a_failure(
    engine: Engine, prompts: list[tuple[str, Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = module._Watch.__call__

    def flips(self: module._Watch, verified: Any) -> Any:
        if len(verified.logits) > 1:  # a step with drafts
            verified.logits.view(torch.int32)[0, 0] ^= 1
        return seen(self, verified)

    monkeypatch.setattr(module._Watch, "__call__", flips)
    outcome = verify(engine, prompts, SETTINGS)
    assert engine.target.cpu is not None
    assert (outcome.differing_tokens, outcome.passed) == (0, False)
    assert outcome.differing_bits > 0


def test_a_wrong_rule_fails_and_shows_where(
    engine: Engine, prompts: list[tuple[str, Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, prompt = prompts[1]
    plain = engine.generate(prompt, replace(SETTINGS, speculate=False)).token_ids
    monkeypatch.setattr(request_module, "accept_path", accepts_anything)
    drafted = engine.generate(prompt, SETTINGS).token_ids
    outcome = verify(engine, [(name, prompt)], SETTINGS)
    at = next(at for at, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b)
    [held] = outcome.differences
    assert not outcome.passed
    assert (held.prompt, held.seed, held.position) == ("p1", None, at)
    assert held.plain == engine.tokenizer.decode([plain[at]])
    assert held.reader == engine.tokenizer.decode([drafted[at]])
    assert held.margin > 0.0
    assert outcome.tokens == at + 1  # what comes behind a difference stands behind another text
    assert "FAILED" in lines(outcome)[-1]


def test_margins_are_those_of_the_choice_with_its_noise(engine: Engine, prompts: list[tuple[str, Prompt]]) -> None:
    prompt = prompts[0][1]
    greedy = engine.generate(prompt, replace(SETTINGS, record_margins=True))

    def answer(settings: SamplingParams) -> module._Answer:
        return module._answers(engine, [module._Request("p0", prompt, settings)], result(), speculate=True)[0]

    assert answer(SETTINGS).margins[: len(greedy.margins)] == pytest.approx(list(greedy.margins), abs=1e-4)
    drawn = answer(replace(SETTINGS, temperature=2.0, seed=3))
    assert drawn.margins[0] != pytest.approx(greedy.margins[0], abs=1e-4)


def result(
    dtype: str = "float32", exactness: str = "fast", forward: str = "torch", quantized: bool = False, **fields: Any
) -> Verification:
    about = {"model": "m", "dtype": dtype, "exactness": exactness, "device": "d"}
    about |= {"quantized": quantized, "quantization": "int8" if quantized else "none", "forward": forward}
    return Verification(about, **{"answers": 2, "tokens": 100, "drafted": 60, "accepted": 40} | fields)


DIFFERENCE = Difference("p0", 4, 17, " a", " b", 0.0123)


@pytest.mark.parametrize(
    ("outcome", "passed"),
    [
        (result(), True),
        (result(differing_bits=9), True),
        (result(differences=[DIFFERENCE]), False),
        (result("bfloat16", differences=[DIFFERENCE], differing_bits=9), True),
        (result("bfloat16", "strict"), True),
        (result("bfloat16", "strict", differing_bits=1), False),
        (result("float16", "strict", differences=[DIFFERENCE]), False),
        (result(quantized=True, differences=[DIFFERENCE], differing_bits=1), True),
        (result("float16", quantized=True, exactness="strict", differing_bits=1), False),
        (result(forward="compiled"), True),
        (result(forward="compiled", differing_bits=1), False),
        (result("bfloat16", forward="compiled", differing_bits=1), False),
        (result("bfloat16", forward="compiled", differences=[DIFFERENCE]), False),
        (result(forward="compiled", quantized=True, differing_bits=1), False),
        (result(forward="compiled", quantized=True, differences=[DIFFERENCE]), False),
    ],
)
def test_tokens_must_agree_in_float32_and_bits_too_in_strict_mode_and_compiled_loops(
    outcome: Verification, passed: bool
) -> None:
    assert outcome.passed is passed
    assert outcome.to_dict()["passed"] is passed
    assert ("FAILED" in lines(outcome)[-1]) is not passed


def test_a_report_names_each_difference() -> None:
    outcome = result(
        "bfloat16", differences=[DIFFERENCE] * 22, differing_tokens=22, differing_bits=30, plain_s=2.0, plain_tokens=10
    )
    outcome = replace(outcome, reader_s=1.0, reader_tokens=10)
    text = lines(outcome)
    assert text[1] == "100 tokens of 2 answers compared: 22 differ; 30 have logits of other bits"
    assert text[2] == "40 of 60 drafted tokens were accepted"
    assert text[3] == "  p0, seed 4, token 17: plain ' a', drafted ' b', margin 0.0123"
    assert text[23] == "  and 2 more (--json lists all)"
    assert text[24] == "plain 5.0 tokens/s, drafted 10.0: 2.00 times"
    assert text[25] == "--exactness fast allows that rounding in bfloat16 changes tokens; strict does not"


def test_int8_in_the_own_forward_is_told_with_its_margin() -> None:
    text = lines(result("bfloat16", quantized=True, differences=[DIFFERENCE], differing_tokens=1, differing_bits=3))
    assert text[0] == "m, int8 (bfloat16), fast, d"
    assert text[3].endswith("margin 0.0123")
    assert text[-1] == "--exactness fast allows that rounding in int8 (bfloat16) changes tokens; strict does not"


ON_CPU = ["--dtype", "float32", "--device", "cpu"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def test_the_command_reads_prompts_and_prints_one_json_object(tiny_model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"q{number}", "category": "a", "turns": [text]} for number, text in enumerate(TEXTS)]
    file.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--model", tiny_model_folder, "--prompts", file, "--max-tokens", 8, *ON_CPU]
    done = run(*arguments, "--temperature", 0.7, "--seeds", "1,2", "--batch", 2, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["answers"], report["tokens"], report["passed"], report["batch"]) == (4, 32, True, 2)
    assert (report["differing_tokens"], report["differing_bits"]) == (0, 0)
    assert report["machine"]["dtype"] == "float32"


def test_without_a_file_there_are_prompts_of_its_own(tiny_model_folder: Path) -> None:
    done = run(
        "--model", tiny_model_folder, "--categories", "chat", "--limit", 2, "--max-tokens", 4, *ON_CPU,
        "--exactness", "strict",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "8 tokens of 2 answers compared: 0 differ; 0 have logits of other bits" in done.stdout
    assert "passed: the same tokens and the same bits" in done.stdout


@pytest.mark.parametrize("batch", [1, 3])
def test_int8_in_compiled_loops_has_the_bits_of_plain_decoding(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, batch: int
) -> None:
    engine = Engine(quantise_in_memory(tiny_model, torch.bfloat16), tiny_tokenizer, prefix_bytes=0, profile="off")
    engine.context.costs.current = EverythingPays()  # type: ignore[assignment]
    asked = [(f"p{number}", engine.encode(text)) for number, text in enumerate(TEXTS * 2)]
    outcome = verify(engine, asked, SETTINGS, batch=batch)
    assert (outcome.machine["quantization"], outcome.machine["forward"]) == ("int8", "compiled")
    assert (outcome.bits_must_agree, outcome.differing_tokens, outcome.differing_bits) == (True, 0, 0)
    assert 0 < outcome.accepted < outcome.drafted


def test_the_command_quantises(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "q", "category": "a", "turns": [TEXTS[0]]}))
    arguments = [
        "--model",
        tiny_model_folder,
        "--prompts",
        file,
        "--max-tokens",
        4,
        "--device",
        "cpu",
        "--quantization",
        "int8",
    ]
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert ", int8 (bfloat16), fast, " in done.stdout
    assert "passed: the same tokens and the same bits" in done.stdout


def test_a_difference_is_exit_status_1(tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: Any, **__: Any) -> Verification:
        return result(differences=[DIFFERENCE])

    monkeypatch.setattr(module, "verify", differs)
    done = run("--model", tiny_model_folder, "--categories", "chat", "--limit", 1, "--device", "cpu")
    assert done.exit_code == 1
    assert "FAILED" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "one"], "--seeds takes whole numbers"),
        (["--seeds", "0,-1"], "--seeds takes whole numbers of at least 0"),
        (["--prompts", "/no/such/file"], "cannot read /no/such/file"),
        (["--categories", "songs"], "there are rag, summarization and chat"),
        (["--top-p", "0"], "top_p must be in"),
        (["--temperature", "-1"], "--temperature"),
        (["--batch", "0"], "--batch"),
    ],
)
def test_bad_settings_are_refused_before_the_model_is_loaded(arguments: list[str], message: str) -> None:
    done = run("--model", "/no/such/model", *arguments)
    assert done.exit_code != 0
    assert message in done.output


def test_without_drafts_nothing_is_tested() -> None:
    text = lines(result(drafted=0, accepted=0, plain_s=1.0, plain_tokens=9, reader_s=1.0, reader_tokens=9))
    assert "nothing was drafted, so nothing was tested" in text[2]
    assert not any("times" in line for line in text)


def test_a_margin_without_a_second_best_is_unknown(engine: Engine, prompts: list[tuple[str, Prompt]]) -> None:
    outcome = result()
    answer = module._Answer((5, 6), "ab", [b"x", b"y"], [1.0, float("inf")])
    other = module._Answer((5, 7), "ac", [b"x", b"y"], [1.0, 1.0])
    module._compare(engine, module._Request("p0", prompts[0][1], SETTINGS), answer, other, outcome)
    assert outcome.differences[0].margin is None
    assert "margin unknown" in lines(outcome)[3]
    json.dumps(outcome.to_dict(), allow_nan=False)


def test_a_prompt_that_is_too_long_is_left_out(tiny_model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": "long", "category": "a", "turns": ["the " * 3000]}, {"id": "q", "category": "a", "turns": ["in"]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--model", tiny_model_folder, "--prompts", file, "--max-tokens", 4, *ON_CPU]
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["answers"] == 1
    assert "long: left out, longer than the model's context window" in done.stderr
    file.write_text(json.dumps(rows[0]))
    done = run(*arguments)
    assert done.exit_code == 1
    assert "every prompt is longer" in done.stderr
