"""Whether one commit answers as fast as another, with the same tokens: the meaning of "no slower" in this project.

    .venv/bin/python .ci/compare_commits.py OLD NEW [--prompts FILE.jsonl] [--pairs 20]

OLD and NEW are folders of worktrees, or commits, for which worktrees are made and removed again. One process in each
loads the model, answers some questions so that all loops are compiled, and forgets what it learned. Then both answer
the same prompts, one process at a time; which of the two goes first alternates. The report is the median of the paired
ratios time(OLD) / time(NEW) of whole questions, with its 90% interval.

Exit status 0: all answers are identical, and the median is at least 0.98 or the interval holds 1. Else 1.
Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

LEAST_RATIO = 0.98
RESAMPLES = 10_000
WARM_UP = "Write two sentences about the sea, then say the same two sentences once more."
WARM_UP_PROMPTS = 4
"""How many of the prompts both answer beforehand: the longest and the shortest."""


class Worker:
    """A process that answers with the code of one worktree.

    Args:
        tree: The worktree. It runs in the virtual environment `.venv` of the tree, else in the one of this process.
        settings: The model, its dtype and the most tokens of an answer.
    """

    def __init__(self, tree: Path, settings: argparse.Namespace) -> None:
        python = tree / ".venv" / "bin" / "python"
        command = [str(python if python.exists() else sys.executable), "-P", str(Path(__file__).resolve()), "--worker"]
        command += [str(tree), settings.model, settings.dtype, str(settings.max_tokens)]
        environment = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
        self.tree = tree
        self._process = subprocess.Popen(
            command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self, text: str | None) -> tuple[float, list[int]]:
        """Answer a prompt, or forget earlier ones and their answers if it is None.

        Returns:
            Seconds that the whole question took, and the tokens of the answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(text) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.tree} ended; its error is above")
        seconds, tokens = json.loads(line)
        return seconds, tokens

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve(tree: str, model: str, dtype: str, max_tokens: str) -> None:
    """The worker process: answer each line of standard input, until it ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints, prints to standard error

    import reader_rag

    if not Path(str(reader_rag.__file__)).resolve().is_relative_to(Path(tree).resolve()):
        raise SystemExit(f"reader_rag is imported from {reader_rag.__file__}, not from {tree}")
    try:
        from reader_rag import SamplingParams
    except ImportError:  # up to 0.1
        from reader_rag import GenerationConfig as SamplingParams  # type: ignore[no-redef, attr-defined]

    if hasattr(reader_rag, "configure_threads"):
        reader_rag.configure_threads()  # up to 0.1 the import did it
    # Up to 0.2 nothing was computed while an engine is idle.
    idle = {"profile": "off"} if hasattr(getattr(reader_rag, "EngineConfig", None), "profile") else {}
    engine = reader_rag.Engine.load(model, dtype=dtype, **idle)
    settings = SamplingParams(max_tokens=int(max_tokens))
    for line in sys.stdin:
        text, tokens = json.loads(line), []
        begin = time.perf_counter()
        if text is None:
            engine.forget()
        else:
            prompt = engine.encode_chat([{"role": "user", "content": text}])
            tokens = list(engine.generate(prompt, settings).token_ids)
        replies.write(json.dumps([time.perf_counter() - begin, tokens]) + "\n")
        replies.flush()


@contextmanager
def worktree(name: str) -> Iterator[Path]:
    """The worktree that `name` is, or a temporary one of the commit that it names."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    repository = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    with tempfile.TemporaryDirectory(prefix="compare-commits-") as folder:
        tree = Path(folder) / "tree"
        added = [*repository, "worktree", "add", "--quiet", "--detach", str(tree), name]
        if subprocess.run(added, check=False).returncode:
            raise SystemExit(f"{name} is neither a folder nor a commit")
        try:
            yield tree
        finally:
            subprocess.run([*repository, "worktree", "remove", "--force", str(tree)], check=True)


