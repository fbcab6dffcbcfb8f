"""Starts workers, kills them at random, and reports what was lost, wrong, or grew: `make soak`.

Two thirds of the time are lives that end with `kill -9` at a random moment; the last third is one life whose memory,
open files and threads are watched, and which ends in order. A server joins by a worker that asks it over HTTP.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from soak_journal import MOST_GROWTH, growth

from reader_rag.config.threads import configure_threads

WORKER = Path(__file__).with_name("soak_worker.py")
_LONGEST_LIFE_S = 60.0
_KILLED_AT_START = 0.2
"""Share of the killed lives that are killed while they start, load models and check what is there."""
_START_S = 15.0
_END_S = 300.0
"""Seconds in which a life ends after it was asked to."""


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON; the last one may have been cut off by a kill."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


class Soak:
    """A soak.

    Args:
        folder: An empty folder for all of it.
        seconds: How long it runs.
        seed: Decides what happens, as far as threads leave it.
    """

    def __init__(self, folder: Path, seconds: float, seed: int) -> None:
        self.folder, self.seconds, self.seed = folder, seconds, seed
        self.lives = self.kills = 0
        self.failed: list[str] = []

    def run(self) -> dict[str, Any]:
        """Run it.

        Returns:
            The report, JSON-ready.
        """
        rng = random.Random(self.seed)
        started = time.monotonic()
        while (left := started + self.seconds * 2 / 3 - time.monotonic()) > 0:
            starts = rng.random() > _KILLED_AT_START
            life = rng.uniform(0, _LONGEST_LIFE_S if starts else _START_S)
            self._life(min(life, left), kill=True, starts=starts)
        self._life(max(started + self.seconds - time.monotonic(), 1.0))
        self._life(1.0)  # checks what the last one left
        return self._report(time.monotonic() - started)

    def _life(self, seconds: float, *, kill: bool = False, starts: bool = True) -> None:
        """One worker.

        Args:
            seconds: How long it lives.
            kill: Whether it is killed, not asked to end.
            starts: Whether the time counts from when it works, not from when it is started.
        """
        command = [sys.executable, str(WORKER), str(self.folder), str(self.lives), str(self.seed)]
        log = self.folder / f"life-{self.lives}.log"
        with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                if starts:
                    self._wait_until_it_works(process)
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                if kill:
                    process.kill()
                    self.kills += 1
                else:
                    process.terminate()
                    self._ended(process, log)
            except BaseException:  # the soak itself is ended
                process.kill()
                raise
            else:
                self._ended(process, log)
        self.lives += 1

    def _wait_until_it_works(self, process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None and not any(row["life"] == self.lives for row in self._samples()):
            time.sleep(1)

    def _ended(self, process: subprocess.Popen[bytes], log: Path) -> None:
        try:
            code = process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            self.failed.append(f"life {self.lives} did not end in {_END_S:.0f} s")
            return
        if code:
            self.failed.append(f"life {self.lives} ended with status {code}: {log.read_text()[-2000:]}")

    def _samples(self) -> list[dict[str, Any]]:
        return read(self.folder / "samples.jsonl")

    def _report(self, seconds: float) -> dict[str, Any]:
        samples = self._samples()
        last = {row["life"]: row["counts"] for row in samples}
        counts: Counter[str] = Counter()
        for row in last.values():
            counts.update(row)
        watched = [row for row in samples if row["life"] == self.lives - 2]
        figures = {}
        for name, most in MOST_GROWTH.items():
            before, after, flat = growth([row[name] for row in watched] or [0.0], most)
            figures[name] = {"third_quarter": before, "last_quarter": after, "flat": flat}
        problems = read(self.folder / "problems.jsonl") + [{"kind": "ended", "what": what} for what in self.failed]
        return {
            "seconds": round(seconds),
            "seed": self.seed,
            "lives": self.lives,
            "kills": self.kills,
            "counts": dict(sorted(counts.items())),
            "watched_s": watched[-1]["seconds"] if watched else 0,
            "flat": figures,
            "problems": problems,
        }


_COUNTED = {
    "answers": "answers compared with plain decoding, token by token",
    "known_answers": "of them compared with a plain answer from before, most of an earlier process",
    "tokens": "tokens of these answers",
    "cancelled": "questions cancelled while they were answered",
    "ingestions": "ingestions, each with 1 to 4 files changed, new or removed",
    "text_changes": "texts added to the datastore, replaced or removed",
    "forgotten": "tenants forgotten with their answers",
    "checks": "comparisons of a tenant's documents after a start with what was committed",
    "interrupted_commits": "interrupted commits of the datastore, rolled back",
}


_LOST = ("lost", "mixed", "damaged", "returned")
"""Kinds of problems with documents."""


def as_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    kinds = Counter(problem["kind"] for problem in report["problems"])
    rows = [
        ("seconds, seed", f"{report['seconds']}, {report['seed']}"),
        ("processes, ended by `kill -9`", f"{report['lives']}, {report['kills']}"),
        *((text, report["counts"].get(name, 0)) for name, text in _COUNTED.items()),
        ("wrong answers", kinds["wrong"]),
        (
            "documents lost, partial, damaged or returned",
            sum(kinds[k] for k in ("lost", "mixed", "damaged", "returned")),
        ),
        ("other errors", kinds["error"] + kinds["ended"]),
    ]
    for name, text in (("rss_mb", "resident memory, MB"), ("files", "open files"), ("threads", "threads")):
        figure = report["flat"][name]
        label = f"{text}, third and last quarter of {report['watched_s']:.0f} s"
        rows.append((label, f"{figure['third_quarter']:g}, {figure['last_quarter']:g}"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def main() -> None:
    """Run a soak and print its report; exit status 1 if something was lost, wrong, failed or grew."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=3600.0, help="how long (3600)")
    arguments.add_argument("--seed", type=int, default=1, help="decides what happens (1)")
    arguments.add_argument("--json", action="store_true", help="print JSON in place of Markdown")
    arguments.add_argument("--folder", type=Path, help="an empty folder that is kept (a temporary one)")
    given = arguments.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    configure_threads()  # for the workers, which inherit the environment
    folder = given.folder or Path(tempfile.mkdtemp(prefix="reader-rag-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = Soak(folder, given.seconds, given.seed).run()
    print(json.dumps(report, indent=1, ensure_ascii=False) if given.json else as_markdown(report))
    flat = all(figure["flat"] for figure in report["flat"].values())
    if report["problems"] or not flat:
        for problem in report["problems"][:20]:
            print(f"{problem['kind']}: {problem['what']}", file=sys.stderr)
        print(f"not flat: {report['flat']}" if not flat else "", f"everything is kept in {folder}", file=sys.stderr)
        raise SystemExit(1)
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
