"""The fields of `ReaderLLM` and the arguments of its calls are the settings of `reader_rag.config`."""

from __future__ import annotations

import pytest
from scripted_engine import ScriptedEngine

from reader_rag.config import DraftConfig, EngineConfig, LoadConfig, SamplingParams, Settings, ToolConfig, settings_of
from reader_rag.errors import ConfigError
from reader_rag.llm import ReaderLLM
from reader_rag.llm.settings import CALL_ARGUMENTS

BENCHMARKS = {"ignore_eos", "record_margins"}


@pytest.mark.parametrize(
    ("settings", "but"),
    [(SamplingParams, BENCHMARKS), (EngineConfig, {"draft"}), (LoadConfig, set[str]()), (ToolConfig, set[str]())],
)
def test_every_setting_is_a_field_with_its_type_default_and_documentation(
    settings: type[Settings], but: set[str]
) -> None:
    for name, (annotation, default, about) in settings_of(settings).items():
        if name in but:
            assert name not in ReaderLLM.model_fields
            continue
        field = ReaderLLM.model_fields[name]
        assert (field.annotation, field.default, field.description) == (annotation, default, about.doc)


def test_of_the_settings_of_drafts_there_is_the_number_of_nodes() -> None:
    assert ReaderLLM.model_fields["max_nodes"].default == DraftConfig().max_nodes
    assert not (settings_of(DraftConfig).keys() - {"max_nodes"}) & ReaderLLM.model_fields.keys()


def test_every_sampling_parameter_is_an_argument_of_a_call() -> None:
    others = {"max_nodes", "logits_processor", "stopping_criteria", "tenant", "recall", "prediction"}
    assert set(CALL_ARGUMENTS) == (settings_of(SamplingParams).keys() - BENCHMARKS) | others


@pytest.mark.parametrize("name", sorted(settings_of(SamplingParams).keys() - BENCHMARKS))
def test_a_field_reaches_the_engine_and_an_argument_takes_its_place(name: str) -> None:
    values = {
        "stop": (("a",), ("b",)),
        "bad_words": (("a",), ("b",)),
        "suppress_tokens": ((1,), (2,)),
        "logit_bias": ({1: 1.0}, {2: -1.0}),
        "include_stop": (True, False),
        "speculate": (False, True),
        "grammar": (None, None),
    }
    one, other = values.get(name, (1, 2) if settings_of(SamplingParams)[name][0] in (int, int | None) else (0.5, 0.25))
    engine = ScriptedEngine()
    llm = ReaderLLM.from_engine(engine, **{name: one})  # type: ignore[arg-type]
    llm.complete("Hi")
    llm.complete("Hi", **{name: other})
    assert [getattr(call.generation, name) for call in engine.calls] == [one, other]


def test_a_setting_of_benchmarks_is_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown argument 'ignore_eos'"):
        ReaderLLM.from_engine(ScriptedEngine(), ignore_eos=True)  # type: ignore[arg-type]
