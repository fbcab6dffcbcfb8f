"""The drafter inside a real vLLM: the tokens are those of the same vLLM without it, whatever happens to the requests.

`make test-vllm` makes an environment with vLLM and runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from reader_rag.connectors.vllm_args import PROPOSER

from reader_rag.bench.inputs import BenchPrompt
from reader_rag.bench.vllm.compare import Sampling, VllmTask, compare_vllm, first_difference, read_tasks
from reader_rag.bench.vllm.costs import measure_costs
from reader_rag.bench.vllm.engine import Answer, Group, greedy, run_group
from reader_rag.bench.vllm.options import Options
from reader_rag.bench.vllm.stress import TIE, StressPlan, stress
from reader_rag.bench.vllm.worker import Worker
from reader_rag.datastore import Datastore
from reader_rag.draft.step_table import StepTable
from reader_rag.errors import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

LENGTH = 1024
PASSAGES = (
    "The Great Heron Dam was finished in 1931 after nine years of work. It is 221 metres high and holds back the "
    "Silver River, whose water turns seventeen turbines.",
    "The town of Alder Falls was founded by three families of weavers. Its wool market is held on the first Saturday "
    "of every month, and visitors come from as far as the coast.",
    "Captain Ines Moreno sailed around the cape in the winter of 1788. Her ship, the Good Intent, carried tea, "
    "porcelain and forty-two sailors, all of whom came home.",
    "A cheese of the high pastures ripens for fourteen months in caves of limestone. It is turned by hand twice a "
    "week and washed with salt water and white wine.",
)
QUESTIONS = (
    "How high is the dam, and how many turbines does its river turn?",
    "Repeat what is said about the wool market, word for word.",
    "What did the Good Intent carry?",
    "How is the cheese made? Quote the passage.",
    "Copy the first passage.",
    "List the facts of all passages, one a line.",
)


@pytest.fixture(scope="module")
def model() -> str:
    """The folder of the model: what `READER_RAG_VLLM_MODEL` names, or the default one where it was converted before."""
    from reader_rag.model.registry import DEFAULT_MODEL, resolve_model

    return os.environ.get("READER_RAG_VLLM_MODEL") or str(resolve_model(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def options(model: str, tmp_path_factory: pytest.TempPathFactory) -> Options:
    # Steps cost what they do on a GPU, so that as much is drafted on any machine.
    costs = tmp_path_factory.mktemp("costs") / "costs.json"
    StepTable.assumed("cuda").write(costs)
    return Options(model, "float32", 16, LENGTH, 8, costs=str(costs), eager=True)


@pytest.fixture(scope="module")
def tasks(model: str) -> list[VllmTask]:
    context = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(PASSAGES, 1))
    texts = [f"Answer the question from the passages.\n\n{context}\n\nQuestion: {question}" for question in QUESTIONS]
    prompts = [BenchPrompt(f"rag-{number}", "rag", text) for number, text in enumerate(texts)]
    return read_tasks(model, prompts, LENGTH, 64)


@pytest.fixture(scope="module")
def plain(options: Options) -> Iterator[Worker]:
    with Worker(options, "plain") as worker:
        worker.wait()
        yield worker


@pytest.fixture(scope="module")
def reader(options: Options) -> Iterator[Worker]:
    with Worker(options, "reader") as worker:
        worker.wait()
        yield worker


def answered(engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **more: Any) -> Group:
    """A group of answers; with `temperature`, each with a seed of its own. Runs in the workers."""
    first = more.pop("seed", 0)
    params = [greedy(max_tokens, **more, **({"seed": first + n} if more else {})) for n in range(len(prompts))]
    return run_group(engine, prompts, params)


def sampled(engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> Group:
    return answered(engine, prompts, max_tokens, temperature=1.0, seed=seed, ignore_eos=True)


def check_equal(plain: Worker, prompts: Sequence[Sequence[int]], expected: list[Answer], found: list[Answer]) -> None:
    """The same tokens, up to two that the model holds for equally good."""
    for prompt, ours, theirs in zip(prompts, found, expected, strict=True):
        if ours.tokens != theirs.tokens:
            parted = first_difference(plain, prompt, theirs.tokens, ours.tokens)
            assert parted["margin"] is not None, parted
            assert abs(parted["margin"]) <= TIE, parted


def test_one_request_at_a_time_gets_the_tokens_of_plain_decoding(
    plain: Worker, reader: Worker, tasks: list[VllmTask]
) -> None:
    accepted = 0
    for task in tasks:
        theirs, ours = (worker.run(answered, [task.prompt], 48) for worker in (plain, reader))
        check_equal(plain, [task.prompt], theirs.answers, ours.answers)
        accepted += ours.accepted
    assert accepted > 30


def test_sixteen_requests_at_a_time_get_the_tokens_of_plain_decoding(
    plain: Worker, reader: Worker, tasks: list[VllmTask]
) -> None:
    prompts = [tasks[number % len(tasks)].prompt for number in range(16)]
    theirs, ours = (worker.run(answered, prompts, 32) for worker in (plain, reader))
    check_equal(plain, prompts, theirs.answers, ours.answers)
    assert ours.accepted > 30


def test_answers_are_right_with_aborted_and_preempted_requests(options: Options, tasks: list[VllmTask]) -> None:
    plan = StressPlan(requests=64, aborted=0.2, max_tokens=32, queued=24)
    report = stress(options, 1024, tasks, plan)
    assert report["wrong"] == []
    assert report["aborted"] == 13
    assert report["preemptions"] > 0
    assert report["accepted"] > 100


def test_a_request_alone_samples_the_same_tokens_again_with_its_seed(reader: Worker, tasks: list[VllmTask]) -> None:
    # Among others it need not: how much is drafted for it, and so what vLLM draws, depends on them.
    def answer(prompt: tuple[int, ...], seed: int) -> list[int]:
        return reader.run(sampled, [prompt], 24, seed).answers[0].tokens

    first, again, other = ([answer(task.prompt, seed) for task in tasks[:3]] for seed in (7, 7, 8))
    assert again == first
    assert other != first


def test_sampled_tokens_are_distributed_as_without_drafts(plain: Worker, reader: Worker, model: str) -> None:
    # vLLM draws otherwise where it verifies drafts, any drafts: one seed gives other tokens than in plain decoding.
    text = "red green blue red green blue red green blue red green"
    prompt = read_tasks(model, [BenchPrompt("colours", "sampled", text)], LENGTH, 8)[0].prompt[:-8]
    runs = [worker.run(sampled, [prompt] * 512, 4, 1) for worker in (plain, reader)]
    assert runs[1].accepted > 20
    assert runs[1].drafted - runs[1].accepted > 20
    for place in (1, 2, 3):
        theirs, ours = (Counter(answer.tokens[place] for answer in run.answers) for run in runs)
        statistic, freedom = chi_square(theirs, ours)
        assert statistic < freedom + 4 * (2 * freedom) ** 0.5, f"token {place}: {statistic} of {freedom}"


def chi_square(first: Counter[int], second: Counter[int]) -> tuple[float, int]:
    """Pearson's statistic of two samples of one size, and its mean; rare tokens are counted as one."""
    common = {token for token in first | second if first[token] + second[token] >= 10}
    pairs = [(first[token], second[token]) for token in common]
    rare = tuple(sum(count for token, count in some.items() if token not in common) for some in (first, second))
    if sum(rare):
        pairs.append(rare)
    return sum((a - b) ** 2 / (a + b) for a, b in pairs), max(len(pairs) - 1, 1)


