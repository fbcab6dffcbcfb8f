"""Whether a target gets a fixed step: found by trying; a warning says why where it does not."""

from __future__ import annotations

import warnings

import torch

from reader_rag.config import CudaGraphs
from reader_rag.draft.tree import DraftTree
from reader_rag.errors import ConfigError, ReaderWarning
from reader_rag.model.fixed_step.checks import data_dependent_call
from reader_rag.model.fixed_step.graphs import CudaRecorder, GraphRecorder
from reader_rag.model.fixed_step.long_context import LongContexts, seconds_on
from reader_rag.model.fixed_step.step import FixedStep
from reader_rag.model.interface import Step, TargetModel, prefill
from reader_rag.model.self_test import keeps_bits, keeps_bits_of_trees, verifies_chains, verifies_trees
from reader_rag.model.target import Target, attention_of
from reader_rag.sampling.noise import Draw
from reader_rag.util.one_line import first_line

_PROMPT = 8
"""Tokens before the pass that is watched."""
_CHAIN = 6
"""Tokens of the chain of `verifies_chains`."""


def add_fixed_step(
    target: TargetModel,
    mode: CudaGraphs,
    *,
    name: str,
    max_bytes: int | None = None,
    recorder: GraphRecorder | None = None,
) -> FixedStep | None:
    """Give a target a fixed step, where its model has one; else it keeps the dynamic step alone.

    Args:
        target: Of the model; its `fixed_step` is set.
        mode: "auto": on CUDA devices; "on": on every device, recorded on CUDA devices; "off": never.
        name: Name of the model in messages.
        max_bytes: Most bytes of its key/value cache; None: as many as the sequences need.
        recorder: Records passes; None: CUDA graphs on CUDA devices, nothing elsewhere.

    Returns:
        The fixed step; None: there is none. A `ReaderWarning` says why, where there might be one.

    Raises:
        ConfigError: It is "on" and compiled loops compute the model, which have no fixed step.
    """
    on_cuda = target.device.type == "cuda"
    if mode == "off" or (mode == "auto" and not on_cuda):
        return None
    if target.cpu is not None:
        raise ConfigError(
            "cuda_graphs='on' runs the model's own forward in fixed shapes, and compiled loops compute this model: set "
            "forward='torch' too, or cuda_graphs='auto'"
        )
    if not isinstance(target, Target) or not target.kinds:
        return None  # a warning about the way of decoding was given already
    recorder = CudaRecorder() if recorder is None and on_cuda else recorder
    step = FixedStep(
        target.model,
        target.kinds,
        target.to_backend,
        recorder=recorder,
        fixed=target.fixed,
        layers=target.layers,
        max_bytes=max_bytes,
        position_bytes=target.position_bytes,
        capacity=target.capacity,
        head=target.logits_of,
    )
    why = _refusal(target, step)
    if why is None:
        if target.fixed is None:
            step.long_contexts = _long_contexts(target, step)
        else:
            _allow_branches(target, step, target.fixed.width)
        return step
    target.fixed_step = None
    warnings.warn(
        f"{name}: every decode step has the shape it needs and none is recorded as a CUDA graph ({why}); answers are "
        "the same, slower on a GPU",
        ReaderWarning,
        stacklevel=2,
    )
    return None


def _refusal(target: Target, step: FixedStep) -> str | None:
    """Why a target cannot use a fixed step; None: it can, and has it."""
    if any(hasattr(module, "merged_adapters") for module in target.model.modules()):
        return "adapters may be exchanged at any time"
    if target.switch is not None:
        return "its rotary angles depend on the length of the text"
    target.fixed_step = step
    try:
        call = _call_in_a_pass(target, step) if step.graphs.recorder is not None else None
        if call is not None:
            return f"the outcome of {call} depends on the contents of tensors"
        if not _verifies(target):
            return "its logits are others in fixed shapes"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises that was not made for this
        return f"it fails in fixed shapes: {first_line(error)}"
    return None


def _long_contexts(target: Target, step: FixedStep) -> LongContexts | None:
    """The choice of columns for a fixed step; None: its model does not attend in two calls as in one."""
    heads = getattr(target.config, "num_attention_heads", 0)
    if not heads or attention_of(target.model) != "sdpa":
        return None
    recorder = step.graphs.recorder
    step.long_contexts = always = LongContexts(step.cache, target.kinds, heads, None, least=1)
    try:
        joins = verifies_trees(target) and bool(always.chosen)
        joins = joins and (recorder is None or _call_in_a_pass(target, step) is None)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model with an attention of its own takes no mask of fewer columns; it keeps one call
        joins = False
    finally:
        step.long_contexts = None
    return LongContexts(step.cache, target.kinds, heads, seconds_on(target.device, recorder)) if joins else None


def _allow_branches(target: Target, step: FixedStep, width: int) -> None:
    """Verify trees in strict mode, where attention along paths gives a node the bits of plain decoding."""
    if attention_of(target.model) != "sdpa" or any(target.kinds.values()) or not target.layers or width <= _CHAIN:
        return
    step.verifies_branches = True
    try:
        verifies = verifies_trees(target) and keeps_bits_of_trees(target, width - 1)
        verifies = verifies and (step.graphs.recorder is None or _call_in_a_pass(target, step) is None)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model with an attention of its own takes no columns in place of a mask; it keeps chains
        verifies = False
    step.verifies_branches = verifies
    if verifies:
        step.cache.max_bytes = None  # a dynamic step would round otherwise; the scheduler admits what has room


@torch.inference_mode()
def _call_in_a_pass(target: Target, step: FixedStep) -> str | None:
    """A data-dependent call in one pass over a tree, on the device; without what the host does around it."""
    cache = target.new_cache(_PROMPT + 3, 2)
    prefill(target, list(range(1, 1 + _PROMPT)), cache)
    shape, *_ = step.prepare([Step(1, DraftTree.from_chain([1, 2]), cache, draw=Draw(0))])
    assert shape is not None
    step.forward(shape)  # the first use of a module may fill a table on the host
    return data_dependent_call(lambda: step.forward(shape))


def _verifies(target: Target) -> bool:
    """Whether trees, or in strict mode chains, have the logits of plain text in fixed shapes."""
    if target.fixed is None:
        return verifies_trees(target)
    return keeps_bits(target) and (target.fixed.width <= _CHAIN or verifies_chains(target))
