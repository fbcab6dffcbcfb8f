"""Ingestion of uploads in the background, with progress."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from reader_rag.config import ReadLimits, ServerConfig
from reader_rag.errors import BusyError, IngestError, ReaderError
from reader_rag.rag.ingest import IngestReport, SkippedFile, ingest
from reader_rag.server.documents.library import PREVIOUS, Library, writing_errors
from reader_rag.server.documents.text import document_id
from reader_rag.server.errors import log_bug

_WORKERS = 4
_KEPT_JOBS = 1024
"""States that are kept, so that clients can ask for jobs that have ended."""
_STOPPED = "the service was stopped"
_WATCH_S = 0.05

State = Literal["queued", "running", "done", "failed"]


@dataclass(frozen=True)
class Upload:
    """A file that was uploaded.

    Attributes:
        path: Where it was put.
        name: Its safe name, which no other file of the upload has.
    """

    path: Path
    name: str


@dataclass(frozen=True)
class JobState:
    """How far a job is.

    Attributes:
        id: Id of the job.
        tenant: Whose documents it changes.
        state: "queued", "running", "done" or "failed".
        stage: What it does: "read" files, or "embed" chunks; "" before and after.
        done: How much of the stage is done.
        total: How much there is to do in the stage.
        current: Name of the file that is read.
        skipped: Names of files that could not be ingested, with reasons.
        added: Ids and names of the documents that are new or changed, or were there already.
        error: Why it failed, in one line.
    """

    id: str
    tenant: str
    state: State = "queued"
    stage: str = ""
    done: int = 0
    total: int = 0
    current: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    added: tuple[tuple[str, str], ...] = ()
    error: str | None = None

    @property
    def ended(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ("done", "failed")


class Jobs:
    """Runs ingestions: one of a tenant at a time, those of several tenants side by side.

    Args:
        library: The documents.
        config: Limits.
    """

    def __init__(self, library: Library, config: ServerConfig) -> None:
        self._library = library
        self._config = config
        self._limits = ReadLimits(file_bytes=config.file_bytes)
        self._lock = threading.Lock()
        self._stopping = False
        self._states: OrderedDict[str, JobState] = OrderedDict()
        self._waiting: dict[str, deque[tuple[str, list[Upload], Path]]] = {}  # of tenants that have running jobs
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="reader-ingest")
        with writing_errors(library.folder):
            for tenant, folder in library.interrupted().items():
                self.submit(tenant, [Upload(file, file.name) for file in sorted(folder.iterdir())], folder, ())

    def submit(self, tenant: str, uploads: Sequence[Upload], folder: Path, skipped: Sequence[tuple[str, str]]) -> str:
        """Begin an ingestion.

        Args:
            tenant: Whose documents they are.
            uploads: The files.
            folder: The folder that they are in, which goes with the job.
            skipped: Names and reasons of files that were not taken.

        Returns:
            Id of the job.

        Raises:
            BusyError: The tenant has too many jobs.
        """
        job = JobState(uuid.uuid4().hex, tenant, total=len(uploads), skipped=tuple(skipped))
        with self._lock:
            running = sum(1 for state in self._states.values() if state.tenant == tenant and not state.ended)
            if running >= self._config.jobs_per_tenant:
                raise BusyError(f"{running} uploads are being ingested already: wait until one has finished")
            self._states[job.id] = job
            self._forget()
            begin = tenant not in self._waiting
            self._waiting.setdefault(tenant, deque()).append((job.id, list(uploads), folder))
        if begin:
            self._workers.submit(self._run_all, tenant)
        return job.id

    def get(self, tenant: str, id_: str) -> JobState | None:
        """The state of a tenant's job; None if there is no such job.

        Args:
            tenant: The tenant.
            id_: Id of the job.
        """
        with self._lock:
            job = self._states.get(id_)
        return job if job is not None and job.tenant == tenant else None

    def close(self, grace_s: float) -> None:
        """Drop the ingestions that wait, and end those that run; the store then has nothing of them.

        Args:
            grace_s: Seconds that those that run have to finish.
        """
        with self._lock:
            for waiting in self._waiting.values():
                for id_, _, _ in waiting:
                    self._states[id_] = replace(self._states[id_], state="failed", error=_STOPPED)
                waiting.clear()
        end = time.monotonic() + grace_s
        while self._waiting and time.monotonic() < end:
            time.sleep(_WATCH_S)
        self._stopping = True
        self._workers.shutdown(wait=True)

    def _forget(self) -> None:
        """Drop the oldest states of jobs that have ended, where there are too many."""
        for id_ in list(self._states):
            if len(self._states) <= _KEPT_JOBS:
                return
            if self._states[id_].ended:
                del self._states[id_]

    def _run_all(self, tenant: str) -> None:
        """Run the waiting jobs of a tenant, one after the other; an error fails its job only."""
        while True:
            with self._lock:
                waiting = self._waiting[tenant]
                if not waiting:
                    del self._waiting[tenant]
                    return
                id_, uploads, folder = waiting.popleft()
            try:
                self._run(id_, tenant, uploads)
            except ReaderError as error:
                self._change(id_, state="failed", stage="", current="", error=str(error))
            except OSError as error:
                line = f"the store's folder cannot be written ({error.strerror or error})"
                self._change(id_, state="failed", stage="", current="", error=line)
            except Exception as error:
                log_bug(error)
                self._change(
                    id_, state="failed", stage="", current="", error="the ingestion failed; the log says where"
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def _run(self, id_: str, tenant: str, uploads: Sequence[Upload]) -> None:
        """Ingest the files of one job, and record what came in and what was skipped."""
        if not uploads:
            self._change(id_, state="failed", error="none of the files can be ingested")
            return
        self._change(id_, state="running")
        places = self._put_all(tenant, uploads)
        in_order = sorted(places)

        def report(stage: str, done: int, total: int) -> None:
            if self._stopping:
                raise BusyError(_STOPPED)
            current = in_order[done].name if stage == "read" and done < len(in_order) else ""
            self._change(id_, stage=stage, done=done, total=total, current=current)

        skipped: tuple[SkippedFile, ...] = tuple(SkippedFile(place, "not ingested") for place in places)
        result: IngestReport | None = None
        failure: str | None = None
        try:
            result = ingest(
                places,
                self._library.store.location,
                embed_model=self._library.embedding,
                progress=report,
                tenant=tenant,
                limits=self._limits,
            )
            skipped = result.skipped
        except IngestError as error:
            skipped = tuple(error.skipped) or skipped
            failure = "none of the files can be ingested"
        finally:
            self._settle(places, {Path(file.path) for file in skipped})
        self._library.bound_originals(tenant)
        taken = (*result.added, *result.updated, *result.unchanged) if result is not None else ()
        self._change(
            id_,
            state="done" if result is not None else "failed",
            stage="",
            current="",
            added=tuple((document_id(str(path)), Path(path).name) for path in taken),
            skipped=(*self._states[id_].skipped, *((Path(file.path).name, file.reason) for file in skipped)),
            error=failure,
        )

    def _put_all(self, tenant: str, uploads: Sequence[Upload]) -> list[Path]:
        """Put uploaded files where originals are kept, all or none."""
        places: list[Path] = []
        try:
            for upload in uploads:
                places.append(self._put(tenant, upload))
        except BaseException:
            self._settle(places, set(places))
            raise
        return places

    def _put(self, tenant: str, upload: Upload) -> Path:
        """Put an uploaded file where originals are kept; an earlier one is kept aside until it is ingested."""
        place = self._library.make_place(tenant, upload.name)
        previous = place.with_name(PREVIOUS + place.name)
        if place.exists():
            place.replace(previous)
        try:
            upload.path.replace(place)
        except BaseException:
            if previous.exists():
                previous.replace(place)
            raise
        return place

    def _settle(self, places: Sequence[Path], skipped: set[Path]) -> None:
        """Keep the new originals of ingested files, and the earlier ones of those that were not."""
        for place in places:
            previous = place.with_name(PREVIOUS + place.name)
            if place not in skipped:
                previous.unlink(missing_ok=True)
            elif previous.exists():
                previous.replace(place)
            else:
                place.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another job's file is in it
                    place.parent.rmdir()

    def _change(self, id_: str, **changes: object) -> None:
        with self._lock:
            if id_ in self._states:
                self._states[id_] = replace(self._states[id_], **changes)  # type: ignore[arg-type]
