"""The forward pass of an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from reader_rag.engine.draft_models.eagle3_config import Eagle3Config
from reader_rag.errors import ModelError


class KeysAndValues:
    """Keys and values of one sequence in the layers of a head.

    Args:
        layers: Number of layers.
        heads: Key heads.
        positions: Most positions.
        width: Of a head.
        like: A tensor of their type, on their device.

    Attributes:
        length: Positions that hold something.
    """

    def __init__(self, layers: int, heads: int, positions: int, width: int, like: torch.Tensor) -> None:
        self.length = 0
        self._both = like.new_zeros(2, layers, heads, positions, width)

    def copy(self, start: int, stop: int) -> torch.Tensor:
        """Keys and values [2, layers, heads, stop - start, width] of some positions.

        Args:
            start: The first position.
            stop: One past the last.
        """
        return self._both[:, :, :, start:stop].clone()

    def append(self, both: torch.Tensor) -> None:
        """Write keys and values behind the first `length` positions, which are then more.

        Args:
            both: [2, layers, heads, rows, width].
        """
        rows = both.shape[3]
        self._both[:, :, :, self.length : self.length + rows] = both
        self.length += rows

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write behind the first `length` positions.

        Args:
            layer: The layer.
            keys: [heads, rows, width].
            values: [heads, rows, width].

        Returns:
            Keys and values [heads, length + rows, width], those before included.
        """
        end = self.length + keys.shape[1]
        self._both[0, layer, :, self.length : end] = keys
        self._both[1, layer, :, self.length : end] = values
        return self._both[0, layer, :, :end], self._both[1, layer, :, :end]


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config, inputs: int) -> None:
        super().__init__()
        layer: Any = config.layer
        self.width = int(layer.head_dim or layer.hidden_size // layer.num_attention_heads)
        queries, keys = layer.num_attention_heads * self.width, layer.num_key_value_heads * self.width
        bias = bool(layer.attention_bias)
        self.q_proj = nn.Linear(inputs, queries, bias=bias)
        self.k_proj = nn.Linear(inputs, keys, bias=bias)
        self.v_proj = nn.Linear(inputs, keys, bias=bias)
        self.o_proj = nn.Linear(queries, layer.hidden_size, bias=bias)
        if config.norms_queries:
            self.q_norm = LlamaRMSNorm(self.width, layer.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.width, layer.rms_norm_eps)

    def forward(self, x: torch.Tensor, angles: Any, cache: KeysAndValues, number: int) -> torch.Tensor:
        rows = len(x)
        q, k, v = (part(x).view(1, rows, -1, self.width) for part in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *angles)
        keys, values = cache.write(number, k[0], v[0].transpose(0, 1))
        seen = torch.ones(rows, keys.shape[1], dtype=torch.bool, device=x.device).tril(keys.shape[1] - rows)
        attended = nn.functional.scaled_dot_product_attention(
            q, keys[None], values[None], attn_mask=None if rows == 1 else seen, enable_gqa=True
        )
        out: torch.Tensor = self.o_proj(attended[0].transpose(0, 1).reshape(rows, -1))
        return out


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config, first: bool) -> None:
        super().__init__()
        layer: Any = config.layer
        width, epsilon = layer.hidden_size, layer.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = _Attention(config, 2 * width if first else width)
        self.mlp = LlamaMLP(layer)
        self.input_layernorm = LlamaRMSNorm(width, epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(width, epsilon)
        if first:
            self.hidden_norm = LlamaRMSNorm(width, epsilon)

    def forward(
        self, x: torch.Tensor, embedded: torch.Tensor, angles: Any, cache: KeysAndValues, number: int
    ) -> torch.Tensor:
        residual = x
        if number == 0:
            x = self.hidden_norm(x)
            residual = x if self.norm_before_residual else residual
            x = torch.cat([self.input_layernorm(embedded), x], dim=-1)
        else:
            x = self.input_layernorm(x)
        x = residual + self.self_attn(x, angles, cache, number)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3Head(nn.Module):
    """An EAGLE-3 head: from the target's hidden state at a position and the token behind it, what comes next.

    Args:
        config: What it computes.
        embedding: The target's, for a head without its own.
        output: The target's output head, likewise.

    Attributes:
        config: As given.
        targets: int64 [draft vocabulary], the target's token id of each token that it can draft; None: the same ids.
    """

    def __init__(self, config: Eagle3Config, embedding: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.targets: torch.Tensor | None = None
        layer: Any = config.layer
        width, combined = layer.hidden_size, config.target_width * len(config.hidden_layers)
        with torch.device("meta"):  # `load` brings the weights
            self.embed_tokens: nn.Module = nn.Embedding(layer.vocab_size, width)
            self.fc = nn.Linear(combined, width, bias=False)
            if config.norm_before_fc:
                self.input_norm = LlamaRMSNorm(combined, layer.rms_norm_eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(
                    LlamaRMSNorm(config.target_width, layer.rms_norm_eps) for _ in config.hidden_layers
                )
            self.layers = nn.ModuleList(_Layer(config, n == 0) for n in range(layer.num_hidden_layers))
            self.norm = LlamaRMSNorm(width, layer.rms_norm_eps)
            self.lm_head: nn.Module = nn.Linear(width, config.draft_vocabulary, bias=False)
        self.rotary = LlamaRotaryEmbedding(layer)
        same_width = layer.hidden_size == config.target_width
        self._shared = {
            "embed_tokens": (embedding, same_width and config.target_vocabulary == layer.vocab_size),
            "lm_head": (output, same_width and config.target_vocabulary == config.draft_vocabulary),
        }

    def load(self, weights: Mapping[str, torch.Tensor], name: str, device: torch.device, dtype: torch.dtype) -> None:
        """Take the weights of a checkpoint.

        Args:
            weights: By name, in either of the two ways of naming them.
            name: The head's name in messages.
            device: Where they go.
            dtype: Their type.

        Raises:
            ModelError: Weights are missing, are of another shape, or the mapping of the vocabulary is not valid.
        """
        given = {
            key.removeprefix("model.").replace("midlayer.", "layers.0."): value
            for key, value in weights.items()
            if key not in ("d2t", "t2d", "mask_hidden")
        }
        missing = {part: shared for part, shared in self._shared.items() if f"{part}.weight" not in given}
        for part, (_, fits) in missing.items():
            if not fits:
                raise ModelError(f"{name} has no {part}.weight, and the model's does not fit: it is another model's")
            setattr(self, part, nn.Identity())
        try:
            found = self.load_state_dict(given, strict=False, assign=True)
        except RuntimeError as error:
            raise ModelError(f"{name} has weights of other shapes than its config.json says: {_last(error)}") from error
        if found.missing_keys or found.unexpected_keys:
            what = (
                f"lacks {found.missing_keys[0]}" if found.missing_keys else f"has {found.unexpected_keys[0]} too much"
            )
            raise ModelError(f"{name} {what}: it is damaged, or a head of another kind")
        self.to(device, dtype)
        for part, (module, _) in missing.items():
            setattr(self, part, module)
        if "d2t" in weights:
            offsets = weights["d2t"].to(torch.int64)
            if offsets.shape != (self.config.draft_vocabulary,):
                raise ModelError(f"{name} maps {len(offsets)} of its {self.config.draft_vocabulary} tokens (d2t)")
            self.targets = (offsets + torch.arange(len(offsets))).to(device)

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of a position."""
        layer: Any = self.config.layer
        width = int(layer.num_key_value_heads * layer.head_dim)
        return 2 * len(self.layers) * width * self.fc.weight.dtype.itemsize

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as the head takes them.

        Args:
            states: [rows, layers * target width], the outputs of `Eagle3Config.hidden_layers` side by side.

        Returns:
            [rows, width].
        """
        states = states.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            states = self.input_norm(states)
        if self.config.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        out: torch.Tensor = self.fc(states)
        return out

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, first: int, cache: KeysAndValues
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over consecutive positions; keys and values are written, and `cache.length` stays.

        Args:
            tokens: int64 [rows], the token behind each position.
            states: [rows, width], combined hidden states at them, or what an earlier pass returned.
            first: The first position.
            cache: Of the positions before.

        Returns:
            Logits [1, draft vocabulary] after the last row, and its state, from which a drafted token continues.
        """
        embedded = self.embed_tokens(tokens).to(states.dtype)
        angles = self.rotary(embedded[None], torch.arange(first, first + len(tokens), device=tokens.device)[None])
        x = states
        for number, layer in enumerate(self.layers):
            x = layer(x, embedded, angles, cache, number)
        last = x[-1:]
        normed = self.norm(last)
        logits: torch.Tensor = self.lm_head(normed)
        return logits, normed if self.config.norm_output else last


def _last(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[-1].strip()
