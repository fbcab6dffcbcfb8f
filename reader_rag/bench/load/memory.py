"""Anonymous memory while a model is loaded, sampled in a process of its own: `bench load-memory`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from reader_rag.errors import ModelError
from reader_rag.model.loading import load_model
from reader_rag.model.quantization import loader  # noqa: F401  loaded before the memory is measured
from reader_rag.model.target import Target
from reader_rag.util.one_line import first_line

_STATUS = Path("/proc/self/status")
_INTERVAL_S = 0.002
_TIMEOUT_S = 3600
SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A model that loads at once, whatever the machine."""


def make_random_model(
    config: Mapping[str, Any], folder: Path, *, dtype: str = "bfloat16", shard_bytes: int = 1 << 28
) -> None:
    """Write a model of random weights, tensor by tensor in several files, with a tokenizer of bytes.

    Args:
        config: Fields of a `config.json` of `transformers`, `model_type` among them.
        folder: An existing folder.
        dtype: Type of the weights in the files.
        shard_bytes: About the size of a file.
    """
    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    made.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    model.config.save_pretrained(folder)
    tied = "lm_head.weight" if getattr(made, "tie_word_embeddings", False) else ""
    shapes = {name: tensor for name, tensor in model.state_dict().items() if name != tied}
    random = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}

    def write() -> None:
        name = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        places.update(dict.fromkeys(shard, name))
        save_file(shard, folder / name, {"format": "pt"})
        shard.clear()

    for name, like in shapes.items():
        is_norm = like.dim() == 1 and name.endswith("weight")
        content = torch.ones(like.shape) if is_norm else torch.randn(like.shape, generator=random) * 0.02
        shard[name] = content.to(getattr(torch, dtype))
        if sum(tensor.nbytes for tensor in shard.values()) >= shard_bytes:
            write()
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    _bytes_tokenizer().save_pretrained(folder)


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def measure_loading(folder: Path, cache: Path, *, dtype: str = "auto", quantization: str = "none") -> dict[str, Any]:
    """Load a model in a new process, and sample the process's anonymous memory meanwhile.

    Args:
        folder: The model's folder.
        cache: The cache folder of that process.
        dtype: Type of the weights.
        quantization: "none" or "int8".

    Returns:
        Megabytes (1e6 bytes): `before_mb`, of the process with its libraries; `peak_mb`; `after_mb`, when the engine's
        forward pass is ready; `tensors_mb`, of the loaded model's tensors; `largest_mb`, of its largest matrix in
        float32; `bound_mb`, before + tensors + two largest.

    Raises:
        ModelError: The model cannot be loaded, or this system does not report anonymous memory.
    """
    if not _STATUS.exists():
        raise ModelError("this system does not report anonymous memory: measure on Linux")
    command = [sys.executable, "-m", "reader_rag.bench.load.memory", str(folder), dtype, quantization]
    environment = {**os.environ, "READER_RAG_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise ModelError(f"cannot load {folder}: {lines[-1]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _load_and_report(folder: str, dtype: str, quantization: Any) -> dict[str, Any]:
    """The report of `measure_loading`, of this process."""
    with TemporaryDirectory() as small:  # libraries load parts of themselves, and start threads, at their first use
        make_random_model(SMALL, Path(small))
        Target(load_model(Path(small), dtype=dtype, quantization=quantization, device="cpu")[0])

    before = _anonymous_bytes()
    with _peak() as peak:
        loaded, _ = load_model(Path(folder), dtype=dtype, quantization=quantization, device="cpu")
        target = Target(loaded)
    after = _anonymous_bytes()
    tensors = [*target.model.parameters(), *target.model.buffers()]
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    modules: list[Any] = [module for module in loaded.modules() if hasattr(module, "in_features")]
    matrices = [int(module.in_features) * int(module.out_features) for module in modules]
    total, largest = sum(stored.values()), 4 * max(matrices, default=0)
    numbers = {
        "before": before,
        "peak": peak[0],
        "after": after,
        "tensors": total,
        "largest": largest,
        "bound": before + total + 2 * largest,
    }
    return {f"{name}_mb": round(value / 1e6, 1) for name, value in numbers.items()}


def _anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s*(\d+) kB", _STATUS.read_text())
    assert found is not None, "Linux has RssAnon since 4.5"
    return int(found[1]) * 1024


@contextmanager
def _peak() -> Iterator[list[int]]:
    """A list with the greatest anonymous memory of the block, when it has ended."""
    ended, peak = threading.Event(), [_anonymous_bytes()]

    def sample() -> None:
        while not ended.wait(_INTERVAL_S):
            peak[0] = max(peak[0], _anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak[0] = max(peak[0], _anonymous_bytes())


if __name__ == "__main__":
    try:
        print(json.dumps(_load_and_report(*sys.argv[1:])))
    except Exception as error:
        sys.exit(first_line(error))
