"""One life of a soak: questions, ingestion, deletion and cancellation on the default models, until it is ended.

It checks what earlier lives left before it begins, and every answer against plain decoding. `make soak` runs it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import re
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import psutil
from soak_journal import Contents, Journal

from reader_rag.config import DatastoreConfig, SamplingParams
from reader_rag.datastore import Datastore
from reader_rag.engine.datastore_lookup import answers_of, texts_of
from reader_rag.engine.engine import Engine
from reader_rag.engine.outputs import Prompt
from reader_rag.llm.context_hooks import passages_from
from reader_rag.model.registry import DEFAULT_EMBED_MODEL, DEFAULT_MODEL
from reader_rag.rag.embedding import LocalEmbedding
from reader_rag.rag.engines import make_retriever, open_store
from reader_rag.rag.ingest import ingest
from reader_rag.rag.stores.contract import DocumentStore
from reader_rag.rag.stores.faiss_store import FaissStore

TENANTS = ("ann", "bob")
LEAVING = "gone"
"""A tenant who asks and is forgotten again and again."""
_NAMES = [f"{name}.txt" for name in sorted(topics)[:24]]
_EDITION = re.compile(r"edition (\d+)")
_PARAMS = SamplingParams(max_tokens=24)
_SAMPLE_S = 2.0
_TEXTS = 12
"""Documents of a tenant in the datastore, besides answers."""


def text_of(name: str, edition: int) -> str:
    """A document, in each of whose paragraphs stands its edition."""
    topic = topics[name.removesuffix(".txt")][:1500]
    return "\n\n".join(f"{paragraph} (edition {edition})" for paragraph in topic.split("\n\n"))


class Worker:
    """What the threads of one life share.

    Args:
        folder: Folder of the soak: documents, store, datastore, journal, records.
        life: Number of this life.
        seed: Decides with `life` what happens.
    """

    def __init__(self, folder: Path, life: int, seed: int) -> None:
        self.folder, self.life, self.seed = folder, life, seed
        self.ending = threading.Event()
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.journal = Journal(folder / "journal.jsonl")
        self.plain: dict[str, list[int]] = self._known_answers()
        warnings.showwarning = self._warned  # type: ignore[assignment]
        warnings.simplefilter("always")
        self.embedding = LocalEmbedding(DEFAULT_EMBED_MODEL)
        recall = DatastoreConfig(keeps_answers=True, max_answer_tokens=20_000)
        self.engine = Engine.load(
            DEFAULT_MODEL,
            dtype="float32",
            profile="off",
            prefix_bytes=64_000_000,
            datastore=folder / "drafts",
            recall=recall,
        )
        assert self.engine.lookup is not None
        self.datastore: Datastore = self.engine.lookup.datastore
        FaissStore(folder / "store").close()
        self.store: DocumentStore = open_store(folder / "store", self.embedding)

    def count(self, **more: int) -> None:
        """Add to the counts of this life."""
        with self._lock:
            self.counts.update(more)

    def problem(self, kind: str, what: str) -> None:
        """Record what must not happen."""
        with self._lock, (self.folder / "problems.jsonl").open("a") as file:
            file.write(json.dumps({"life": self.life, "kind": kind, "what": what}) + "\n")

    # What earlier lives left

    def check(self) -> None:
        """Compare store and datastore with the journal, and go on from what is there."""
        for tenant in TENANTS:
            self._check(f"store/{tenant}", self._stored(tenant))
            self._check(f"texts/{tenant}", self._texts(tenant))
        for damage in self.datastore.verify():
            self.problem("damaged", str(damage))

    def _check(self, what: str, found: Contents) -> None:
        expected = self.journal.expected.get(what)
        if expected is None:
            if found:
                self.problem("lost", f"{what} has {found}, and nothing was put there")
        elif not expected.allows(found):
            self.problem("lost", f"{what} has {found}, not {expected.committed} or {expected.pending}")
        self.journal.settle(what, found)
        self.count(checks=1)

    def _stored(self, tenant: str) -> Contents:
        """The editions of a tenant's files in the store; each file must be of one edition."""
        store = self.store.for_tenant(tenant)
        editions: dict[str, set[int]] = {Path(record.path).name: set() for record in store.documents()}
        for node in store.get_nodes():
            name = str(node.metadata["file_name"])
            editions.setdefault(name, set()).update(map(int, _EDITION.findall(node.get_content())))
        for name, found in editions.items():
            if len(found) != 1:
                self.problem("mixed", f"{name} of {tenant} has editions {sorted(found)}")
        return {name: max(found, default=0) for name, found in editions.items()}

    def _texts(self, tenant: str) -> Contents:
        """The editions of a tenant's texts in the datastore; each must have the tokens that were written."""
        contents = {}
        space = texts_of(tenant)
        for name in self.datastore.documents(namespace=space) if space in self.datastore.namespaces() else []:
            tokens = self.datastore.read(name, namespace=space)
            assert tokens is not None
            edition = int(_EDITION.findall(self.engine.tokenizer.decode(tokens))[0])
            if tokens.tolist() != self._tokens(name, edition):
                self.problem("mixed", f"the text {name} of {tenant} has other tokens")
            contents[name] = edition
        return contents

    def _tokens(self, name: str, edition: int) -> list[int]:
        return list(self.engine.encode(text_of(name, edition)[:600] + f" (edition {edition})").token_ids)

    # What happens

    def change(self, rng: random.Random) -> None:
        """Ingest changed, new and removed files; or change the datastore; or forget a tenant."""
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                self._ingest(rng.choice(TENANTS), rng)
            case 4 | 5 | 6:
                self._change_text(rng.choice(TENANTS), rng)
            case _:
                self._forget(rng)

    def _ingest(self, tenant: str, rng: random.Random) -> None:
        what, folder = f"store/{tenant}", self.folder / "docs" / tenant
        folder.mkdir(parents=True, exist_ok=True)
        for name in rng.sample(_NAMES, rng.randrange(1, 5)):
            if (folder / name).exists() and rng.randrange(3) == 0 and len(list(folder.iterdir())) > 2:
                (folder / name).unlink()
                self.count(removed_files=1)
            else:
                (folder / name).write_text(text_of(name, rng.randrange(1, 10**6)), encoding="utf-8")
        contents = {path.name: int(_EDITION.findall(path.read_text(encoding="utf-8"))[0]) for path in folder.iterdir()}
        self.journal.begin(what, contents)
        ingest(folder, self.folder / "store", embed_model=self.embedding, tenant=tenant)
        self.journal.done(what)
        if self._stored(tenant) != contents:
            self.problem("lost", f"{what} is not what was ingested")
        self.count(ingestions=1)

    def _change_text(self, tenant: str, rng: random.Random) -> None:
        what, space, name = f"texts/{tenant}", texts_of(tenant), rng.choice(_NAMES[:_TEXTS])
        contents = dict(self.journal.expected[what].committed)
        if name in contents and rng.randrange(2):
            del contents[name]
            self.journal.begin(what, contents)
            self.datastore.remove(name, namespace=space)
        else:
            contents[name] = rng.randrange(1, 10**6)
            self.journal.begin(what, contents)
            self.datastore.add(name, self._tokens(name, contents[name]), namespace=space)
        self.datastore.commit()
        self.journal.done(what)
        if not rng.randrange(6):
            self.datastore.compact(namespace=space)
        self.count(text_changes=1)

    def _forget(self, rng: random.Random) -> None:
        self.ask(rng, LEAVING)
        self.engine.forget(LEAVING)
        if answers_of(LEAVING) in self.datastore.namespaces():
            self.problem("returned", "answers of a tenant that was forgotten")
        self.count(forgotten=1)

    def ask(self, rng: random.Random, tenant: str | None = None) -> None:
        """Ask a question with retrieved passages, and compare the answer with plain decoding."""
        owner = tenant or rng.choice(TENANTS)
        prompt, passages = self._question(rng, owner)
        if tenant is None and rng.randrange(4) == 0:
            stream = self.engine.submit(prompt, _PARAMS, passages, tenant=owner)
            for _ in zip(range(rng.randrange(1, 6)), stream, strict=False):
                pass
            stream.close()
            self.count(cancelled=1)
            return
        answer = self.engine.generate(prompt, _PARAMS, passages, tenant=owner)
        plain = self._plain(prompt)
        if list(answer.token_ids) != plain:
            self.problem("wrong", f"{list(answer.token_ids)} in place of {plain} after {list(prompt.token_ids)}")
        self.count(answers=1, tokens=len(plain))

    def _question(self, rng: random.Random, tenant: str) -> tuple[Prompt, Any]:
        question = f"What is said about {rng.choice(_NAMES).removesuffix('.txt')}?"
        retriever = make_retriever(self.store.for_tenant(tenant), self.embedding, 1)
        nodes = retriever.retrieve(question)
        text = "\n\n".join([*(node.node.get_content() for node in nodes), question])
        return self.engine.encode_chat([{"role": "user", "content": text}]), passages_from(nodes)

    def _plain(self, prompt: Prompt) -> list[int]:
        """The plain answer, by this life or an earlier one."""
        key = hashlib.sha256(repr(tuple(prompt.token_ids)).encode()).hexdigest()
        known = self.plain.get(key)
        if known is None:
            plain = self.engine.generate(prompt, replace(_PARAMS, speculate=False), recall=False)
            known = self.plain[key] = list(plain.token_ids)
            with self._lock, (self.folder / "plain.jsonl").open("a") as file:
                file.write(json.dumps([key, known]) + "\n")
        else:
            self.count(known_answers=1)
        return known

    def _known_answers(self) -> dict[str, list[int]]:
        path, known = self.folder / "plain.jsonl", {}
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                key, tokens = json.loads(line)
            except ValueError:  # a kill cut it off, and the next life wrote behind it
                continue
            known[key] = tokens
        return known

    # Running

    def run(self) -> None:
        """Work until `ending` is set."""
        threads = [
            threading.Thread(target=self._repeat, args=(work, name), name=name)
            for name, work in (("ask 1", self.ask), ("ask 2", self.ask), ("change", self.change))
        ]
        for thread in threads:
            thread.start()
        started = time.monotonic()
        while not self.ending.wait(_SAMPLE_S):
            self._sample(time.monotonic() - started)
        for thread in threads:
            thread.join()
        self._sample(time.monotonic() - started)
        self.engine.close()
        self.store.close()  # type: ignore[attr-defined]

    def _repeat(self, work: Callable[[random.Random], None], name: str) -> None:
        rng = random.Random(f"{self.seed}-{self.life}-{name}")
        while not self.ending.is_set():
            try:
                work(rng)
            except BaseException:
                self.problem("error", traceback.format_exc())
                return

    def _sample(self, seconds: float) -> None:
        process = psutil.Process()
        row: Mapping[str, Any] = {
            "life": self.life,
            "seconds": round(seconds, 1),
            "rss_mb": round(process.memory_info().rss / 1e6, 1),
            "files": process.num_fds(),
            "threads": process.num_threads(),
            "counts": dict(self.counts),
        }
        with (self.folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _warned(self, message: Warning | str, *_: object, **__: object) -> None:
        text = str(message)
        if "interrupted commit" in text:
            self.count(interrupted_commits=1)
        elif text.startswith("datastore:"):
            self.problem("damaged", text)


class _Problems(logging.Handler):
    """Errors that the package logs are problems."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(logging.ERROR)
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        self._worker.problem("error", self.format(record))


def main() -> None:
    """Run one life; SIGTERM ends it in order."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("life", type=int)
    arguments.add_argument("seed", type=int)
    given = arguments.parse_args()
    worker = Worker(given.folder, given.life, given.seed)
    logging.getLogger("reader_rag").addHandler(_Problems(worker))
    signal.signal(signal.SIGTERM, lambda *_: worker.ending.set())
    worker.check()
    worker.run()


if __name__ == "__main__":
    main()
