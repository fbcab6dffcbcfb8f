"""`reader-rag datastore`: texts on the disk to draft from."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reader_rag.bench.options import Json, TrustRemoteCode
from reader_rag.bench.output import json_bytes, print_table
from reader_rag.cli.display.terminal import bytes_progress, output, print_warning, status
from reader_rag.cli.options import Tenant
from reader_rag.errors import ConfigError, IngestError
from reader_rag.model.registry import DEFAULT_MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reader_rag.datastore import Datastore
    from reader_rag.rag.embedding import LocalEmbedding

_SHARED = "shared"
"""The namespace of `--shared`: the requests of all tenants search it."""

app = typer.Typer(
    help="Manage texts to draft from.",
    epilog="Example: reader-rag datastore build ~/manuals --datastore ~/drafts",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Option("--datastore", help="Folder of the datastore.", show_default=False)]
Model = Annotated[str, typer.Option("--model", help="LLM that uses the datastore; texts are stored as its tokens.")]
Shared = Annotated[bool, typer.Option("--shared", help="Texts that are visible to all tenants.")]


@app.command(epilog="Example: reader-rag datastore build ~/manuals notes.md --datastore ~/drafts")
def build(
    paths: Annotated[list[Path], typer.Argument(help="Folders and files; hidden ones inside are left out.")],
    datastore: Folder,
    model: Model = DEFAULT_MODEL,
    tenant: Tenant = "",
    shared: Shared = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Add the texts of files to a datastore.

    Unchanged files are left as they are, changed ones are replaced; an interrupted build continues when it is run
    again. Exit status: 0 if every file was readable, 2 if some were skipped, 1 if nothing was changed.
    """
    from reader_rag.rag.files import find_files

    namespace = _namespace(tenant, shared)
    tokenizer, vocabulary = _tokenizer(model, trust_remote_code)
    found = [find_files(path, datastore) for path in paths]
    files = sorted({file for root in found for file in root.files})
    skipped = [(str(folder), reason) for root in found for folder, reason in root.unlisted]
    if not files:
        raise IngestError(f"there is no file in {', '.join(map(str, paths))}; nothing was changed")
    with _open(datastore, tokenizer, vocabulary) as store:
        with bytes_progress("building", sum(_size(file) for file in files)) as advance:
            documents = _documents(files, tokenizer, skipped, advance)
            changed = store.add_many(documents, namespace=namespace)
        if shared:
            store.share(namespace)
        report = _report(store, namespace, changed=changed, skipped=[list(one) for one in skipped])
    _print(report, as_json, f"{changed} of {len(files)} files were new or changed")
    for path, reason in skipped:
        print_warning(f"skipped {path}: {reason}")
    if skipped:
        raise typer.Exit(2)


@app.command(epilog="Example: reader-rag datastore add report.txt --datastore ~/drafts")
def add(
    files: Annotated[list[Path], typer.Argument(help="Files; - is standard input.")],
    datastore: Folder,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the document, if it is one file.", show_default="its path")
    ] = None,
    model: Model = DEFAULT_MODEL,
    tenant: Tenant = "",
    shared: Shared = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Add single texts, searchable at once.

    A text replaces the one that has its name.
    """
    namespace = _namespace(tenant, shared)
    if name is not None and len(files) > 1:
        raise ConfigError(f"--name names one document, and there are {len(files)} files; leave it out")
    tokenizer, vocabulary = _tokenizer(model, trust_remote_code)
    texts = [(name or str(file if str(file) == "-" else file.resolve()), _text(file)) for file in files]
    with _open(datastore, tokenizer, vocabulary) as store:
        changed = sum(store.add(called, _tokens(tokenizer, text), namespace=namespace) for called, text in texts)
        if shared:
            store.share(namespace)
        report = _report(store, namespace, changed=changed)
    _print(report, as_json, f"{changed} of {len(files)} texts were new or changed")


@app.command(epilog="Example: reader-rag datastore stats --datastore ~/drafts")
def stats(datastore: Folder, as_json: Json = False) -> None:
    """Show what a datastore contains.

    Namespaces are answers/TENANT, passages/TENANT, texts/TENANT and shared.
    """
    from reader_rag.datastore import Datastore

    with Datastore.inspect(datastore) as store:
        namespaces = _statistics(store)
    if as_json:
        typer.echo(json_bytes({"namespaces": namespaces}))
        return
    counts = ("documents", "tokens", "segments", "removed_tokens")
    rows = (
        (
            name,
            *(row[count] for count in counts),
            f"{row['bytes'] / 1e6:.1f}",
            ", ".join([*(["shared"] if row["shared"] else []), *row["damaged"]]),
        )
        for name, row in namespaces.items()
    )
    print_table(None, ("namespace", "documents", "tokens", "files", "removed", "MB", ""), rows)


@app.command(epilog="Example: reader-rag datastore verify --datastore ~/drafts")
def verify(datastore: Folder, as_json: Json = False) -> None:
    """Check a datastore for damage.

    Reads everything and compares checksums. Exit status: 1 if something is damaged.
    """
    from reader_rag.datastore import Datastore

    with Datastore.inspect(datastore) as store, status("reading"):
        damage = [asdict(one) for one in store.verify()]
    if as_json:
        typer.echo(json_bytes({"damaged": damage}))
    else:
        for one in damage:
            concerned = f" (documents: {', '.join(one['documents'])})" if one["documents"] else ""
            output().print(f"{one['namespace']} {one['file']}: {one['what']}{concerned}", markup=False)
        output().print("nothing is damaged" if not damage else f"{len(damage)} damaged: build those documents again")
    if damage:
        raise typer.Exit(1)


@app.command(epilog="Example: reader-rag datastore compact --datastore ~/drafts --full")
def compact(
    datastore: Folder,
    full: Annotated[bool, typer.Option("--full", help="Merge into as few files as possible.")] = False,
    as_json: Json = False,
) -> None:
    """Free disk space and merge files.

    Removes deleted texts from the disk, and merges files that are due.
    """
    from reader_rag.datastore import Datastore

    with Datastore.inspect(datastore, read_only=False) as store, status("compacting"):
        store.compact(full=full)
        report = {"namespaces": _statistics(store)}
    _print(report, as_json, "compacted")


@app.command(epilog="Example: reader-rag datastore remove ~/manuals/old.md --datastore ~/drafts")
def remove(
    datastore: Folder,
    documents: Annotated[
        list[str] | None, typer.Argument(help="Names or paths of documents.", show_default=False)
    ] = None,
    tenant: Tenant = "",
    shared: Shared = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all of the tenant's texts, passages and answers; or all shared texts.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove texts, from the disk too.

    Exit status: 1 if there were none.
    """
    from reader_rag.datastore import Datastore
    from reader_rag.engine.datastore_lookup import answers_of, passages_of

    if bool(documents) == everything:
        raise ConfigError("name documents to remove, or --all")
    namespace = _namespace(tenant, shared)
    with Datastore.inspect(datastore, read_only=False) as store:
        if everything:
            spaces = [namespace] if shared else [namespace, passages_of(tenant), answers_of(tenant)]
            removed = sum(store.remove_namespace(space) for space in spaces)
        else:
            removed = 0
            for name in documents or []:
                called = name if store.has(name, namespace=namespace) else str(Path(name).resolve())
                removed += store.remove(called, namespace=namespace)
            store.compact(namespace=namespace)
        report = {"removed": removed, "namespaces": _statistics(store)}
    _print(report, as_json, f"{removed} {'namespaces' if everything else 'documents'} removed")
    if not removed:
        raise typer.Exit(1)


