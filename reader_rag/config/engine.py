"""Settings of an engine: how the model is loaded, and how it decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from reader_rag.config.batch import BatchConfig
from reader_rag.config.datastore import DatastoreConfig
from reader_rag.config.draft import DraftConfig
from reader_rag.config.setting import Settings, setting, settings_of
from reader_rag.errors import ConfigError

Exactness = Literal["fast", "strict"]
Forward = Literal["auto", "torch"]
CudaGraphs = Literal["auto", "on", "off"]
ProfileMode = Literal["auto", "off"]
Quantization = Literal["none", "int8"]


@dataclass(frozen=True)
class LoadConfig(Settings):
    """How a model is loaded."""

    dtype: str = setting("auto", 'Type of the weights: "auto", "float32", "bfloat16" or "float16".')
    quantization: Quantization = setting(
        "none",
        '"int8": linear layers have 8-bit integer weights and multiply 8-bit integer activations, which takes about a '
        'quarter of the memory of float32, and rounds; dtype is that of the rest, where "auto" is 16 bits. "none": the '
        "model as it is.",
    )
    device: str = setting("auto", 'Where the model is computed: "auto", "cpu", "cuda" or "cuda:N".')
    trust_remote_code: bool = setting(False, "Whether code that comes with the model may run.")


@dataclass(frozen=True)
class EngineConfig(Settings):
    """Settings of an engine, for all its requests."""

    draft: DraftConfig = setting(DraftConfig(), "How drafts are made.")
    exactness: Exactness = setting(
        "fast",
        '"fast": a pass has the shape it needs, and drafted answers equal plain decoding up to rounding: in float32 '
        'always, in 16-bit types nearly always. "strict": bit for bit equal to plain decoding of the same engine in '
        "every type; at no cost where compiled loops compute the model, else by passes of one fixed shape.",
    )
    forward: Forward = setting(
        "auto",
        '"auto": known models on the CPU are computed in compiled loops, about twice as fast as their own forward. '
        '"torch": the model\'s own forward is always called.',
    )
    strict_width: int | None = setting(
        None,
        "Positions of every pass in strict mode where shapes are fixed; drafts are one token shorter. None: the "
        "default of the kind of device. Rounded up to a multiple of 4.",
        ge=2,
        le=256,
    )
    cuda_graphs: CudaGraphs = setting(
        "auto",
        '"auto": on a CUDA device, decode steps have few shapes, each recorded as a CUDA graph and replayed, where '
        'the model allows it. "on": the same shapes on the CPU too, not recorded, with forward="torch": for tests. '
        '"off": every step has the shape it needs.',
    )
    batch: BatchConfig = setting(BatchConfig(), "Settings of the scheduler: batch size, KV cache memory and queue.")
    prefix_bytes: int | None = setting(
        None,
        "Most bytes of the prefix cache, on the model's device; 0 turns it off. None: 256 MiB on "
        "the CPU, 1 GiB elsewhere.",
        ge=0,
    )
    profile: ProfileMode = setting(
        "auto",
        '"auto": while the engine is idle it computes which tokens its model finds likely after each single token, for '
        "better drafts, for at most 10 minutes of processor time in all, and keeps them in the cache folder; the "
        'default model has such a profile. "off": it computes nothing while it is idle.',
    )
    draft_model: str | None = setting(
        None,
        "A model that drafts beside the search: alias, local folder or hub id of a smaller causal language model, best "
        "of the same vocabulary, or of an EAGLE-3 head in the speculators format. None: there is none.",
    )
    draft_quantization: Quantization = setting(
        "none", 'How the draft model is loaded; "int8": as `quantization` says, for smaller language models only.'
    )
    datastore: str | Path | None = setting(
        None, "Folder of texts and earlier answers that drafts are searched in; None: there is none."
    )
    recall: DatastoreConfig = setting(DatastoreConfig(), "Limits of the datastore search, and which answers are kept.")

    @classmethod
    def of(cls, values: Mapping[str, Any], base: Self | None = None) -> Self:
        """As `Settings.of`; settings of loading are refused with a line of their own."""
        for name in settings_of(LoadConfig).keys() & values.keys():
            raise ConfigError(f"{name} is decided when a model is loaded: give it to Engine.load (or to load_model)")
        if isinstance(values.get("draft_model"), Path):
            values = {**values, "draft_model": str(values["draft_model"])}
        return super().of(values, base)
