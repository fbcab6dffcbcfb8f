"""A profile that is computed in short passes is the one that the command makes, whatever happens in between."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from tiny_models import make_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from reader_rag.draft.profile import Profile, profile_path, profiles
from reader_rag.engine.engine import Engine
from reader_rag.model.fingerprint import model_fingerprint
from reader_rag.model.profile import task as profile_task
from reader_rag.model.profile.successors import ProfileBuilder, make_profile
from reader_rag.model.profile.task import ProfileLimits, ProfileTask, load_profile

MODEL = "0123456789abcdef" * 2


class Clock:
    """Seconds that pass by themselves never, and in a pass by `seconds(tokens)`."""

    def __init__(self, seconds: Callable[[int], float] = lambda tokens: 0.01 + 0.0005 * tokens) -> None:
        self.now = 100.0
        self.seconds = seconds
        self.passes: list[int] = []

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    advance = ProfileBuilder.advance

    def timed(self: ProfileBuilder, count: int) -> None:
        advance(self, count)
        made.passes.append(count)
        made.now += made.seconds(count)

    monkeypatch.setattr(ProfileBuilder, "advance", timed)
    return made


@pytest.fixture
def make_task(tiny_engine: Engine, tmp_path: Path, clock: Clock) -> Iterator[Callable[..., ProfileTask]]:
    made: list[ProfileTask] = []

    def make(folder: Path = tmp_path, model: str = MODEL, **limits: Any) -> ProfileTask:
        builder = ProfileBuilder(tiny_engine.target, tiny_engine.tokenizer)
        # Each second is one of processor time on two cores.
        task = ProfileTask(
            builder,
            "tiny",
            model,
            folder,
            limits=ProfileLimits(**limits),
            clock=clock,
            cpu_clock=lambda: 2 * clock.now,
        )
        made.append(task)
        return task

    yield make
    for task in made:
        task.close()


@pytest.fixture(scope="module")
def expected(tiny_engine: Engine) -> Profile:
    return make_profile(tiny_engine.target, tiny_engine.tokenizer, name="tiny", drafting=tiny_engine.drafting)


def run(task: ProfileTask, passes: int = 1000) -> int:
    """Run passes as long as some are wanted; returns how many there were."""
    count = 0
    while task.pause_s(idling=True) == 0.0 and count < passes:
        task.run()
        count += 1
    return count


def written(folder: Path) -> Profile:
    return Profile.load(profile_path(folder, MODEL))


def test_short_passes_give_the_profile_that_the_command_makes(
    make_task: Callable[..., ProfileTask], expected: Profile, tmp_path: Path
) -> None:
    task = make_task()
    assert run(task) > 5
    task.close()
    assert task.share == 1.0
    assert np.array_equal(task._builder.tokens, expected.tokens)
    found = written(tmp_path)
    assert np.array_equal(found.tokens, expected.tokens)
    assert (found.name, found.vocabulary, found.model) == ("tiny", expected.vocabulary, MODEL)
    assert found.complete


def test_passes_grow_to_the_time_that_they_may_take(make_task: Callable[..., ProfileTask], clock: Clock) -> None:
    run(make_task())
    # 3 tokens and the one before them are a block of four rows. Sizes double at most.
    assert clock.passes[:4] == [3, 7, 15, 31]
    assert max(clock.passes) <= 63
    assert all((count + 1) % 4 == 0 for count in clock.passes)
    assert all(clock.seconds(count) <= 0.05 for count in clock.passes)


def test_passes_shrink_when_the_machine_becomes_slower(make_task: Callable[..., ProfileTask], clock: Clock) -> None:
    task = make_task()
    run(task, 5)
    clock.seconds = lambda tokens: 0.003 * tokens
    run(task, 3)
    assert clock.passes[-3:] == [55, 11, 11]


def test_a_task_goes_on_where_a_killed_one_had_last_written(
    make_task: Callable[..., ProfileTask], expected: Profile, tmp_path: Path, clock: Clock
) -> None:
    killed = make_task(save_every_s=0.05)
    run(killed, 5)
    killed._saving.join()  # type: ignore[union-attr]
    killed._lock.release()  # type: ignore[union-attr]  # as the system does
    kept = written(tmp_path)
    assert 0 < kept.done < killed._builder.done  # type: ignore[operator]
    assert np.array_equal(kept.tokens[: kept.done], expected.tokens[: kept.done])
    assert (kept.tokens[kept.done :] == -1).all()
    assert kept.cpu_s > 0.0

    clock.passes.clear()
    again = make_task()
    assert again._builder.done == kept.done
    run(again)
    assert sum(clock.passes) >= len(expected.tokens) - kept.done  # type: ignore[operator]
    assert sum(clock.passes[:-1]) < len(expected.tokens) - kept.done  # type: ignore[operator]
    assert np.array_equal(again._builder.tokens, expected.tokens)
    assert again._cpu_s > kept.cpu_s
    killed._unsaved_s = 0.0


def test_closing_writes_what_was_computed_and_ends_the_task(
    make_task: Callable[..., ProfileTask], tmp_path: Path
) -> None:
    task = make_task()
    run(task, 2)
    assert not profile_path(tmp_path, MODEL).exists()
    task.close()
    assert written(tmp_path).done == 3 + 7
    assert task.stopped
    with FileLock(profile_path(tmp_path, MODEL).with_suffix(".lock"), timeout=0):
        pass


def test_a_task_that_never_ran_leaves_no_file(make_task: Callable[..., ProfileTask], tmp_path: Path) -> None:
    make_task(tmp_path / "profiles").close()
    assert not (tmp_path / "profiles").exists()


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = bytes(8)
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def of_another_version(path: Path) -> None:
    with np.load(path) as file:
        content = dict(file)
    np.savez_compressed(path, **content | {"version": np.array(3)})


def of_another_model(path: Path) -> None:
    replace(Profile.load(path), model="f" * 32).save(path)


def of_another_vocabulary(path: Path) -> None:
    replace(Profile.load(path), vocabulary="f" * 64).save(path)


def of_fewer_tokens(path: Path) -> None:
    found = Profile.load(path)
    replace(found, tokens=np.minimum(found.tokens[:20], 19), done=20).save(path)


@pytest.mark.parametrize(
    "change", [damaged, cut, of_another_version, of_another_model, of_another_vocabulary, of_fewer_tokens]
)
def test_a_file_that_cannot_be_trusted_is_computed_anew(
    change: Callable[[Path], None], make_task: Callable[..., ProfileTask], expected: Profile, tmp_path: Path
) -> None:
    path = profile_path(tmp_path, MODEL)
    wrong = np.roll(expected.tokens, 1, axis=0)
    Profile("tiny", expected.vocabulary, wrong, MODEL, done=200, cpu_s=1.0).save(path)
    change(path)
    task = make_task()
    assert task._builder.done == 0
    run(task)
    task.close()
    assert np.array_equal(written(tmp_path).tokens, expected.tokens)


def test_only_one_process_at_a_time_computes(
    make_task: Callable[..., ProfileTask], expected: Profile, clock: Clock
) -> None:
    first, second = make_task(), make_task()
    run(first, 2)
    assert run(second) == 1
    began = clock.now
    assert second._builder.done == 0
    run(first)
    first.close()
    assert second.pause_s(idling=True) == pytest.approx(60.0 - (clock.now - began))
    clock.now += 60.0  # after which it looks again, and finds the other's
    passes = len(clock.passes)
    run(second)
    assert len(clock.passes) == passes
    assert np.array_equal(second._builder.tokens, expected.tokens)


def test_a_lock_of_a_task_that_is_gone_holds_nobody_up(make_task: Callable[..., ProfileTask], tmp_path: Path) -> None:
    profile_path(tmp_path, MODEL).with_suffix(".lock").touch()
    task = make_task()
    run(task)
    assert task.share == 1.0


def test_no_more_is_computed_once_the_processor_time_is_spent(
    make_task: Callable[..., ProfileTask], expected: Profile, tmp_path: Path, clock: Clock
) -> None:
    task = make_task(cpu_s=0.2)
    run(task)
    task.close()
    found = written(tmp_path)
    # These passes take 23, 27, 35, 51 and 67 ms of processor time.
    assert clock.passes == [3, 7, 15, 31, 47]
    assert found.cpu_s == pytest.approx(0.203)
    assert found.done == 103
    assert np.array_equal(found.tokens[:103], expected.tokens[:103])
    assert not found.complete
    assert make_task(cpu_s=0.2).stopped
    assert not make_task(cpu_s=0.3).stopped


def test_a_model_that_is_too_slow_has_none(make_task: Callable[..., ProfileTask], clock: Clock) -> None:
    clock.seconds = lambda tokens: 0.3
    task = make_task()
    while not task.stopped:
        assert run(task) == 1
        clock.now += 10.0
    assert clock.passes == [3] * 10


def test_a_task_pauses_after_a_slow_pass_and_goes_on_when_the_machine_is_free(
    make_task: Callable[..., ProfileTask], clock: Clock
) -> None:
    clock.seconds = lambda tokens: 0.3
    task = make_task()
    assert run(task) == 1
    assert task.pause_s(idling=True) == pytest.approx(10.0)
    clock.now += 10.0
    clock.seconds = lambda tokens: 0.01
    run(task)
    assert task.share == 1.0


def test_a_task_that_gets_little_processor_time_is_not_too_slow(
    make_task: Callable[..., ProfileTask], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.seconds = lambda tokens: 0.3
    task = make_task()
    monkeypatch.setattr(task, "_cpu_clock", lambda: clock.now / 3)  # a third of the time it has a processor
    for _ in range(20):
        assert run(task) == 1
        clock.now += 10.0
    assert not task.stopped


def test_a_task_goes_on_some_seconds_after_a_request(make_task: Callable[..., ProfileTask]) -> None:
    task = make_task()
    assert task.pause_s(idling=False) == 2.0
    task.run()
    assert (task.pause_s(idling=True), task.pause_s(idling=False)) == (0.0, 2.0)
    task.close()
    assert task.pause_s(idling=True) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_cannot_be_written_leaves_the_profile_in_memory_with_one_message(
    number: int,
    make_task: Callable[..., ProfileTask],
    expected: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(self: Profile, path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Profile, "save", fail)
    task = make_task(save_every_s=0.03)
    run(task)
    task.close()
    assert np.array_equal(task._builder.tokens, expected.tokens)
    assert [record.message for record in caplog.records] == [
        f"the profile of tiny is kept in memory: {profile_path(tmp_path, MODEL)} cannot be written "
        f"({os.strerror(number)})"
    ]


def test_a_cache_folder_that_cannot_be_made_leaves_the_profile_in_memory(
    make_task: Callable[..., ProfileTask], expected: Profile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    task = make_task(tmp_path / "file" / "profiles")
    run(task)
    assert np.array_equal(task._builder.tokens, expected.tokens)
    assert len(caplog.records) == 1


def test_a_pass_that_fails_ends_the_task_with_a_message(
    make_task: Callable[..., ProfileTask], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task = make_task()
    run(task, 2)

    def fail(self: ProfileBuilder, count: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ProfileBuilder, "advance", fail)
    task.run()
    assert task.stopped
    assert [record.message for record in caplog.records] == ["no profile of tiny is computed: out of memory"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork() on this system")
def test_a_fork_writes_nothing_when_it_closes(make_task: Callable[..., ProfileTask], tmp_path: Path) -> None:
    task = make_task()
    run(task, 2)
    task._process += 1  # as in a child
    task.close()
    assert not profile_path(tmp_path, MODEL).exists()


# What an engine begins with


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and engines that have time for profiles; its folder of profiles."""
    monkeypatch.setenv("READER_RAG_CACHE", str(tmp_path))
    monkeypatch.setattr(profile_task, "LIMITS", ProfileLimits())
    return tmp_path / "profiles"


