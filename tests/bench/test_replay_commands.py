"""`bench replay`, `bench calibrate` and `bench drafting` on tiny recorded answers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from reader_rag.bench.replay.commands import reliability
from reader_rag.bench.replay.replayer import BINS, Tally
from reader_rag.cli.main import app
from reader_rag.draft import Calibration
from reader_rag.draft.kernels import cells as kernels
from reader_rag.draft.profile import Profile

COPYING = {"id": "copying", "category": "rag", "prompt": [1, 2, 3, 4, 1], "output": [2, 3, 4, 1, 2, 9]}
"""Copies emit 2 3 4 1 2 | 9."""
NEW = {"id": "new", "category": "qa", "prompt": [1, 2, 3], "output": [4, 5, 6]}
"""Nothing repeats: 4 | 5 | 6."""
SAYING = {"id": "saying", "category": "qa", "prompt": [1], "output": [5, 1, 5, 1, 5]}
"""Nothing is known at 5 | 1; then copies and successors go on alike: 5 1 5."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profiles but the shipped ones; and no narrow terminal."""
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row | {"model": "m"}) + "\n" for row in rows))
    return path


def giving_away(*rows: dict[str, Any]) -> dict[str, NDArray[np.int32]]:
    """The token that comes next, at every position but the last."""
    best = {}
    for held in rows:
        best[held["id"]] = np.full((len(held["prompt"]) + len(held["output"]), 8), -1, np.int32)
        best[held["id"]][:-1, 0] = [*held["prompt"], *held["output"]][1:]
    return best


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return write(tmp_path / "traces.jsonl", COPYING, NEW, SAYING)


@pytest.fixture
def top8(tmp_path: Path) -> Path:
    np.savez(tmp_path / "traces.npz", **giving_away(COPYING, NEW, SAYING))  # type: ignore[arg-type]
    return tmp_path / "traces.npz"


