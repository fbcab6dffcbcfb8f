"""A prefill keeps hidden states from which later passes compute logits, and neither changes a bit of anything else."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_trees import random_tokens, random_tree
from tiny_models import COMMON, TREES, VOCABULARY, make_model
from torch import nn

from reader_rag.draft.prompt_successors import ASKED
from reader_rag.kv_cache.hidden_states import HiddenStates
from reader_rag.model import target as step
from reader_rag.model.compiled.forward import CpuForward
from reader_rag.model.fixed_shape import FixedShape, chunk_size
from reader_rag.model.interface import Step, prefill
from reader_rag.model.quantization.loader import load_int8
from reader_rag.model.target import Target

LENGTH = 40
TEXT = random_tokens(5, LENGTH, VOCABULARY)


def kept(target: Target, room: int) -> tuple[HiddenStates, object, torch.Tensor]:
    """The hidden states of `TEXT`, its cache, and the logits after it."""
    states = HiddenStates(LENGTH, target.hidden_width, target.device)
    cache = target.new_cache(LENGTH + room, room)
    (*_, logits) = target.prefill_chunks(TEXT, cache, states)
    return states, cache, logits


def assert_ranks(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The most likely tokens are among the first; states are stored in 16 bits."""
    assert got.shape == expected.shape
    assert (got.topk(3).indices == expected.argmax(-1, keepdim=True)).any(-1).all()