def read_prompts(path: Path | None, count: int) -> list[tuple[str, str]]:
    """Identifiers and texts of `count` prompts; fewer are repeated.

    Args:
        path: A file as for `reader-rag bench generate`; None: prompts from texts of this machine, of all categories.
        count: How many.
    """
    if path is None:
        from reader_rag.bench.local_prompts import local_prompts

        local = local_prompts(-(-count // 3))
        by_category = [[p for p in local if p.category == category] for category in ("rag", "summarization", "chat")]
        prompts = [(prompt.id, prompt.text) for group in zip(*by_category, strict=False) for prompt in group]
    else:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [(str(row["id"]), str(row["turns"][0])) for row in rows]
    return (prompts * (count // len(prompts) + 1))[:count]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 90% bootstrap interval of the median of `ratios`. The same ratios give the same interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return medians[RESAMPLES * 5 // 100], medians[RESAMPLES * 95 // 100 - 1]


def is_no_slower(ratios: Sequence[float]) -> bool:
    """Whether paired ratios time(old) / time(new) pass: a median of at least 0.98, or an interval that holds 1."""
    low, high = interval(ratios)
    return statistics.median(ratios) >= LEAST_RATIO or low <= 1.0 <= high


def compare(old: Worker, new: Worker, prompts: Sequence[tuple[str, str]]) -> tuple[list[float], list[str]]:
    """Answer each prompt with both workers.

    Returns:
        The paired ratios time(old) / time(new), and the identifiers of the prompts whose answers differ.
    """
    by_length = sorted((text for _, text in prompts), key=len)
    warm_up = [WARM_UP, *by_length[-WARM_UP_PROMPTS // 2 :], *by_length[: WARM_UP_PROMPTS // 2]]
    for worker in (old, new):
        for text in (*warm_up, None):
            worker.answer(text)
    ratios, different = [], []
    for number, (identifier, text) in enumerate(prompts):
        order = (old, new) if number % 2 == 0 else (new, old)
        answers: dict[Any, tuple[float, list[int]]] = {worker: worker.answer(text) for worker in order}
        (old_s, old_tokens), (new_s, new_tokens) = answers[old], answers[new]
        ratios.append(old_s / new_s)
        if old_tokens != new_tokens:
            different.append(identifier)
        print(
            f"{number + 1:3} {identifier:28} {len(new_tokens):4} tokens {old_s:8.3f} s {new_s:8.3f} s {ratios[-1]:6.3f}"
            f"{'' if old_tokens == new_tokens else '  answers differ'}",
            flush=True,
        )
    return ratios, different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="worktree or commit to compare with")
    parser.add_argument("new", help="worktree or commit that must be no slower")
    parser.add_argument("--prompts", type=Path, help="prompts, a JSON object a line; default: texts of this machine")
    parser.add_argument("--pairs", type=int, default=20, help="how many prompts both answer (default 20)")
    parser.add_argument("--model", default="smollm2-135m", help="alias, local folder or hub id")
    parser.add_argument("--dtype", default="float32", help="in float32 drafted and plain answers are identical")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of an answer (default 128)")
    settings = parser.parse_args()
    if settings.pairs < 1:
        parser.error("--pairs must be at least 1")
    prompts = read_prompts(settings.prompts, settings.pairs)
    with ExitStack() as stack:
        trees = [stack.enter_context(worktree(name)) for name in (settings.old, settings.new)]
        workers = []
        for tree in trees:
            workers.append(Worker(tree, settings))
            stack.callback(workers[-1].close)
        ratios, different = compare(*workers, prompts)
    low, high = interval(ratios)
    passes = is_no_slower(ratios)
    print(f"time(old) / time(new): median {statistics.median(ratios):.3f}, 90% interval {low:.3f} to {high:.3f}")
    print(f"answers: {len(ratios) - len(different)} of {len(ratios)} identical", *different)
    print("no slower" if passes else f"slower: the median is below {LEAST_RATIO} and the interval does not hold 1")
    return 0 if passes and not different else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