def test_the_proposer_reads_measured_costs(options: Options, tasks: list[VllmTask], tmp_path: Path) -> None:
    table = measure_costs(options, [1, 2], [0, 4], context=64, rounds=2)
    assert (table.rows, table.drafted, len(table.seconds)) == ((1, 2), (0, 4), 2)
    path = tmp_path / "costs.json"
    # As if eight drafted tokens cost a thousand steps: then none pays.
    StepTable((1,), (0, 8), ((0.01, 10.0),)).write(path)
    dear = Options(options.model, "float32", 1, LENGTH, 8, costs=str(path), eager=True)
    with Worker(dear, "reader") as worker:
        worker.wait()
        assert worker.run(answered, [tasks[0].prompt], 32).drafted == 0


def test_methods_are_compared_on_the_same_prompts(options: Options, tasks: list[VllmTask]) -> None:
    report = compare_vllm(options, tasks[:2], ["plain", "reader"], Sampling(max_tokens=24))
    held = report["categories"]["rag"]
    assert (report["batch"], held["prompts"], list(held["methods"])) == (16, 2, ["plain", "reader"])
    assert held["methods"]["plain"]["mat"] == 1.0
    assert held["methods"]["reader"]["mat"] > 1.0
    assert held["ratios"]["reader/plain"]["total"] > 0
    assert report["identical"]["reader"]["compared"] == 2
    json.dumps(report)


def refusals(engine: Any, model: str, cases: Sequence[tuple[int, Any]]) -> list[str]:
    """What vLLM says when it makes the drafter with these settings; runs in a worker."""
    from vllm import EngineArgs
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    said = []
    for drafted, ours in cases:
        speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": drafted}
        arguments = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=LENGTH,
            speculative_config=speculative,
            additional_config={"reader_rag": ours},
        )
        try:
            create_custom_proposer(arguments.create_engine_config())
        except RuntimeError as error:
            said.append(str(error.__cause__))
    return said


def test_invalid_settings_are_refused_at_the_start(plain: Worker, model: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with Datastore.open(other, vocabulary=49_152, tokenizer="sha256:another") as store:
        store.add("a", [1, 2, 3])
    cases = [
        (300, {}),
        (8, {"datastore": str(other)}),
        (8, {"datastore": str(tmp_path / "none")}),
        (8, {"costs": str(tmp_path / "none.json")}),
        (8, {"datastroe": "x"}),
    ]
    said = plain.run(refusals, model, cases)
    words = [
        "num_speculative_tokens must be 1..256",
        "tokenizer",
        "no datastore at",
        "cannot read step costs",
        "datastroe",
    ]
    assert len(said) == len(words)
    for text, word in zip(said, words, strict=True):
        assert word in text
        assert "\n" not in text


def test_an_engine_that_cannot_start_raises_one_line(options: Options, tmp_path: Path) -> None:
    wrong = Options(options.model, "float32", 1, LENGTH, 8, datastore=str(tmp_path / "none"), eager=True)
    with (
        Worker(wrong, "reader") as worker,
        pytest.raises(ConfigError, match="vLLM does not start: no datastore at") as reported,
    ):
        worker.wait()
    assert "\n" not in str(reported.value)