def load(engine: Engine, computes: bool = True, **changes: Any) -> tuple[Profile | None, ProfileTask | None]:
    arguments = {"name": "tiny", "drafting": engine.drafting, "report": lambda share: None} | changes
    return load_profile(engine.target, engine.tokenizer, computes=computes, **arguments)


def test_rows_that_the_task_computes_appear_in_the_profile_that_an_engine_has(
    tiny_engine: Engine, cache: Path, expected: Profile
) -> None:
    profile, task = load(tiny_engine)
    assert profile is not None
    assert task is not None
    assert (profile.tokens == -1).all()
    task.run()
    assert np.array_equal(profile.tokens[:3], expected.tokens[:3])
    assert (profile.tokens[3:] == -1).all()
    task.close()
    assert profile_path(cache, model_fingerprint(tiny_engine.model)).exists()


def test_what_was_computed_is_used_where_no_more_is(tiny_engine: Engine, cache: Path, expected: Profile) -> None:
    assert load(tiny_engine, computes=False) == (None, None)
    assert not cache.exists()
    _, task = load(tiny_engine)
    assert task is not None
    task.run()
    task.close()
    profile, task = load(tiny_engine, computes=False)
    assert task is None
    assert profile is not None
    assert np.array_equal(profile.tokens[:3], expected.tokens[:3])


