"""The sections of `bench report`: the commands of each, with budgets in minutes that `plan` scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from reader_rag.bench.figures.parts import Inputs, Part, Section

RAG = "rag"
"""The category of questions with retrieved passages."""
_TYPES: Mapping[str, tuple[str, ...]] = {
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
}
"""Options by type of the weights."""
_Arguments = tuple[str | Path, ...]


def _generate(inputs: Inputs, label: str, minutes: float, *options: str, categories: str, limit: int) -> Part:
    arguments: _Arguments = (
        *("bench", "generate", "--model", inputs.model, "--prompts", inputs.prompts, "--categories", categories),
        *("--limit", str(limit), "--max-tokens", str(inputs.max_tokens), *options, "--json"),
    )
    return Part(label, arguments, minutes, timed_runs=1)


def speed(inputs: Inputs, with_llama_cpp: bool) -> Section:
    """Plain and drafted decoding beside `transformers` and llama.cpp.

    Args:
        inputs: What is measured.
        with_llama_cpp: Whether llama.cpp is installed, and the model there as a GGUF file.
    """
    parts = []
    for label, options in _TYPES.items():
        methods = "plain,reader,hf,hf-lookup" + (",llama-cpp" if with_llama_cpp and label == "int8" else "")
        parts.append(_generate(inputs, label, 9, *options, "--methods", methods, categories=RAG, limit=inputs.limit))
    return Section(
        "speed",
        "Speed, one question at a time",
        "Questions with retrieved passages; every method decodes the same prompts in turn, on the same threads.",
        tuple(parts),
    )


def other_prompts(inputs: Inputs) -> list[Section]:
    """Each category without retrieved passages; no section if there is none.

    Args:
        inputs: What is measured.
    """
    others = [category for category in inputs.categories if category != RAG]
    if not others:
        return []
    limit = max(inputs.limit // 2, 1)
    parts = tuple(
        _generate(inputs, name, 1.5, "--dtype", "bfloat16", "--methods", "plain,reader", categories=name, limit=limit)
        for name in others
    )
    about = "Prompts of other kinds: the less an answer repeats of its prompt, the less drafts gain."
    return [Section("other-prompts", "Other prompts", about, parts)]


def batches(inputs: Inputs) -> Section:
    """Several questions at once.

    Args:
        inputs: What is measured.
    """
    sizes = (1, 4, 8)
    options = ("--dtype", "bfloat16", "--methods", "plain,reader", "--batch", ",".join(map(str, sizes)))
    part = _generate(inputs, "bfloat16", 4, *options, categories=RAG, limit=2 * inputs.limit)
    return Section(
        "batches",
        "Several questions at once",
        "The more sequences a pass holds, the less room it has for drafts.",
        (replace(part, timed_runs=len(sizes)),),
    )


def _verify(inputs: Inputs, limit: int, *options: str) -> _Arguments:
    return (
        *("verify", "--model", inputs.model, "--prompts", inputs.prompts, "--limit", str(limit)),
        *("--max-tokens", str(inputs.max_tokens // 2), *options, "--json"),
    )


def exactness(inputs: Inputs) -> Section:
    """Drafted against plain decoding, as the engine decodes.

    Args:
        inputs: What is measured.
    """
    few = max(inputs.limit // 3, 1)
    wanted = {
        **_TYPES,
        "float32, four at once": ("--dtype", "float32", "--batch", "4"),
        "float32, sampled": ("--dtype", "float32", "--temperature", "0.8", "--top-p", "0.95", "--seeds", "0,1"),
    }
    return Section(
        "exactness",
        "Exactness",
        "Drafted and plain decoding of the same prompts, compared token by token and by the bits of the logits.",
        tuple(Part(label, _verify(inputs, few, *options), 2.0) for label, options in wanted.items()),
    )


def rounding(inputs: Inputs) -> Section:
    """The same in the model's own forward, whose rounding depends on the number of positions of a pass.

    Args:
        inputs: What is measured.
    """
    parts = tuple(
        Part(
            dtype,
            _verify(inputs, max(inputs.limit // 4, 1), "--categories", RAG, "--forward", "torch", "--dtype", dtype),
            1.5,
        )
        for dtype in ("float32", "bfloat16", "float16")
    )
    return Section(
        "rounding",
        "Rounding of PyTorch's forward",
        "The same in the `forward` of `transformers`, in fast mode: of each answer up to its first difference.",
        parts,
    )


def memory(inputs: Inputs) -> Section:
    """Memory of loading a model.

    Args:
        inputs: What is measured.
    """
    parts = tuple(
        # The first start in int8 quantises the model.
        Part(
            label,
            ("bench", "load-memory", "--model", inputs.model, *options, "--json"),
            3.0 if label == "int8" else 1.0,
        )
        for label, options in _TYPES.items()
    )
    return Section(
        "memory",
        "Memory of loading a model",
        "Anonymous memory of a new process in megabytes: when its libraries are loaded, at the peak, and when the "
        "model is ready; at the first start and at later ones, which find what the first has kept.",
        parts,
    )


def replayed(inputs: Inputs) -> list[Section]:
    """What is counted and timed on recorded answers, which are recorded first if there are none.

    Args:
        inputs: What is measured.
    """
    sections = []
    traces, top8 = inputs.traces, inputs.top8
    if traces is None:
        traces = inputs.work / "traces.jsonl"
        top8 = traces.with_suffix(".npz")
        arguments: _Arguments = (
            *("bench", "record", traces, "--model", inputs.model, "--prompts", inputs.prompts),
            *("--limit", str(inputs.limit), "--max-tokens", str(inputs.max_tokens)),
        )
        about = "Greedy answers in float32, on which the sections below count and time."
        sections.append(Section("record", "Recorded answers", about, (Part("float32", arguments, 5.0, False),)))
    options: _Arguments = (traces, *(() if top8 is None else ("--top8", top8)))
    return [
        *sections,
        Section(
            "tokens-per-step",
            "Tokens per step, beside other drafters",
            "Counted on recorded answers: each drafter proposes, and what the model said is accepted.",
            (Part("all", ("bench", "replay", *options, "--peers", "--ablation", "--json"), 3.0),),
            replays=True,
        ),
        _tree_size(options),
        Section(
            "drafting",
            "Time of drafting",
            "Microseconds, on recorded answers.",
            (Part("all", ("bench", "drafting", *options, "--categories", RAG, "--json"), 1.0),),
            replays=True,
        ),
        Section(
            "recall",
            "Earlier answers as drafts",
            "Tokens per step with earlier answers in a datastore, and without. Other questions: the first half of each "
            "category is in the datastore, and the second half is asked. The same questions: all are in it.",
            (
                Part("other questions", ("bench", "recall", *options, "--json"), 0.75),
                Part("the same questions", ("bench", "recall", *options, "--known", traces, "--json"), 0.75),
            ),
            replays=True,
        ),
        _int8(inputs, traces),
    ]


def _tree_size(options: _Arguments) -> Section:
    """Tokens per step by the size of a draft tree, and by what its estimates know."""
    wanted: dict[str, tuple[str, ...]] = {f"{nodes} nodes": ("--nodes", str(nodes)) for nodes in (64, 32, 16, 8)}
    wanted["64 nodes, all successors of the prompt"] = ("--nodes", "64", "--eager-successors")
    wanted["64 nodes, no calibration"] = ("--nodes", "64", "--no-calibration")
    return Section(
        "tree-size",
        "Tokens per step, by the size of a tree",
        "Counted on recorded answers. The gap is the mean difference between predicted and observed acceptance.",
        tuple(Part(label, ("bench", "replay", *options, *more, "--json"), 0.5) for label, more in wanted.items()),
        replays=True,
    )


def _int8(inputs: Inputs, traces: Path) -> Section:
    arguments: _Arguments = (
        *("verify", "--model", inputs.model, "--quantization", "int8", "--against", "float32", "--replay", traces),
        *("--limit", str(max(inputs.limit // 2, 1)), "--max-tokens", str(inputs.max_tokens), "--json"),
    )
    return Section(
        "int8",
        "int8 against float32",
        "Both models read the same recorded answers, position by position.",
        (Part("int8", arguments, 3.0),),
        replays=True,
    )


def datastore(inputs: Inputs) -> Section:
    """Time, bytes and memory of datastores of several sizes.

    Args:
        inputs: What is measured.
    """
    sizes = "1e4" if inputs.quick else "1e6,1e7,1e8"
    return Section(
        "datastore",
        "Searching a datastore",
        "By the number of tokens in it: texts of the installed packages, one document a file.",
        (Part("all", ("bench", "datastore", "--tokens", sizes, "--json"), 6.0),),
    )


def cache(inputs: Inputs) -> Section:
    """The two policies of the batch cache.

    Args:
        inputs: What is measured.
    """
    size = ("--batch", "2", "--layers", "1") if inputs.quick else ("--batch", "4,8,16,32")
    return Section(
        "cache",
        "Policies of the batch cache",
        "The same random steps with both policies, without a model.",
        (Part("float32", ("bench", "cache", *size, "--json"), 4.0),),
    )


def vllm(inputs: Inputs) -> Section:
    """The drafters inside vLLM, with step costs that are measured first.

    Args:
        inputs: What is measured.
    """
    costs = inputs.work / "costs.json"
    measured: _Arguments = ("bench", "vllm-costs", "--model", inputs.model, "--dtype", "bfloat16", "--out", costs)
    shared: _Arguments = (
        *("bench", "vllm", "--model", inputs.model, "--prompts", inputs.prompts, "--categories", RAG),
        *("--dtype", "bfloat16", "--costs", costs, "--max-tokens", str(inputs.max_tokens // 2)),
    )
    few = max(inputs.limit // 2, 1)
    return Section(
        "vllm",
        "Inside vLLM",
        "The same engine with other drafters: `ngram` drafts ten tokens after n-grams of 2 to 4, `suffix` has vLLM's "
        "default settings.",
        (
            Part("costs", measured, 3.0, has_report=False),
            Part("1", (*shared, "--limit", str(few), "--json"), 5.0),
            Part("8", (*shared, "--limit", str(max(2 * few // 8, 1) * 8), "--batch", "8", "--json"), 5.0),
        ),
    )