def bench(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def replayed(*arguments: str | Path) -> dict[str, Any]:
    """The report of `bench replay --json`."""
    result = bench("replay", *arguments, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def mats(report: dict[str, Any]) -> dict[str, float]:
    return {category: row["mat"] for category, row in report["categories"].items()}


def assert_one_line_error(result: Result, *words: str) -> None:
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "unexpected" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def shifting(size: int) -> NDArray[np.int32]:
    """After token t comes t + 1, round about."""
    tokens = np.full((size, 8), -1, np.int32)
    tokens[:, 0] = (np.arange(size) + 1) % size
    return tokens


def save_profile(path: Path, size: int, name: str = "shifting") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Profile(name, f"vocabulary of {size}", shifting(size)).save(path)
    return path


# What is reported


def test_the_json_report_has_a_row_for_each_category(traces: Path, top8: Path) -> None:
    report = replayed(traces, "--top8", top8, "--eager-successors")
    assert list(report["categories"]) == ["qa", "rag"]
    for row in report["categories"].values():
        assert {"prompts", "mat", "drafted_per_step", "us_per_draft_p50", "us_per_draft_p99"} <= set(row)
        assert 0.0 < row["us_per_draft_p50"] <= row["us_per_draft_p99"]
    assert {category: row["prompts"] for category, row in report["categories"].items()} == {"qa": 2, "rag": 1}
    # rag: copies give 2 3 4 1, and behind them the target's own 2, which it said after the prompt's first 1: one step.
    # qa: three tokens in three steps and five in three.
    assert mats(report) == {"qa": round(8 / 6, 4), "rag": 6.0}
    assert (report["nodes"], report["sources"], report["warm"]) == (64, ["context", "successor"], False)
    assert report["eager_successors"]
    # Lazily, what followed the prompt's first 1 is asked for in the first step, and known too late for it.
    lazily = replayed(traces, "--top8", top8)
    assert mats(lazily) == {"qa": round(8 / 6, 4), "rag": 3.0}
    assert not lazily["eager_successors"]
    assert report["notes"] == []
    assert "peers" not in report
    assert "ablation" not in report


def test_the_text_report_has_the_same_numbers(traces: Path, top8: Path) -> None:
    result = bench("replay", traces, "--top8", top8, "--nodes", "8", "--eager-successors")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "8 nodes, context + successor, no profile" in " ".join(result.stdout.split())
    rows = [line.replace("│", " ").split() for line in result.stdout.splitlines()]
    (rag,) = (row for row in rows if row[:1] == ["rag"])
    (qa,) = (row for row in rows if row[:1] == ["qa"])
    assert (rag[1:3], qa[1:3]) == (["1", "6"], ["2", "1.3333"])
    assert [len(rag), len(qa)] == [6, 6]
    assert all(word in result.stdout for word in ("category", "answers", "tokens/step", "drafted/step", "us/draft"))


def test_fewer_nodes_make_smaller_trees(traces: Path) -> None:
    # One node a step: 2 3 | 4 1 | 2 9: after 1 comes 2, and so on round the cycle.
    report = replayed(traces, "--nodes", "1", "--sources", "context", "--categories", "rag")
    assert mats(report) == {"rag": 2.0}
    assert report["categories"]["rag"]["drafted_per_step"] == 1.0


def test_categories_and_limit_choose_answers(traces: Path, top8: Path) -> None:
    assert list(replayed(traces, "--categories", "rag", "--top8", top8)["categories"]) == ["rag"]
    assert replayed(traces, "--limit", "1", "--top8", top8)["categories"]["qa"]["prompts"] == 1


def test_warm_answers_know_what_earlier_ones_taught(tmp_path: Path) -> None:
    # The second answer comes after a 1 too: 5 was said there, and 1 after it, as long as it goes on like that.
    again = SAYING | {"id": "again", "prompt": [8, 1], "output": [5, 1, 7]}
    path = write(tmp_path / "t.jsonl", SAYING, again)
    np.savez(tmp_path / "t.npz", **giving_away(SAYING, again))  # type: ignore[arg-type]
    arguments = (path, "--top8", tmp_path / "t.npz", "--sources", "successor", "--profile", "none")
    # Cold: SAYING in three steps, the other 5 | 1 | 7 (after 1 the row of the prompt's 1 says 5). Warm: 5 1 7.
    assert mats(replayed(*arguments)) == {"qa": round(8 / 6, 4)}
    report = replayed(*arguments, "--warm")
    assert mats(report) == {"qa": 8 / 4}
    assert report["warm"] is True


def test_a_note_says_for_which_answers_best_tokens_are_missing(traces: Path, tmp_path: Path) -> None:
    assert replayed(traces)["notes"] == ["no best next tokens for 3 answers (qa, rag): successors are off there"]
    np.savez(tmp_path / "some.npz", **giving_away(COPYING, NEW))  # type: ignore[arg-type]
    note = "no best next tokens for 1 answers (qa): successors are off there"
    assert replayed(traces, "--top8", tmp_path / "some.npz")["notes"] == [note]
    assert note in bench("replay", traces, "--top8", tmp_path / "some.npz").stdout
    # Copies alone need none.
    assert replayed(traces, "--sources", "context")["notes"] == []


def test_reliability_is_over_bins_that_have_nodes_and_gaps_over_those_that_have_many() -> None:
    tallies = [Tally(), Tally()]
    for tally, bin_, judged, predicted, right in (
        (tallies[0], 10, 100.0, 52.0, 60.0),
        (tallies[1], 10, 100.0, 54.0, 50.0),
        (tallies[1], 2, 400.0, 48.0, 40.0),
        (tallies[0], 19, 199.0, 199.0, 0.0),
    ):
        tally.judged[bin_], tally.predicted[bin_], tally.right[bin_] = judged, predicted, right
    # Bin 10: 106 / 200 and 110 / 200; bin 2: 48 / 400 and 40 / 400; gaps 0.02 and 0.02; bin 19 has too few.
    assert BINS == 20
    assert reliability(tallies) == {
        "bins": [
            {"predicted": 0.12, "observed": 0.1, "nodes": 400},
            {"predicted": 0.53, "observed": 0.55, "nodes": 200},
            {"predicted": 1.0, "observed": 0.0, "nodes": 199},
        ],
        "mean_gap": 0.02,
    }
    assert reliability([Tally()]) == {"bins": [], "mean_gap": None}


def test_the_report_has_the_reliability_of_all_categories(traces: Path) -> None:
    report = replayed(traces, "--sources", "context")
    # COPYING: 2 3 4 1 and then a wrong 3 are judged. SAYING: 5 1 is drafted after 1 5 1 and what comes next is 5.
    assert sum(row["nodes"] for row in report["reliability"]["bins"]) >= 5 + 2
    assert report["reliability"]["mean_gap"] is None


# Peers and ablation


def test_peers_stand_beside_ours_with_the_same_categories(traces: Path) -> None:
    report = replayed(traces, "--sources", "context", "--peers")
    assert {"prompt-lookup", "vllm-ngram", "oracle: best copy"} <= set(report["peers"])
    for row in report["peers"].values():
        assert set(row) == {"qa", "rag"}
        assert all(set(cell) == {"mat"} for cell in row.values())
    # The best copy, which may begin anywhere: COPYING 2 3 4 1 2 | 9; NEW 4 | 5 | 6; SAYING 5 | 1 5 1 | 5, since only
    # 1 5 stood there to be copied, and the target added 1.
    best = {category: cell["mat"] for category, cell in report["peers"]["oracle: best copy"].items()}
    assert best == {"qa": round(8 / 6, 4), "rag": 3.0}
    # vLLM's rule wants two tokens: nothing ends as 4 1. Then 1 2 gives 3 4 1 2: 2 | 3 4 1 2 9.
    assert report["peers"]["vllm-ngram"]["rag"]["mat"] == 3.0
    text = bench("replay", traces, "--sources", "context", "--peers").stdout
    assert "tokens per step of others" in text
    assert "vllm-ngram" in text


def test_the_ablation_has_a_row_for_each_part_that_is_on(traces: Path, top8: Path, tmp_path: Path) -> None:
    report = replayed(traces, "--top8", top8, "--profile", save_profile(tmp_path / "p.npz", 50), "--ablation")
    assert list(report["ablation"]) == [
        "all",
        "without context",
        "without successor",
        "without profile",
        "without calibration",
        "without merging",
    ]
    assert report["ablation"]["all"] == mats(report)
    # Copies alone: see COPYING and SAYING.
    assert report["ablation"]["without successor"] == {"qa": round(8 / 6, 4), "rag": 3.0}
    assert report["ablation"]["without profile"] == mats(replayed(traces, "--top8", top8, "--profile", "none"))


def test_without_a_profile_and_of_a_single_source_only_calibration_is_left_to_switch_off(traces: Path) -> None:
    arguments = (traces, "--sources", "context", "--ablation")
    report = replayed(*arguments)
    assert list(report["ablation"]) == ["all", "without calibration"]
    text = bench("replay", *arguments).stdout
    assert "tokens per step with parts off" in text
    assert "without calibration" in text


@pytest.mark.parametrize("order", ["context,successor", "successor,context"])
def test_the_ablation_does_not_depend_on_the_order_of_the_sources(order: str, tmp_path: Path) -> None:
    passages = [{"id": "p", "tokens": [4, 1, 2, 3]}]
    held = COPYING | {"prompt": [9, 1], "output": [2, 3, 7], "passages": passages}
    path = write(tmp_path / "t.jsonl", held)
    np.savez(tmp_path / "t.npz", copying=np.full((5, 8), -1))
    arguments = (path, "--top8", tmp_path / "t.npz", "--profile", "none", "--ablation", "--sources", order)
    # The passage gives 2 3: one step. Without it, three.
    ablation = {name: row["rag"] for name, row in replayed(*arguments)["ablation"].items()}
    assert ablation == {
        "all": 3.0,
        "without context": 1.0,
        "without successor": 3.0,
        "without calibration": 3.0,
        "without merging": 3.0,
    }


def test_without_calibration_is_the_row_of_the_ablation(traces: Path, top8: Path) -> None:
    ablation = replayed(traces, "--top8", top8, "--ablation")["ablation"]
    assert mats(replayed(traces, "--top8", top8, "--no-calibration")) == ablation["without calibration"]


# Plots


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plots_are_written_as_png_files_into_a_folder_that_is_made(traces: Path, top8: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "deep" / "plots"
    result = bench("replay", traces, "--top8", top8, "--ablation", "--plots", folder)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in folder.iterdir()) == ["ablation.png", "reliability.png"]
    assert all(is_png(path) for path in folder.iterdir())


def test_without_ablation_only_reliability_is_drawn(traces: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench("replay", traces, "--sources", "context", "--plots", tmp_path / "plots").exit_code == 0
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["reliability.png"]


def test_where_nothing_was_drafted_the_plots_are_no_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "t.jsonl", NEW)
    result = bench("replay", path, "--sources", "context", "--plots", tmp_path / "plots")
    assert result.exit_code == 0, result.output
    assert "qa" in result.stdout


# Profiles


def test_a_profile_from_a_file_is_used_and_named(traces: Path, top8: Path, tmp_path: Path) -> None:
    path = save_profile(tmp_path / "p.npz", 50, "my model")
    assert replayed(traces, "--top8", top8, "--profile", path)["profile"] == "my model"
    assert "profile my model" in bench("replay", traces, "--top8", top8, "--profile", path).stdout
    assert replayed(traces, "--top8", top8, "--profile", "none")["profile"] is None
    # Copies alone do not use it.
    assert replayed(traces, "--top8", top8, "--profile", path, "--sources", "context")["profile"] is None


def test_what_only_a_profile_knows_is_drafted_by_it(tmp_path: Path) -> None:
    # 4 5 6 follow 3 as the profile says.                                  4 5 6
    path = write(tmp_path / "t.jsonl", NEW)
    np.savez(tmp_path / "t.npz", new=np.full((6, 8), -1))
    arguments = (path, "--top8", tmp_path / "t.npz", "--no-calibration", "--profile")
    # The rows that were learned say nothing, and stand before the profile: after 1 and 2, not after 3.
    assert mats(replayed(*arguments, save_profile(tmp_path / "p.npz", 50))) == {"qa": 3.0}
    assert mats(replayed(*arguments, "none")) == {"qa": 1.0}


@pytest.mark.parametrize("size", [4, 5])
def test_a_profile_of_a_smaller_vocabulary_than_the_prompts_is_refused(size: int, tmp_path: Path) -> None:
    # COPYING's prompt has tokens up to 4: a vocabulary of five has them all, and the answer's 9 is none of it.
    path = write(tmp_path / "t.jsonl", COPYING)
    result = bench("replay", path, "--profile", save_profile(tmp_path / "p.npz", size))
    if size == 4:
        assert_one_line_error(result, f"--profile {tmp_path / 'p.npz'}", "another vocabulary", "copying")
    else:
        assert result.exit_code == 0, result.output


def test_a_profile_that_is_smaller_than_the_answers_tokens_is_no_error_and_says_nothing_of_them(tmp_path: Path) -> None:
    large = COPYING | {"output": [2, 3, 2**31 - 1, 3]}
    path = write(tmp_path / "t.jsonl", large)
    np.savez(tmp_path / "t.npz", **giving_away(large))  # type: ignore[arg-type]
    report = replayed(path, "--top8", tmp_path / "t.npz", "--profile", save_profile(tmp_path / "p.npz", 5))
    # 2 3 are copied, then comes the large token; nothing is known of what follows it.
    assert mats(report) == {"rag": 2.0}


def test_a_missing_or_foreign_profile_is_named(traces: Path, top8: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none.npz", top8):
        assert_one_line_error(bench("replay", traces, "--top8", top8, "--profile", path), str(path))


def test_auto_takes_the_first_profile_that_fits_the_prompts(tmp_path: Path) -> None:
    # Every token of the prompt is the one before plus one, as the profile of 400 tokens says; that of 300 has not all.
    counted = NEW | {"prompt": list(range(350)), "output": [350, 351]}
    path = write(tmp_path / "t.jsonl", counted)
    np.savez(tmp_path / "t.npz", new=np.full((352, 8), -1))
    save_profile(tmp_path / "cache" / "profiles" / "a.npz", 300, "too small")
    save_profile(tmp_path / "cache" / "profiles" / "b.npz", 400, "fitting")
    report = replayed(path, "--top8", tmp_path / "t.npz")
    assert report["profile"] == "fitting"
    assert mats(report) == {"qa": 2.0}


def test_auto_takes_no_profile_for_a_few_tokens(traces: Path, top8: Path) -> None:
    assert replayed(traces, "--top8", top8)["profile"] is None


# Explaining


def test_explain_tells_one_answer_step_by_step(traces: Path) -> None:
    result = bench("replay", traces, "--sources", "context", "--explain", "copying")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("step 1, token 0: 4 of 4 drafted tokens accepted (")
    assert lines[0].endswith(" expected), 5 emitted: '2 3 4 1 2'")
    assert [line.split()[:2] for line in lines[1:5]] == [["+", f"'{token}'"] for token in (2, 3, 4, 1)]
    assert lines[5] == "  = '2 3 4 1': context, tokens 1 to 4 of the prompt: '1' [...] '2 3 4 1'"
    assert lines[7].startswith("step 2, token 5: 0 of ")
    assert lines[-1] == "6 tokens in 2 steps: 3.000 tokens per step"


def test_explain_shows_words_if_a_tokenizer_is_given(
    tmp_path: Path, tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = tmp_path / "tiny"
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    prompt, output = (tiny_tokenizer(text)["input_ids"] for text in ("x y z x", " y z"))
    path = write(tmp_path / "t.jsonl", NEW | {"prompt": prompt, "output": output})
    result = bench("replay", path, "--sources", "context", "--explain", "new", "--tokenizer", folder)
    assert result.exit_code == 0, result.output
    assert "emitted: ' y z'" in result.stdout


@pytest.mark.parametrize("wanted", ["nobody", ""])
def test_explaining_an_unknown_answer_is_one_line_that_names_some(wanted: str, traces: Path) -> None:
    result = bench("replay", traces, "--sources", "context", "--explain", wanted)
    assert_one_line_error(result, f"--explain {wanted}: there is no such id", "new", "copying")


# Wrong use


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sources", "context,magic"], ["--sources takes context, successor, not magic"]),
        (["--sources", ""], ["--sources takes context, successor, not nothing"]),
        (["--nodes", "0"], ["--nodes must be 1..1024, not 0"]),
        (["--nodes", "1025"], ["--nodes must be 1..1024, not 1025"]),
        (["--categories", "rag,math"], ["has no category math; it has qa, rag"]),
    ],
)
def test_wrong_options_are_one_line(options: list[str], words: list[str], traces: Path) -> None:
    assert_one_line_error(bench("replay", traces, *options), *words)


def test_a_limit_of_none_is_a_wrong_command_line(traces: Path) -> None:
    result = bench("replay", traces, "--limit", "0")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--limit" in result.stderr


@pytest.mark.parametrize("command", ["replay", "drafting"])
def test_a_missing_trace_file_is_one_line(command: str, tmp_path: Path) -> None:
    assert_one_line_error(bench(command, tmp_path / "none.jsonl"), "cannot read", "none.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"id": 1, "category": "rag", "turns": ["a prompt, no answer"]}',
        '{"id": 1, "category": "rag", "prompt": [1, 2]}',
        '{"id": 1, "category": "rag", "prompt": [], "output": [1]}',
        '["prompt"]',
    ],
)
def test_a_file_of_something_else_is_one_line_that_names_its_line(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", NEW)
    path.write_text(path.read_text() + line + "\n")
    assert_one_line_error(bench("replay", path), "t.jsonl, line 2")


@pytest.mark.parametrize(
    "raw", [b"", b"PK\x03\x04 cut off", b"not numbers", b"\x93NUMPY"], ids=["empty", "cut off", "text", "npy"]
)
def test_a_broken_file_of_best_tokens_is_one_line(raw: bytes, traces: Path, tmp_path: Path) -> None:
    (tmp_path / "b.npz").write_bytes(raw)
    assert_one_line_error(bench("replay", traces, "--top8", tmp_path / "b.npz"), "b.npz")


def test_best_tokens_of_other_traces_are_one_line(traces: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "b.npz", copying=np.zeros((10, 8), np.int32))
    words = ("--top8 has 10 rows for trace copying, which has 11 tokens", "made from other traces")
    assert_one_line_error(bench("replay", traces, "--top8", tmp_path / "b.npz"), *words)


@pytest.mark.parametrize("command", ["replay", "drafting", "record", "calibrate"])
def test_help_shows_an_example(command: str) -> None:
    result = bench(command, "--help")
    assert result.exit_code == 0
    assert f"Example: reader-rag bench {command}" in " ".join(result.stdout.split())


# Calibrating


def test_calibrate_writes_counts_that_a_calibration_starts_from(traces: Path, top8: Path, tmp_path: Path) -> None:
    out = tmp_path / "priors.npz"
    result = bench("calibrate", traces, out, "--top8", top8, "--profile", "none")
    assert result.exit_code == 0, result.output
    with np.load(out) as counts:
        hits, expected = counts["hits"], counts["expected"]
    assert hits.shape == expected.shape == (kernels.CELLS,)
    assert (hits >= 0.0).all()
    assert (expected >= 0.0).all()
    assert hits.sum() > 0.0
    assert result.stdout == f"{int(hits.sum())} tokens accepted where {expected.sum():.0f} were expected, in {out}\n"
    # Counts alone, next to none of what they started from: COPYING's 4 copies, in three rounds, are among them.
    assert hits.sum() >= 3 * 4 - 0.01
    assert math.isclose(hits.sum(), round(hits.sum()), abs_tol=0.05)
    from reader_rag.draft.calibration import smoothed

    rates = Calibration(*smoothed(hits, expected)).counts[kernels.RATES]
    assert ((rates >= 0.25) & (rates <= 4.0)).all()
    assert not np.array_equal(rates, np.ones(kernels.CELLS))


def test_calibrate_writes_the_file_that_it_names(traces: Path, tmp_path: Path) -> None:
    result = bench("calibrate", traces, tmp_path / "counts")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"in {tmp_path / 'counts'}\n")
    assert (tmp_path / "counts").is_file()


# Drafting


def test_the_cost_of_drafting_is_reported_in_all_its_parts(traces: Path, top8: Path) -> None:
    result = bench("drafting", traces, "--top8", top8, "--json")  # the category rag, the default
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    drafts = report.pop("drafts")
    assert list(drafts) == ["8", "16", "64"]
    for row in drafts.values():
        assert set(row) == {"us_p50", "us_p99", "us_in_replay_p50", "us_in_replay_p99"}
        assert all(value > 0.0 for value in row.values())
    for rows in (32, 256):
        step = report.pop(f"step_of_{rows}_rows_of_4000_tokens")
        assert set(step) == {"us_p50_one_thread", "us_p50_threads"}
        assert all(value > 0.0 for value in step.values())
    assert set(report) == {
        "us_per_token_followed_p50",
        "ms_to_index_32000",
        "index_bytes_per_token",
        "first_use_s",
    }
    assert all(value > 0.0 for value in report.values())
    # int32 tokens and their predecessors take 8 bytes; two int32 for each of 65536 slots, the least power of two that
    # is twice 32000 or more, take 16.4 a token.
    assert report["index_bytes_per_token"] == 24.4