def test_until_it_has_its_own_row_a_model_has_that_of_a_profile_of_its_vocabulary(
    tiny_engine: Engine, cache: Path, expected: Profile
) -> None:
    cache.mkdir()
    (cache / "0.npz").write_bytes(b"damaged")
    Profile("family", expected.vocabulary, np.full_like(expected.tokens, 7)).save(cache / "1.npz")
    replace(expected, tokens=np.full_like(expected.tokens, 8), model="f" * 32).save(cache / "2.npz")
    profile, task = load(tiny_engine)
    assert profile is not None
    assert task is not None
    assert (profile.tokens == 7).all()
    task.run()
    task.close()
    assert np.array_equal(profile.tokens[:3], expected.tokens[:3])
    assert (profile.tokens[3:] == 7).all()
    own = Profile.load(profile_path(cache, model_fingerprint(tiny_engine.model)))
    assert own.done == 3
    assert (own.tokens[3:] == -1).all()
    # Programs that know no model take complete profiles only, those that name no model first.
    (cache / "0.npz").unlink()
    found = profiles(cache)
    assert [bool(one.model) for one in found] == [False, False, True]
    assert (found[0].name, found[2].model) == ("family", "f" * 32)


def test_the_model_that_a_shipped_profile_was_made_of_computes_none(
    tiny_engine: Engine, cache: Path, expected: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = replace(expected, name="smollm2-135m")
    monkeypatch.setattr(profile_task, "profiles", lambda: [shipped])
    assert load(tiny_engine, name="smollm2-135m") == (shipped, None)
    profile, task = load(tiny_engine, name="smollm2-360m")
    assert task is not None
    assert profile is not None
    assert np.array_equal(profile.tokens, shipped.tokens)


def test_a_model_that_verifies_no_trees_computes_none(tiny_engine: Engine, cache: Path) -> None:
    assert load(tiny_engine, drafting="chain") == (None, None)


def test_an_engine_computes_its_profile_while_it_is_idle_unless_it_is_off(
    tiny_model: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    assert Engine(tiny_model, tiny_tokenizer, profile="off").scheduler.profile_task is None
    assert Engine(make_model("Bloom"), tiny_tokenizer).scheduler.profile_task is None
    engine = Engine(tiny_model, tiny_tokenizer)
    task = engine.scheduler.profile_task
    assert task is not None
    task.run()
    prior = engine.context.draft_states.of("", engine.config.draft).successors.prior
    assert (prior[:3] >= 0).all()
    assert (prior[3:] == -1).all()
    engine.close()
    assert task.stopped
    assert Profile.load(profile_path(cache, model_fingerprint(tiny_model))).done == 3
