"""How a model can be decoded: found by trying, never by its name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from reader_rag.config import Exactness, Forward
from reader_rag.errors import ReaderWarning, UnsupportedModelError
from reader_rag.model.fixed_shape import FixedShape
from reader_rag.model.interface import Reuse, TargetModel
from reader_rag.model.plain_target import PlainTarget
from reader_rag.model.self_test import decodes_plainly, keeps_bits, restores, verifies_chains, verifies_trees
from reader_rag.model.target import Target, attention_of, keeps_state, takes_masks
from reader_rag.util.one_line import first_line

Drafting = Literal["tree", "chain", "none"]
"""Which drafts a model can verify: trees; chains only, where its attention takes no tree mask; none, where its state
cannot be rolled back."""

_NEIGHBOURS = "kernels compute a row differently depending on its neighbours"


def select_target(
    model: PreTrainedModel,
    *,
    name: str,
    exactness: Exactness = "fast",
    forward: Forward = "auto",
    strict_width: int | None = None,
) -> tuple[TargetModel, Drafting]:
    """Select how to decode a model with its own output: with draft trees, with chains, or without drafts.

    A model object is changed in two cases, and a `ReaderWarning` says so: an attention backend that takes no tree mask
    becomes "sdpa", and for "strict" experts are multiplied one token at a time where that keeps the bits.

    Args:
        model: A causal language model of `transformers`, in eval mode, or a PEFT model around one.
        name: Name of the model in messages.
        exactness: "fast": passes have the shape they need; "strict": answers have the bits of plain decoding.
        forward: "auto": compiled loops for known models on the CPU; "torch": always the model's own forward.
        strict_width: Positions of every pass under "strict" where shapes are fixed; None: the device's default.

    Returns:
        The target, and what it verifies.

    Raises:
        UnsupportedModelError: Not even plain decoding gives what the model gives for whole texts, "strict" cannot be
            kept, or the model has prompts of its own (prefix or prompt tuning).
    """
    model = _inner(model, name)
    if keeps_state(model):
        kind = getattr(model.config, "model_type", type(model).__name__)
        return _plain(model, name, f"{kind} models keep a state that cannot be rolled back")
    why = _make_masked(model, name)
    if not why:
        target, why = _tried(lambda: Target(model, None, forward), verifies_trees, "the tree mask or the positions")
        if target is not None:
            if exactness == "strict":
                target = _made_strict(target, FixedShape.of(model, strict_width), forward, name)
            return target, "tree"
    chains, why_not = _tried(lambda: Target(model, forward="torch", branches=False), verifies_chains, "a cache of ours")
    if chains is None:
        return _plain(model, name, f"{why}; and with chains, {why_not}")
    if exactness == "strict" and not keeps_bits(chains, branches=False):
        raise UnsupportedModelError(
            f"{name} on {chains.device}: drafts have no fixed shape ({why}) and {_NEIGHBOURS}, so exactness='strict' "
            "cannot be kept; use exactness='fast'"
        )
    _note(f"{name}: drafts have no branches, which makes answers slower and no different ({why})")
    return chains, "chain"


def select_reuse(target: TargetModel, exactness: Exactness) -> Reuse | None:
    """Which keys and values sequences with the same prefix may reuse; None: none, every prompt is prefilled whole.

    Args:
        target: The model.
        exactness: "strict": reuse must not change any bit; "fast": it may round differently.
    """
    reuse = target.reuse(strict=exactness == "strict")
    if reuse is None or target.cpu is not None:
        return reuse
    try:
        return reuse if restores(target) else None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # an unknown model may raise anything; then every prompt is prefilled whole
        return None


def _inner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The model itself where an adapter library has put another around it; adapters stay in its layers."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(model, "get_base_model"):
        return model
    if any(getattr(config, "is_prompt_learning", False) for config in configs.values()):
        raise UnsupportedModelError(
            f"{name}: adapters that put tokens of their own before the prompt cannot be decoded here; use an adapter "
            "of the weights (LoRA and its like)"
        )
    around: Any = model
    inner: PreTrainedModel = around.get_base_model()
    return inner


def _tried(make: Callable[[], Target], check: Callable[[TargetModel], bool], what: str) -> tuple[Target | None, str]:
    """A target that passes its check, or None and the reason."""
    try:
        target = make()
        return (target, "") if check(target) else (None, f"the model ignores {what}")
    except torch.OutOfMemoryError:
        raise
    except UnsupportedModelError as reason:
        return None, str(reason)
    except Exception as cause:  # whatever a model raises that was not made for this
        return None, f"the model fails on {what}: {first_line(cause)}"


def _plain(model: PreTrainedModel, name: str, why: str) -> tuple[TargetModel, Drafting]:
    target = PlainTarget(model)
    try:
        right = decodes_plainly(target)
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:
        raise UnsupportedModelError(
            f"{name}: {type(model).__name__} can be decoded neither with drafts ({why}) nor without: "
            f"{first_line(cause)}"
        ) from cause
    if not right:
        raise UnsupportedModelError(
            f"{name}: drafts cannot be verified on {type(model).__name__} ({why}), and one token at a time it gives "
            "other logits than for a whole text, or mixes texts that are read in turn"
        )
    _note(f"{name}: decoded without drafts, one token at a time ({why})")
    return target, "none"


def _make_masked(model: PreTrainedModel, name: str) -> str:
    """Change an attention backend that takes no tree mask; "", or why that was not possible."""
    if takes_masks(model):
        return ""
    before = attention_of(model)
    why = f"the attention backend {before!r} takes no tree mask"
    refusals = []
    for backend in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(backend)
        except (ValueError, ImportError, AttributeError) as cause:
            refusals.append(f"{backend!r} cannot be used: {first_line(cause)}")
            continue
        if takes_masks(model):
            _note(f"{name}: {why}; the model's attention is now {backend!r}")
            return ""
    return f"{why}, and {' and '.join(refusals) or 'it cannot be changed'}"


def _made_strict(free: Target, shape: FixedShape, forward: Forward, name: str) -> Target:
    """A target whose drafts have the bits of plain decoding; how experts are multiplied may change for it.

    Args:
        free: The verified target without a fixed shape.
        shape: The fixed shape, used where a row's bits depend on the rows beside it.
        forward: "auto": compiled loops for known models on the CPU; "torch": always the model's own forward.
        name: Name of the model in messages.

    Raises:
        UnsupportedModelError: Drafts do not have the bits of plain decoding; the model is unchanged.
    """
    model: Any = free.model
    before = getattr(model.config, "_experts_implementation", None)
    # Grouped by expert, a row's product depends on how many rows its expert got, though a check may not meet it.
    changes = before not in (None, "batched_mm") and model._can_set_experts_implementation()
    if changes:
        model.set_experts_implementation("batched_mm")
    kept = False
    try:
        target = Target(model, shape, forward)
        kept = keeps_bits(target) and (not changes or verifies_trees(free))
    finally:
        if changes and not kept:
            model.set_experts_implementation(before)
    if kept:
        if changes:
            _note(f"{name}: for exactness='strict', the model's experts are now 'batched_mm' instead of {before!r}")
        return target
    raise UnsupportedModelError(
        f"{name} on {target.device}: {_NEIGHBOURS}, so exactness='strict' cannot be kept; use exactness='fast', or "
        "dtype='float32'"
    )


def _note(message: str) -> None:
    warnings.warn(message, ReaderWarning, stacklevel=2)
