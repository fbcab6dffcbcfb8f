"""`bench report`: what it plans, runs, writes and compares; with commands that are not run, and once with real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import reader_rag
from reader_rag.bench.commands import app
from reader_rag.bench.figures.inputs import chosen_prompts
from reader_rag.bench.figures.pages import pages_of, stale_blocks, update_page, write_page
from reader_rag.bench.figures.parts import Inputs, Part, Section
from reader_rag.bench.figures.plan import Absent, absent_peers, plan
from reader_rag.bench.figures.run import (
    Finished,
    commit,
    keep_results,
    new_report,
    read_report,
    run_command,
    run_sections,
    save_report,
)
from reader_rag.errors import ConfigError

ALL_ABSENT = tuple(Absent(name, name, "not installed") for name in ("xllamacpp", "arctic-inference", "vllm"))
VARIANT = {
    "prompt_tokens_per_s": 900.0,
    "decode_tokens_per_s": 50.0,
    "mat": 1.0,
    "ms_per_step": 20.0,
    "ttft_s": 0.5,
    "question_s": 3.0,
    "cache_mb": 1.5,
    "peak_mb": None,
}
SPREAD = {"median": 2.0, "min": 1.25, "max": 3.5, "total": 2.1}


def generated(reader: float = 105.0) -> dict[str, Any]:
    """A report of `bench generate`."""
    variants = {"plain": VARIANT, "reader": VARIANT | {"decode_tokens_per_s": reader, "mat": 2.25}, "hf": VARIANT}
    ratio = SPREAD | {"questions": SPREAD}
    return {
        "batch": 1,
        "prompts": 10,
        "variants": variants,
        "methods": {name: row | {"variant": name} for name, row in variants.items()},
        "ratios": {"reader/plain": ratio, "reader/hf": ratio},
        "identical": {"compared": 10, "different": ["rag-3"]},
    }


def beside_llama_cpp() -> dict[str, Any]:
    """The same with llama.cpp, which reads another quantisation."""
    report = generated()
    report["variants"] |= {"llama-cpp ngram-simple": VARIANT}
    report["methods"] |= {"llama-cpp": VARIANT | {"variant": "llama-cpp ngram-simple"}}
    report["ratios"] |= {"reader/llama-cpp": SPREAD | {"questions": SPREAD}}
    return report | {"llama_cpp": {"file": "m.gguf", "type": "MOSTLY_Q4_1"}}


VERIFIED = {
    "answers": 4,
    "tokens": 256,
    "drafted": 90,
    "accepted": 31,
    "differing_tokens": 0,
    "differing_bits": 0,
    "bits_must_agree": True,
}
STARTS = {name: {f"{part}_mb": 1.0 for part in ("before", "peak", "after", "tensors")} for name in ("first", "second")}
REPLAYED = {
    "reliability": {"bins": [{"predicted": 0.5, "observed": 0.4375, "nodes": 300}], "mean_gap": 0.0625},
    "categories": {"rag": {"mat": 2.75}, "chat": {"mat": 1.5}},
    "peers": {
        "vllm-ngram": {"rag": {"mat": 1.75}, "chat": {"mat": 1.1}},
        "suffix-decoding tuned tree": {"rag": {"mat": 2.1}, "chat": {"mat": 1.2}},
    },
    "ablation": {"all": {"rag": 2.75, "chat": 1.5}, "without profile": {"rag": 2.5, "chat": 1.4}},
}
DRAFTED = {
    "drafts": {"8": {"us_p50": 5.7, "us_p99": 14.5, "us_in_replay_p50": 8.6, "us_in_replay_p99": 20.6}},
    "us_per_token_followed_p50": 1.25,
    "step_of_32_rows_of_4000_tokens": {"us_p50_one_thread": 321.5, "us_p50_threads": 200.0},
}
RECALLED = {
    "categories": {"rag": {"with": {"mat": 3.0, "us_per_draft_p50": 9.0}, "without": {"mat": 2.0}, "ratio": 1.5}}
}
DIVERGENCE = {"answers": 5, "tokens": 640, "agreement": 0.97, "mean_kl": 0.0029, "different": ["rag-1", "rag-2"]}
TIMES = {"us_p50": 13.2, "us_p99": 20.4, "draft_us_p50": 50.5, "draft_us_p99": 84.0, "longest_p50": 3.0}
SEARCHED = {
    "rows": [
        {
            "tokens": 10_000_000,
            "bytes_per_token": 6.031,
            "sorted_tokens_per_s": 5_900_000,
            "open_ms": 0.8,
            **{f"resident_mb_{when}": 61.0 for when in ("opened", "searched_100", "searched_4000")},
            "as_built": {"segments": 3, "us_p50": 26.0, "us_p99": 54.0},
            "queries": {"new": TIMES, "copied": TIMES},
        }
    ]
}
CACHED = {
    "batch": 8,
    "policy": "column",
    "ms_per_step_p50": 41.98,
    "ms_per_step_mean": 53.98,
    "moved_bytes": 2_429_000_000,
    "moves_per_entry": 9.26,
    "rearrangements": 12,
    "peak_bytes": 227_300_000,
}
IN_VLLM = {"rag": {"prompts": 5, "methods": {"ngram": VARIANT, "reader": VARIANT}, "ratios": {"reader/ngram": SPREAD}}}
REPORTS: Mapping[str, Any] = {
    "speed": generated(),
    "other-prompts": generated(),
    "batches": [generated() | {"batch": size} for size in (1, 4)],
    "exactness": VERIFIED,
    "rounding": VERIFIED | {"differing_tokens": 1, "bits_must_agree": False},
    "memory": {"starts": STARTS},
    "record": None,
    "tokens-per-step": REPLAYED,
    "tree-size": REPLAYED,
    "drafting": DRAFTED,
    "recall": RECALLED,
    "int8": {"categories": {"rag": DIVERGENCE}, "all": DIVERGENCE},
    "datastore": SEARCHED,
    "cache": {"runs": [CACHED]},
    "vllm": {"categories": IN_VLLM},
}
"""What the commands of each section print."""


def inputs(tmp_path: Path, **changes: Any) -> Inputs:
    found = Inputs("smollm2-135m", tmp_path / "prompts.jsonl", ("chat", "rag"), None, None, tmp_path)
    return replace(found, **changes)


def made(tmp_path: Path, **failures: str) -> tuple[dict[str, Any], list[str]]:
    """A report of all sections, whose commands are not run, and its failures."""

    def run(part: Part, seconds: float) -> Finished:
        section = next(one.name for one in sections if any(part is other for other in one.parts))
        found = REPORTS[section] if part.has_report and section not in failures else None
        return Finished(2.0, found, failures.get(section))

    sections = plan(inputs(tmp_path), ())
    report = new_report(ALL_ABSENT[:1], "prompts.jsonl")
    return report, run_sections(sections, report, tmp_path, lambda _: None, run)


class TestPlan:
    def test_the_budgets_add_up_and_commands_end_in_time_by_themselves(self, tmp_path: Path) -> None:
        for minutes in (60.0, 5.0):
            sections = plan(inputs(tmp_path, minutes=minutes), ())
            parts = [part for section in sections for part in section.parts]
            assert sum(part.minutes for part in parts) == pytest.approx(minutes)
            for part in parts:
                if part.arguments[:2] == ("bench", "generate"):
                    seconds = float(part.arguments[part.arguments.index("--seconds") + 1])
                    assert part.timed_runs * seconds < 60 * part.minutes

    def test_every_section_has_a_table_and_its_own_labels(self, tmp_path: Path) -> None:
        sections = plan(inputs(tmp_path), ())
        assert [section.name for section in sections] == list(REPORTS)
        for section in sections:
            assert len({part.label for part in section.parts}) == len(section.parts)

    def test_recorded_answers_are_not_recorded_again(self, tmp_path: Path) -> None:
        sections = plan(inputs(tmp_path, traces=tmp_path / "mine.jsonl"), ())
        assert "record" not in [section.name for section in sections]
        replayed = next(section for section in sections if section.name == "tokens-per-step")
        assert replayed.parts[0].command == "reader-rag bench replay mine.jsonl --peers --ablation --json"

    def test_absent_peers_are_left_out_of_the_commands(self, tmp_path: Path) -> None:
        for absent, there in (((), True), (ALL_ABSENT, False)):
            sections = plan(inputs(tmp_path), absent)
            commands = " ".join(part.command for section in sections for part in section.parts)
            assert ("llama-cpp" in commands) is there
            assert ("bench vllm" in commands) is there

    def test_commands_name_files_without_their_folders(self, tmp_path: Path) -> None:
        for section in plan(inputs(tmp_path, model=tmp_path / "model"), ()):
            for part in section.parts:
                assert str(tmp_path) not in part.command

    def test_a_model_without_a_gguf_file_is_not_compared_with_llama_cpp(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        (absent,) = absent_peers(tmp_path / "my-model")
        assert absent.package == "xllamacpp"
        assert "--gguf" in absent.reason
        assert str(tmp_path) not in absent.reason

    def test_prompts_need_the_category_with_passages(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_text(json.dumps({"id": "1", "category": "qa", "turns": ["Why?"]}))
        with pytest.raises(ConfigError, match="has no prompts of the category rag; it has qa"):
            chosen_prompts(path, 1, tmp_path)
        local, categories, _ = chosen_prompts(None, 1, tmp_path)
        assert local.is_file()
        assert categories == ("chat", "rag", "summarization")


class TestRun:
    def test_a_part_that_fails_is_told_and_the_others_go_on(self, tmp_path: Path) -> None:
        report, failed = made(tmp_path, memory="exit status 1: no memory")
        assert failed == [f"memory, {label}: exit status 1: no memory" for label in ("float32", "bfloat16", "int8")]
        assert list(report["sections"]) == list(REPORTS)
        assert read_report(tmp_path) == report
        write_page(report, tmp_path)
        assert "Failed: int8: exit status 1: no memory." in (tmp_path / "README.md").read_text(encoding="utf-8")

    def test_time_that_a_part_leaves_is_there_for_those_behind_it(self, tmp_path: Path) -> None:
        allowed: list[float] = []

        def run(part: Part, seconds: float) -> Finished:
            allowed.append(seconds)
            return Finished(20.0)

        parts = tuple(Part(str(number), ("--version",), 1.0) for number in range(3))
        run_sections([Section("s", "S", "", parts)], new_report((), ""), tmp_path, lambda _: None, run)
        assert allowed == [60.0, 100.0, 140.0]

    def test_a_command_is_run_in_a_process_and_its_last_line_says_why_it_failed(self) -> None:
        done = run_command(Part("", ("--version",), 1.0, has_report=False), 120.0)
        assert (done.report, done.error) == (None, None)
        assert run_command(Part("", ("--version",), 1.0), 120.0).error is not None  # it prints no JSON
        failed = run_command(Part("", ("bench", "replay", Path("no-such-file.jsonl"), "--json"), 1.0), 120.0)
        assert failed.error is not None
        assert failed.error.startswith("exit status 1: cannot read no-such-file.jsonl")

    def test_a_command_that_runs_longer_than_its_budget_is_ended(self) -> None:
        done = run_command(Part("", ("bench", "cache"), 1.0), 0.05)
        assert done.error == "ended after its 0.0 minutes"

    def test_the_commit_is_that_of_this_package_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "reader_rag").mkdir()
        monkeypatch.setattr(reader_rag, "__file__", str(tmp_path / "reader_rag" / "__init__.py"))
        assert commit() is None

    @pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[1]"])
    def test_another_file_is_refused(self, content: str, tmp_path: Path) -> None:
        (tmp_path / "report.json").write_text(content)
        with pytest.raises(ConfigError, match=r"cannot read .*report\.json"):
            read_report(tmp_path)


class TestPages:
    def test_the_page_has_each_section_with_its_command_and_machine(self, tmp_path: Path) -> None:
        report, failed = made(tmp_path)
        assert failed == []
        plots = write_page(report, tmp_path)
        page = (tmp_path / "README.md").read_text(encoding="utf-8")
        for section in plan(inputs(tmp_path), ()):
            assert f"## {section.title}" in page
            for part in section.parts:
                assert part.command in page
        for cell in (
            "| int8 | **reader-rag** | 900.0 | 105.0 | 2.25 | 20.00 | 0.50 | 3.00 | 1.50 | - |",
            "| float32 | plain | 2.10 (1.25 to 3.50) | 2.10 (1.25 to 3.50) | 9 of 10 |",
            "| **reader-rag** | 2.75 | 1.50 |",
            "| vllm-ngram | 1.75 | 1.10 |",
            "| reader-rag without profile | 2.50 | 1.40 |",
            "| 64 nodes, no calibration | 2.75 | 1.50 | 0.06 |",
            "| following a token, us | 1.25 |",
            "| a step of 32 rows of 4,000 tokens with a chain each, us | 321.5 |",
            "| the same questions | rag | 3.00 | 2.00 | 1.50 | 9.00 |",
            "| all | 640 | 0.9700 | 0.00290 | 2 of 5 |",
            "| search, copied text, us | 13, 20 |",
            "| sorting, million tokens/s | 5.90 |",
            "| 8 | column | 41.98 | 53.98 | 2429 | 9.26 | 12 | 227.3 |",
            "| 1 | rag (5) | ngram | 50.00 | 1.00 | 2.10 (1.25 to 3.50) |",
            "| 8 | rag (5) | **reader-rag** | 50.00 | 1.00 | - |",
            "- xllamacpp: xllamacpp left out (not installed)",
        ):
            assert cell in page
        assert reader_rag.__version__ in page
        assert report["processor"] in page
        assert plots == ["speed.svg", "tokens-per-step.svg", "reliability.svg", "datastore.svg"]
        assert all(f"]({plot})" in page for plot in plots)

    def test_llama_cpp_is_named_with_its_own_quantisation(self, tmp_path: Path) -> None:
        report, _ = made(tmp_path)
        report["sections"]["speed"]["parts"]["int8"]["report"] = beside_llama_cpp()
        write_page(report, tmp_path)
        assert "| Q4_1 | llama.cpp, ngram-simple | 900.0 | 50.00 |" in (tmp_path / "README.md").read_text("utf-8")
        page = tmp_path / "page.md"
        page.write_text("<!-- figures: overview -->\n<!-- end of figures -->\n")
        update_page(page, report)
        assert "| llama.cpp (Q4_1) | reader-rag |" in page.read_text("utf-8")

    def test_the_same_report_makes_the_same_files(self, tmp_path: Path) -> None:
        report, _ = made(tmp_path)
        first = {
            path.name: path.read_bytes()
            for name in [*write_page(report, tmp_path), "README.md"]
            if (path := tmp_path / name)
        }
        write_page(read_report(tmp_path), tmp_path)
        assert {name: (tmp_path / name).read_bytes() for name in first} == first

    def test_blocks_of_a_page_are_written_and_a_changed_figure_is_found(self, tmp_path: Path) -> None:
        report, _ = made(tmp_path)
        page = tmp_path / "page.md"
        page.write_text(
            "Before.\n\n<!-- figures: overview -->\nold\n<!-- end of figures -->\n\n"
            "Between: 105.0.\n\n<!-- figures: exactness -->\n<!-- end of figures -->\n",
            encoding="utf-8",
        )
        assert stale_blocks(page.read_text(), report, "page.md") == (["overview", "exactness"],) * 2
        assert update_page(page, report) == ["overview", "exactness"]
        text = page.read_text(encoding="utf-8")
        assert "| int8 | 10 | 50.00 | 50.00 | **105.0** | 2.10 (1.25 to 3.50) | 9 of 10 |" in text
        assert text.startswith("Before.\n\n<!-- figures: overview -->\n| type |")
        assert stale_blocks(text, report, "page.md") == (["overview", "exactness"], [])
        assert stale_blocks(text.replace("**105.0**", "**115.0**"), report, "page.md")[1] == ["overview"]

    def test_a_block_may_show_a_part_of_a_section(self, tmp_path: Path) -> None:
        report, _ = made(tmp_path)
        page = tmp_path / "page.md"
        for name, names in {
            "peers": ["**reader-rag**", "vllm-ngram", "suffix-decoding tuned tree"],
            "ablation": ["**reader-rag**", "reader-rag without profile"],
            "chains": ["vllm-ngram"],
        }.items():
            page.write_text(f"<!-- figures: {name} -->\n<!-- end of figures -->\n", encoding="utf-8")
            assert update_page(page, report) == [name]
            text = page.read_text(encoding="utf-8")
            assert [line.split(" | ")[0] for line in text.splitlines()[3:] if line.startswith("| ")] == [
                f"| {one}" for one in names
            ]
            assert "reader-rag bench replay traces.jsonl" in text
            assert "; prompts: prompts.jsonl." in text

    def test_figures_without_prompts_name_none(self, tmp_path: Path) -> None:
        report, _ = made(tmp_path)
        page = tmp_path / "page.md"
        page.write_text("<!-- figures: cache -->\n<!-- end of figures -->\n", encoding="utf-8")
        update_page(page, report)
        assert "prompts" not in page.read_text(encoding="utf-8")

    def test_a_block_without_a_result_stays_as_it_is(self, tmp_path: Path) -> None:
        report, _ = made(tmp_path, speed="too slow")
        page = tmp_path / "page.md"
        page.write_text("<!-- figures: overview -->\nby hand\n<!-- end of figures -->\n")
        assert update_page(page, report) == []
        assert "by hand" in page.read_text()

    def test_the_pages_of_a_folder_that_have_blocks_are_written(self, tmp_path: Path) -> None:
        report, _ = made(tmp_path)
        folder = tmp_path / "docs" / "more"
        folder.mkdir(parents=True)
        with pytest.raises(ConfigError, match="no page in .* has a block of figures"):
            pages_of(tmp_path / "docs")
        (folder / "none.md").write_text("Nothing.\n", encoding="utf-8")
        page = folder / "page.md"
        page.write_text("<!-- figures: cache -->\n<!-- end of figures -->\n", encoding="utf-8")
        assert pages_of(tmp_path / "docs") == [page]
        assert pages_of(page) == [page]
        assert update_page(page, report) == ["cache"]

    def test_pages_without_a_block_or_with_an_unknown_one_are_errors(self, tmp_path: Path) -> None:
        report, _ = made(tmp_path)
        page = tmp_path / "page.md"
        page.write_text("Nothing.\n")
        with pytest.raises(ConfigError, match="has no block of figures"):
            update_page(page, report)
        page.write_text("<!-- figures: sped -->\n<!-- end of figures -->\n")
        with pytest.raises(ConfigError, match="there are no figures sped: name one of overview, speed"):
            update_page(page, report)


class TestCommand:
    def test_pages_are_written_from_what_was_measured_without_running_anything(self, tmp_path: Path) -> None:
        made(tmp_path)
        page = tmp_path / "page.md"
        page.write_text("<!-- figures: speed -->\n<!-- end of figures -->\n")
        result = CliRunner().invoke(app, ["report", "--out", str(tmp_path), "--render", "--update", str(page)])
        assert result.exit_code == 0
        assert f"{page}: wrote speed" in result.stdout
        assert (tmp_path / "README.md").is_file()

    def test_the_speeds_of_another_run_stand_beside(self, tmp_path: Path) -> None:
        """As in a run in which everything was twice as slow, and the reader four times."""
        report, _ = made(tmp_path / "now")
        before = json.loads(json.dumps(report)) | {"commit": "abc"}
        for part in before["sections"]["speed"]["parts"].values():
            part["commit"] = "abc"
            for name, row in part["report"]["methods"].items():
                row["decode_tokens_per_s"] /= 4 if name == "reader" else 2
        save_report(before, tmp_path / "before")
        page = tmp_path / "page.md"
        page.write_text("<!-- figures: repeated -->\n<!-- end of figures -->\n")
        arguments = ["--out", str(tmp_path / "now"), "--render", "--before", str(tmp_path / "before")]
        result = CliRunner().invoke(app, ["report", *arguments, "--update", str(page)])
        assert result.exit_code == 0
        text = page.read_text(encoding="utf-8")
        assert "| int8 | plain | 50.00 | 25.00 | 2.00 | 2.10 | 1.05 |" in text
        assert "| int8 | **reader-rag** | 105.0 | 26.25 | 4.00 | - | - |" in text
        assert "The other run: abc, " in text
        assert stale_blocks(text, read_report(tmp_path / "now"), "page.md") == (["repeated"], [])

    def test_named_sections_are_run_and_the_others_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made(tmp_path)
        ran: list[str] = []

        def run(sections: list[Section], report: dict[str, Any], *_: Any) -> list[str]:
            ran.extend(section.name for section in sections)
            assert list(report["sections"]) == list(REPORTS)
            return ["drafting, all: slow"]

        monkeypatch.setattr("reader_rag.bench.figures.run.run_sections", run)
        result = CliRunner().invoke(app, ["report", "--out", str(tmp_path), "--only", "drafting"])
        assert ran == ["record", "drafting"]
        assert result.exit_code == 1
        assert "failed: drafting, all: slow" in result.stderr

    def test_a_run_without_vllm_keeps_the_speed_inside_vllm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before, _ = made(tmp_path)
        monkeypatch.setattr("reader_rag.bench.figures.plan.absent_peers", lambda _: ALL_ABSENT)

        def run(sections: list[Section], report: dict[str, Any], *_: Any) -> list[str]:
            assert "vllm" not in [section.name for section in sections]
            assert report["sections"] == {"vllm": before["sections"]["vllm"]}
            assert [one["package"] for one in report["absent"]] == ["xllamacpp", "arctic-inference"]
            return []

        monkeypatch.setattr("reader_rag.bench.figures.run.run_sections", run)
        assert CliRunner().invoke(app, ["report", "--out", str(tmp_path)]).exit_code == 0

    def test_a_run_in_the_environment_of_vllm_keeps_what_others_measured(self, tmp_path: Path) -> None:
        before, _ = made(tmp_path)
        before["packages"] = {"torch": "1", "xllamacpp": "2"}
        before["absent"] = []
        now = new_report(ALL_ABSENT, "prompts.jsonl") | {"packages": {"torch": "3", "vllm": "4"}}
        keep_results(now, before)
        assert now["sections"] == before["sections"]
        assert now["packages"] == {"torch": "3", "xllamacpp": "2", "vllm": "4"}
        assert now["absent"] == []

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--only", "sped"], "--only: no section sped; there are speed"),
            (["--top8", "best.npz"], "--top8 goes with --traces"),
            (["--traces", "none.jsonl"], "none.jsonl: there is no such file"),
            (["--render"], "cannot read"),
        ],
    )
    def test_wrong_options_are_errors(self, arguments: list[str], message: str, tmp_path: Path) -> None:
        result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "new"), *arguments])
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_real_commands_run_on_a_tiny_model(self, tmp_path: Path) -> None:
        sections = "exactness,tokens-per-step,recall,int8,datastore,cache"
        result = CliRunner().invoke(app, ["report", "--out", str(tmp_path), "--quick", "--only", sections])
        assert result.exit_code == 0, result.stderr
        report = read_report(tmp_path)
        assert list(report["sections"]) == [
            "exactness",
            "record",
            "tokens-per-step",
            "recall",
            "int8",
            "datastore",
            "cache",
        ]
        for section in report["sections"].values():
            assert all(part["error"] is None for part in section["parts"].values())
        assert "## Exactness" in (tmp_path / "README.md").read_text(encoding="utf-8")
