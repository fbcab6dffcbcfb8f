"""`ReaderProposer` with a stub of vLLM's config and a runner that uses rows as vLLM does; see test_vllm_serving."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reader_rag.connectors.vllm import ProposerSettings, ReaderProposer

from reader_rag.datastore import Datastore
from reader_rag.draft.kernels.rows import BASE, SIZE, tokens_of
from reader_rag.draft.profile import fingerprint, profiles
from reader_rag.draft.step_table import StepTable
from reader_rag.errors import ConfigError, DatastoreError, DatastoreMismatchError, DatastoreNotFoundError

VOCABULARY = {f"word {number}": number for number in range(300)}
LENGTH = 200
"""`max_model_len`."""


@pytest.fixture(autouse=True)
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the connector asks vLLM for."""
    stub: Any = ModuleType("vllm.tokenizers")
    stub.cached_tokenizer_from_config = lambda config: SimpleNamespace(get_vocab=lambda: config.vocabulary)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", stub)


def config(*, longest: int = 5, rows: int = 4, batched: int = 2048, device: str = "cuda", **ours: Any) -> Any:
    return SimpleNamespace(
        additional_config={"reader_rag": ours} if ours else {},
        speculative_config=SimpleNamespace(num_speculative_tokens=longest),
        model_config=SimpleNamespace(
            max_model_len=LENGTH,
            skip_tokenizer_init=False,
            enable_prompt_embeds=False,
            vocabulary=VOCABULARY,
            get_vocab_size=lambda: len(VOCABULARY),
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows, max_num_batched_tokens=batched),
        device_config=SimpleNamespace(device_type=device),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


@pytest.fixture
def free(tmp_path: Path) -> str:
    """A file of costs by which everything pays."""
    path = tmp_path / "free.json"
    StepTable((1,), (0, 1), ((1.0, 1.0),)).write(path)
    return str(path)


class Runner:
    """The rows of vLLM's `InputBatch`: what leaves is filled from the end, and old tokens are left behind a text."""

    def __init__(self, proposer: ReaderProposer, rows: int = 4) -> None:
        self.proposer = proposer
        self.token_ids_cpu = np.zeros((rows, LENGTH), np.int32)
        self.num_tokens_no_spec = np.zeros(rows, np.int32)
        self.names: list[str] = []
        self.drafts: dict[str, list[int]] = {}

    def text(self, name: str) -> list[int]:
        row = self.names.index(name)
        return [int(token) for token in self.token_ids_cpu[row, : self.num_tokens_no_spec[row]]]

    def add(self, name: str, text: list[int]) -> None:
        row = len(self.names)
        self.names.append(name)
        self._put(row, text)

    def remove(self, name: str) -> list[int]:
        """Also what becomes of a request that is preempted, or not in this step."""
        text, row, last = self.text(name), self.names.index(name), len(self.names) - 1
        moved = self.text(self.names[last])
        self.names[row] = self.names[last]
        self.names.pop()
        if row < last:
            self._put(row, moved)
        self.drafts.pop(name, None)
        return text

    def swap(self, one: str, other: str) -> None:
        i, j = self.names.index(one), self.names.index(other)
        first, second = self.text(one), self.text(other)
        self.names[i], self.names[j] = other, one
        self._put(i, second)
        self._put(j, first)

    def step(self, emitted: dict[str, list[int]]) -> dict[str, list[int]]:
        """A step in which these requests emit tokens, and the others read on in their prompts."""
        for name, tokens in emitted.items():
            self._put(self.names.index(name), self.text(name) + tokens)
        sampled = [emitted.get(name, []) for name in self.names]
        before = self.token_ids_cpu.copy()
        drafts = self.proposer.propose(
            sampled, self.num_tokens_no_spec, self.token_ids_cpu, slot_mappings={"layer": object()}
        )
        assert np.array_equal(before, self.token_ids_cpu)
        self.drafts = dict(zip(self.names, drafts, strict=True))
        return self.drafts

    def _put(self, row: int, text: list[int]) -> None:
        self.token_ids_cpu[row, : len(text)] = text
        self.num_tokens_no_spec[row] = len(text)


class TestDrafts:
    def test_a_request_is_drafted_from_its_own_tokens(self, free: str) -> None:
        runner = Runner(ReaderProposer(config(costs=free)))
        runner.add("a", [1, 2, 3, 4, 5, 6, 7, 1])
        runner.add("b", [9, 8, 7, 6, 5, 4, 9])
        assert runner.step({"a": [2], "b": [8]}) == {"a": [3, 4, 5, 6, 7], "b": [7, 6, 5, 4, 9]}

    def test_a_request_in_prefill_drafts_nothing(self, free: str) -> None:
        runner = Runner(ReaderProposer(config(costs=free)))
        runner.add("a", [1, 2, 3, 1, 2])
        runner.add("b", [1, 2, 3, 1])
        assert runner.step({"b": [2]}) == {"a": [], "b": [3, 1, 2]}
        assert runner.step({}) == {"a": [], "b": []}

    def test_no_rows_no_drafts(self) -> None:
        assert ReaderProposer(config()).propose([], np.zeros(4, np.int32), np.zeros((4, 9), np.int32)) == []

    def test_drafts_end_at_max_model_len(self, free: str) -> None:
        runner = Runner(ReaderProposer(config(costs=free)))
        runner.add("a", [number % 10 for number in range(LENGTH - 5)])
        fitting = []
        while len(runner.text("a")) < LENGTH:
            fitting.append(len(runner.step({"a": [len(runner.text("a")) % 10]})["a"]))
        # Text of 196 to 200 tokens of 200; one is left for the target's own.
        assert fitting == [3, 2, 1, 0, 0]

    def test_drafts_are_plain_integers(self, free: str) -> None:
        runner = Runner(ReaderProposer(config(costs=free)))
        runner.add("a", [1, 2, 3, 1])
        assert json.dumps(runner.step({"a": [2]})) == '{"a": [3, 1, 2]}'

    def test_drafts_do_not_depend_on_rows_nor_on_other_requests(self, free: str) -> None:
        random = np.random.default_rng(3)
        prompts = {name: random.integers(10 * k, 10 * k + 6, 60).tolist() for k, name in enumerate("abc")}
        answers = {name: random.integers(10 * k, 10 * k + 6, 60).tolist() for k, name in enumerate("abc")}
        alone: dict[str, list[list[int]]] = {}
        for name in prompts:
            runner = Runner(ReaderProposer(config(costs=free)))
            runner.add(name, prompts[name])
            alone[name] = [runner.step({name: [token]})[name] for token in answers[name]]
        assert all(any(drafts) for drafts in alone.values())

        runner = Runner(ReaderProposer(config(costs=free)))
        done = dict.fromkeys(prompts, 0)
        away = dict(prompts)
        while min(done.values()) < 60:
            for name in list(away):
                if random.random() < 0.4:
                    runner.add(name, away.pop(name))
            if len(runner.names) > 1 and random.random() < 0.4:
                runner.swap(*random.permutation(runner.names)[:2])
            busy = [name for name in runner.names if done[name] < 60 and random.random() < 0.8]
            drafts = runner.step({name: [answers[name][done[name]]] for name in busy})
            for name in busy:
                assert drafts[name] == alone[name][done[name]]
                done[name] += 1
            for name in list(runner.names):
                if random.random() < 0.2:
                    away[name] = runner.remove(name)

    def test_two_processes_draft_the_same(self) -> None:
        random = np.random.default_rng(5)
        one, other = (Runner(ReaderProposer(config())) for _ in range(2))
        for runner in (one, other):
            for name in "abcd":
                runner.add(name, np.random.default_rng(ord(name)).integers(0, 5, 50).tolist())
        for _ in range(30):
            emitted = {name: random.integers(0, 5, 2).tolist() for name in "abcd"}
            assert one.step(emitted) == other.step(emitted)


class RowsMoveAbout(RuleBasedStateMachine):
    """Requests come, go, wait and change places; some have equal beginnings, or are equal altogether."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, list[int]] = {}
        self.count = 0

    @initialize(longest=st.integers(1, 6), most=st.sampled_from([64, 65_536]), keeps=st.booleans())
    def start(self, longest: int, most: int, keeps: bool) -> None:
        made = config(longest=longest, max_index_tokens=most, keep_answers=keeps, max_answer_tokens=64, threads=1)
        made.model_config.skip_tokenizer_init = True
        self.longest = longest
        self.runner = Runner(ReaderProposer(made))

    def has_room(self) -> bool:
        return len(self.runner.names) < 4

    def has_rows(self) -> bool:
        return bool(self.runner.names)

    @precondition(has_room)
    @rule(beginning=st.sampled_from([0, 30, 80]), rest=st.lists(st.integers(0, 2), min_size=1, max_size=6))
    def arrive(self, beginning: int, rest: list[int]) -> None:
        self.runner.add(f"r{self.count}", [number % 7 for number in range(beginning)] + rest)
        self.count += 1

    @precondition(has_rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.runner.remove(data.draw(st.sampled_from(self.runner.names)))

    @precondition(has_rows)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.runner.names))
        self.waiting[name] = self.runner.remove(name)

    @precondition(lambda self: self.waiting and self.has_room())
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        self.runner.add(name, self.waiting.pop(name))

    @precondition(lambda self: len(self.runner.names) > 1)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        self.runner.swap(*data.draw(st.permutations(self.runner.names))[:2])

    @precondition(has_rows)
    @rule(data=st.data(), accepts=st.booleans())
    def step(self, data: st.DataObject, accepts: bool) -> None:
        reading = data.draw(st.sets(st.sampled_from(self.runner.names)))
        emitted = {}
        for name in self.runner.names:
            drafted = self.runner.drafts.get(name, []) if accepts else []
            tokens = [*drafted, data.draw(st.integers(0, 2))][: LENGTH - len(self.runner.text(name))]
            if name not in reading and tokens:
                emitted[name] = tokens
        drafts = self.runner.step(emitted)
        for name, draft in drafts.items():
            text = self.runner.text(name)
            assert len(draft) <= max(min(self.longest, LENGTH - 1 - len(text)), 0)
            assert name in emitted or not draft
            assert all(0 <= token < 7 for token in draft)
        held = self.runner.proposer._drafter.rows
        for row, name in enumerate(self.runner.names):
            if name in emitted and len(self.runner.text(name)) < LENGTH - 1:
                state = held.states[held._held[row]]
                known = tokens_of(state)[: state[SIZE]].tolist()
                assert known == self.runner.text(name)[state[BASE] :]

    @invariant()
    def memory_is_bounded(self) -> None:
        if hasattr(self, "runner"):
            held = self.runner.proposer._drafter.rows
            assert len(held) <= 8
            assert held.nbytes < 8 * 20_000


TestRowsMoveAbout = RowsMoveAbout.TestCase
TestRowsMoveAbout.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestSettings:
    def test_without_settings_the_defaults_hold(self) -> None:
        assert ProposerSettings.from_vllm({}) == ProposerSettings.from_vllm(None) == ProposerSettings()
        assert not ProposerSettings().keep_answers

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"data_store": "x"}, "unknown argument 'data_store'; did you mean 'datastore'"),
            ([], "object of settings"),
            ({"datastore": 3}, "datastore must be a string"),
            ({"costs": ""}, "costs must be a string that is not empty"),
            ({"namespaces": "texts/"}, "namespaces must be a tuple of strings"),
            ({"namespaces": ["texts/"]}, "set datastore to its folder"),
            ({"keep_answers": "yes"}, "keep_answers must be True or False"),
            ({"max_index_tokens": 10}, "max_index_tokens must be in 64.."),
            ({"max_answer_tokens": True}, "max_answer_tokens must be in 64.."),
            ({"threads": 0}, "threads must be in 1..256"),
            ({"costs": "/nowhere/costs.json"}, "cannot read step costs from /nowhere/costs.json"),
            ({"profile": "/nowhere/profile.npz"}, "/nowhere/profile.npz is not a readable profile"),
        ],
    )
    def test_an_invalid_setting_raises_one_line_when_the_engine_starts(self, given: Any, message: str) -> None:
        made = config()
        made.additional_config = {"reader_rag": given}
        with pytest.raises(ConfigError, match=message) as caught:
            ReaderProposer(made)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"longest": 0}, "must be 1..198, not 0"),
            ({"longest": 199}, "must be 1..198, not 199: the engine has max_model_len 200"),
            ({"longest": 16, "batched": 16}, "must be 1..15, not 16: .* max_num_batched_tokens 16"),
        ],
    )
    def test_a_draft_that_the_engine_cannot_verify_is_refused(self, options: dict[str, int], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ReaderProposer(config(**options))

    def test_prompts_without_tokens_are_refused(self) -> None:
        made = config()
        made.model_config.enable_prompt_embeds = True
        with pytest.raises(ConfigError, match="without prompt embeddings"):
            ReaderProposer(made)

    def test_a_profile_of_another_vocabulary_is_refused(self) -> None:
        shipped = next(Path(sys.modules["reader_rag.draft.profile"].__file__ or "").parent.glob("profiles/*.npz"))
        with pytest.raises(ConfigError, match="has another vocabulary: make one for this model"):
            ReaderProposer(config(profile=str(shipped)))

    def test_a_shipped_profile_of_this_vocabulary_is_used(self, free: str, monkeypatch: pytest.MonkeyPatch) -> None:
        held = profiles()[0]
        monkeypatch.setattr("reader_rag.connectors.vllm.fingerprint", lambda vocabulary: held.vocabulary)
        runner = Runner(ReaderProposer(config(costs=free)))
        runner.add("a", [5])
        likely = runner.step({"a": [100]})["a"]
        assert likely[:1] == [int(held.tokens[100, 0])]

    def test_load_model_does_nothing(self) -> None:
        assert ReaderProposer(config()).load_model("any model", device="any") is None


class TestDatastore:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        folder = tmp_path / "store"
        with Datastore.open(folder, vocabulary=300, tokenizer=fingerprint(VOCABULARY)) as store:
            store.add("one", [200, 201, 202, 203, 204, 205], namespace="texts/")
            store.add("two", [210, 211, 212, 213, 214, 215], namespace="texts/tenant")
            store.share("texts/")
        return str(folder)

    def drafts(self, free: str, **ours: Any) -> dict[str, list[int]]:
        runner = Runner(ReaderProposer(config(costs=free, longest=2, **ours)))
        runner.add("shared", [1, 200, 201, 202])
        runner.add("own", [2, 210, 211, 212])
        return runner.step({"shared": [203], "own": [213]})

    def test_shared_namespaces_are_searched_and_others_if_they_are_named(self, folder: str, free: str) -> None:
        assert self.drafts(free) == {"shared": [], "own": []}
        assert self.drafts(free, datastore=folder) == {"shared": [204, 205], "own": []}
        named = self.drafts(free, datastore=folder, namespaces=["texts/tenant"])
        assert named == {"shared": [204, 205], "own": [214, 215]}

    def test_a_missing_datastore_raises(self, tmp_path: Path) -> None:
        with pytest.raises(DatastoreNotFoundError, match="no datastore at"):
            ReaderProposer(config(datastore=str(tmp_path / "nowhere")))

    def test_a_datastore_of_another_tokenizer_raises(self, folder: str) -> None:
        made = config(datastore=folder)
        made.model_config.vocabulary = VOCABULARY | {"another": 299}
        with pytest.raises(DatastoreMismatchError, match="open it with the model that made it"):
            ReaderProposer(made)

    def test_a_missing_namespace_raises_with_the_existing_ones(self, folder: str) -> None:
        with pytest.raises(DatastoreError, match="no namespace 'text/'; it has 'texts/', 'texts/tenant'"):
            ReaderProposer(config(datastore=folder, namespaces=["text/"]))

    def test_vllm_without_a_tokenizer_raises(self, folder: str) -> None:
        made = config(datastore=folder)
        made.model_config.skip_tokenizer_init = True
        with pytest.raises(ConfigError, match="without skip_tokenizer_init"):
            ReaderProposer(made)


def test_answers_are_used_for_other_requests_only_with_keep_answers(free: str) -> None:
    for ours, expected in (({}, []), ({"keep_answers": True}, [102, 103, 104])):
        runner = Runner(ReaderProposer(config(costs=free, longest=3, **ours)))
        runner.add("a", [1, 2])
        runner.step({"a": [100, 101, 102, 103, 104]})
        runner.remove("a")
        runner.add("b", [3])
        for token in range(5, 105):
            runner.step({"b": [token]})
        runner.add("c", [4, 100])
        assert runner.step({"c": [101]})["c"] == expected


def test_it_needs_neither_torch_nor_llama_index_nor_transformers() -> None:
    absent = "('torch', 'transformers', 'llama_index', 'faiss', 'vllm', 'sentence_transformers')"
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport reader_rag.connectors.vllm\nprint('ok')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stdout == "ok\n", run.stderr