@pytest.mark.parametrize("fixed", [None, FixedShape(width=5, bucket=64)])
@pytest.mark.parametrize("name", sorted(TREES))
def test_states_of_a_prompt_rank_what_comes_next_and_change_no_bit(
    name: str, fixed: FixedShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "chunk_size", lambda _model: 32)
    model = make_model(name)
    target = Target(model, fixed, forward="torch")
    states, cache, logits = kept(target, 8)
    assert torch.equal(logits, prefill(target, TEXT, target.new_cache(LENGTH + 8, 8)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert states.length == LENGTH
    with torch.inference_mode():
        whole = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    one = Step(7, random_tree(0, 4, VOCABULARY) if fixed is None else random_tree(0, 0, VOCABULARY), cache)
    (alone,) = target.verify_batch([one])
    positions = list(range(LENGTH))
    beside, first, second = target.verify_batch([one], [states.take(positions[:3]), states.take(positions[3:])])
    assert torch.equal(beside, alone)
    assert_ranks(torch.cat([first, second]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("asked", [1, 3, ASKED])
def test_in_the_compiled_loops_they_are_rows_of_the_steps_own_product(
    dtype: torch.dtype, slow: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reader_rag.model.compiled.forward.slow_products", lambda: slow)
    model = make_model("Llama").to(dtype)
    target = Target(model)
    assert target.cpu is not None
    assert target.cpu.prefills_faster == (slow and dtype != torch.float32)
    states, cache, _ = kept(target, 8)
    tree = random_tree(0, 6, VOCABULARY)
    (alone,) = target.verify_batch([Step(7, tree, cache)])
    positions = list(range(LENGTH - asked, LENGTH))
    beside, rows = target.verify_batch([Step(7, tree, cache)], [states.take(positions)])
    assert torch.equal(beside, alone)
    with torch.inference_mode():
        whole = model(torch.tensor([TEXT]), use_cache=False).logits[0].float()
    assert_ranks(rows, whole[positions])


@pytest.mark.parametrize("settings", [COMMON, COMMON | {"tie_word_embeddings": True}])
def test_rows_of_int8_models_change_no_bit_either(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    make_model("Llama", settings).save_pretrained(tmp_path / "model")
    model: Any = load_int8(tmp_path / "model", torch.bfloat16, torch.device("cpu"))
    for forward in ("auto", "torch"):
        target = Target(model, forward=forward)
        assert (target.cpu is not None) == (forward == "auto")
        assert 0.0 < target.head_share < 0.5
        states, cache, logits = kept(target, 8)
        assert torch.equal(logits, prefill(target, TEXT, target.new_cache(LENGTH + 8, 8)))
        tree = random_tree(0, 6, VOCABULARY)
        (alone,) = target.verify_batch([Step(7, tree, cache)])
        beside, rows = target.verify_batch([Step(7, tree, cache)], [states.take(list(range(LENGTH)))])
        assert torch.equal(beside, alone)
        with torch.inference_mode():
            assert_ranks(rows, model(torch.tensor([TEXT]), use_cache=False).logits[0].float())


def test_products_of_their_own_have_few_shapes() -> None:
    target = Target(make_model("Llama"), forward="torch")
    states, cache, _ = kept(target, 8)
    shapes: list[int] = []
    head = target.model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _module, inputs: shapes.append(len(inputs[0])))
    for counts in ((1,), (ASKED,), (3, ASKED)):
        one = Step(7, random_tree(0, 0, VOCABULARY), cache)
        logits = target.verify_batch([one], [states.take(list(range(count))) for count in counts])
        assert [len(rows) for rows in logits[1:]] == list(counts)
    hook.remove()
    assert [shape for shape in shapes if shape > 1] == [ASKED, ASKED, 2 * ASKED]


def test_hidden_states_are_copied_up_to_the_first_position_without_one() -> None:
    states = HiddenStates(6, 2, torch.device("cpu"))
    rows = torch.arange(12.0).reshape(6, 2)
    states.append(rows[:3], 4)
    states.append(rows[4:], 2)
    assert states.known.tolist() == [True, True, True, False, True, True]
    assert states.nbytes == HiddenStates.bytes_for(6, 2) == 24

    def copied(start: int, stop: int) -> list[list[float]] | None:
        found = states.copy(start, stop)
        return None if found is None else found.tolist()

    assert copied(0, 2) == rows[:2].tolist()
    assert copied(2, 6) == rows[2:3].tolist()
    assert copied(3, 6) is None
    assert copied(4, 8) == rows[4:].tolist()
    assert copied(6, 8) is None
    assert states.take([5, 0]).tolist() == rows[[5, 0]].tolist()
    states.release()
    assert (states.nbytes, states.copy(0, 2)) == (0, None)


class Weights(nn.Module):
    """A model of so many weights beside its embedding and its head, which take no memory."""

    def __init__(self, weights: float, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        with torch.device("meta"):
            self.ends = nn.ModuleList([nn.Embedding(1000, 10), nn.Linear(10, 1000)])
            self.rest = nn.Parameter(torch.empty(int(weights)))
        self.dtype, self.device = dtype, SimpleNamespace(type=device)

    def get_input_embeddings(self) -> nn.Module:
        return self.ends[0]

    def get_output_embeddings(self) -> nn.Module:
        return self.ends[1]


@pytest.mark.parametrize(
    ("capability", "dtype", "weights", "size"),
    [
        ("AVX512", torch.bfloat16, 1e5, 512),
        ("AVX512", torch.bfloat16, 1.06e8, 256),
        ("AVX512", torch.bfloat16, 3.6e8, 64),
        ("AVX512", torch.float32, 1.06e8, 256),
        ("AVX512", torch.bfloat16, 8e9, 32),
        ("AVX2", torch.bfloat16, 1.06e8, 32),
        ("DEFAULT", torch.float32, 2e7, 128),
    ],
)
def test_chunks_are_as_long_as_model_type_and_cpu_say(
    capability: str, dtype: torch.dtype, weights: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model: Any = Weights(weights, dtype)
    assert chunk_size(model) == size
    elsewhere: Any = Weights(weights, dtype, "cuda")
    assert chunk_size(elsewhere) == 512


def test_chunks_in_the_compiled_loops_are_as_short_as_their_time_says_and_change_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("reader_rag.model.compiled.forward.slow_products", lambda: True)
    monkeypatch.setattr(CpuForward, "chunk", 64)
    target, text = Target(make_model("Llama").to(torch.bfloat16)), random_tokens(5, 200, VOCABULARY)
    assert target.cpu is not None

    def committed() -> list[int]:
        """Positions after each chunk; the logits after the last one go to `ends`."""
        cache = target.new_cache(200, 0)
        chunks = [(cache.length, logits) for logits in target.prefill_chunks(text, cache)]
        ends.append(chunks[-1][1])
        lengths = [0, *(length for length, _ in chunks)]
        return [after - before for before, after in pairwise(lengths)]

    ends: list[torch.Tensor] = []
    clock = iter(float(tick) for tick in range(10**6))
    with monkeypatch.context() as patch:
        patch.setattr(step.time, "perf_counter", lambda: next(clock))
        assert committed() == [64, 32, 16, *[8] * 11]
    with monkeypatch.context() as patch:
        patch.setattr(step.time, "perf_counter", lambda: 0.0)
        assert committed() == [8, 16, 32, 64, 64, 16]
    assert torch.equal(*ends)