def sync_passages(
    store: str | Path,
    datastore: Path,
    model: str,
    embed_model: LocalEmbedding,
    tenant: str,
    trust_remote_code: bool,
) -> None:
    """Make a tenant's passages in a datastore those of its document store, and print their number.

    Args:
        store: Folder or URL of the document store.
        datastore: Folder of the datastore.
        model: The LLM that uses the datastore.
        embed_model: The document store's embedding model.
        tenant: The tenant.
        trust_remote_code: Whether code that comes with the model may run.
    """
    from reader_rag.rag.datastore_sync import sync_passages
    from reader_rag.rag.engines import open_store

    tokenizer, vocabulary = _tokenizer(model, trust_remote_code)
    with (
        open_store(store, embed_model, tenant) as passages,
        _open(datastore, tokenizer, vocabulary) as drafts,
        status("copying passages to the datastore"),
    ):
        kept = sync_passages(passages, drafts, tokenizer)
    output().print(f"{datastore}: {kept.total} passages to draft from ({kept.added} new, {kept.removed} removed)")


def _namespace(tenant: str, shared: bool) -> str:
    from reader_rag.engine.datastore_lookup import texts_of

    if shared and tenant:
        raise ConfigError("--shared texts belong to no tenant: leave out --tenant")
    return _SHARED if shared else texts_of(tenant)


def _tokenizer(model: str, trust_remote_code: bool) -> tuple[PreTrainedTokenizerBase, int]:
    from reader_rag.model.loading import load_tokenizer

    with status(f"loading the tokenizer of {model}") as say:
        return load_tokenizer(model, trust_remote_code=trust_remote_code, progress=say)


def _open(folder: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Datastore:
    from reader_rag.engine.datastore_lookup import open_datastore

    return open_datastore(folder, tokenizer, vocabulary, read_only=False)


def _documents(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, skipped: list[tuple[str, str]], advance: Any
) -> Iterator[tuple[str, list[int]]]:
    from reader_rag.rag.files import UnusableFileError

    for file in files:
        size = _size(file)
        try:
            text = _read(file)
        except UnusableFileError as error:
            skipped.append((str(file), str(error)))
        else:
            yield str(file), _tokens(tokenizer, text)
        advance(size)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    encoded: Any = tokenizer(text, add_special_tokens=False, verbose=False, truncation=False)
    return list(encoded["input_ids"])


def _text(file: Path) -> str:
    from reader_rag.rag.files import UnusableFileError

    if str(file) == "-":
        return sys.stdin.read()
    try:
        return _read(file)
    except UnusableFileError as error:
        raise IngestError(f"{file}: {error}") from error


def _read(file: Path) -> str:
    """The text of a file of any known kind.

    Raises:
        UnusableFileError: It has none that can be read.
    """
    from reader_rag.rag.files import parse, read_bytes, whole_text

    return whole_text(parse(file, read_bytes(file)))


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _statistics(store: Datastore) -> dict[str, dict[str, Any]]:
    """The statistics of each namespace, JSON-ready."""
    return {name: asdict(row) for name, row in store.stats().items()}


def _report(store: Datastore, namespace: str, **more: Any) -> dict[str, Any]:
    return {"namespace": namespace, **more, **_statistics(store).get(namespace, {})}


def _print(report: dict[str, Any], as_json: bool, summary: str) -> None:
    if as_json:
        typer.echo(json_bytes(report))
        return
    contents = f"; {report['documents']} documents of {report['tokens']} tokens" if "documents" in report else ""
    output().print(summary + contents, markup=False)
