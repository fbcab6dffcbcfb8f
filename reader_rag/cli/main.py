"""`reader-rag`: documents in, answers with their sources out.

Everything heavy is imported inside the commands: help comes at once, and `reader-rag bench` runs where LlamaIndex and
FAISS are not installed.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from reader_rag import __version__
from reader_rag.bench.commands import app as bench_app
from reader_rag.cli.datastore import app as datastore_app
from reader_rag.cli.display.errors import OneLineErrors
from reader_rag.cli.display.terminal import ingest_progress, output, quiet_libraries, status
from reader_rag.cli.verify import verify
from reader_rag.config import checked_tenant
from reader_rag.connectors.vllm_args import DRAFTED
from reader_rag.errors import ConfigError
from reader_rag.model.registry import DEFAULT_EMBED_MODEL, DEFAULT_MODEL

_CONTEXT = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    cls=OneLineErrors,
    help="Answers from your documents, by a local model that copies what it quotes.",
    epilog="Example: reader-rag demo",
    context_settings=_CONTEXT,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(
    help="The models that are known by a short name.", epilog="Example: reader-rag models list", no_args_is_help=True
)
app.add_typer(models_app, name="models")
app.add_typer(datastore_app, name="datastore")
app.add_typer(bench_app, name="bench")
app.command(epilog="Example: reader-rag verify --dtype bfloat16 --exactness strict")(verify)


def _tenant(name: str) -> str:
    try:
        return checked_tenant(name)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


Store = Annotated[Path | None, typer.Option("--store", help="Folder of the document store.", show_default=False)]
VectorStore = Annotated[
    str | None,
    typer.Option(
        "--vector-store",
        help="Instead of --store: qdrant://HOST:PORT/COLLECTION or milvus://..., or on this machine "
        "qdrant:///FOLDER/COLLECTION or milvus:///FILE.db/COLLECTION.",
        show_default=False,
    ),
]


def _place(store: Path | None, vector_store: str | None) -> Path | str:
    """Where the store is: exactly one of the two."""
    if (store is None) == (vector_store is None):
        raise typer.BadParameter("name one store: --store FOLDER or --vector-store URL")
    return store or vector_store or ""


Tenant = Annotated[
    str,
    typer.Option(
        "--tenant",
        callback=_tenant,
        help="Whose documents: only what was ingested under this name is found.",
        show_default="those without a name",
    ),
]
Model = Annotated[str, typer.Option("--model", help="LLM: alias, local folder or hub id.")]
AnsweringModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="LLM: alias, local folder or hub id; with --engine, the server's name of it.",
        show_default=f"{DEFAULT_MODEL}, or the server's only one",
    ),
]
EngineUrl = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="Have an OpenAI-compatible server answer, e.g. http://localhost:8000/v1; its API key, if it wants one, in "
        "READER_RAG_ENGINE_KEY.",
        show_default="none",
    ),
]
EngineTimeout = Annotated[
    float,
    typer.Option("--engine-timeout", min=0.1, help="Seconds without a word from --engine after which it is given up."),
]
EmbedModel = Annotated[str, typer.Option("--embed-model", help="Embedding model: alias, local folder or hub id.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="auto, float32, bfloat16 or float16, for the LLM. auto: 16 bits on a GPU, else float32."
    ),
]
Exact = Annotated[
    str, typer.Option("--exactness", help="fast, or strict: the same tokens as plain decoding in 16 bits too.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with a model. Only for sources you trust.")
]
TopK = Annotated[int, typer.Option("--top-k", min=1, help="Most passages to retrieve.")]
Cutoff = Annotated[
    float | None, typer.Option("--cutoff", help="Least similarity of a passage, -1 to 1.", show_default="any")
]
DatastoreFolder = Annotated[
    Path | None,
    typer.Option("--datastore", help="Folder of texts and earlier answers to draft from.", show_default="none"),
]
KeepAnswers = Annotated[
    bool, typer.Option("--keep-answers", help="Keep the answers in --datastore, to draft later ones from.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"reader-rag {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and the libraries' warnings; may stand anywhere.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Answers from your documents, by a local model that copies what it quotes."""
    if debug:
        logging.getLogger("reader_rag").setLevel(logging.DEBUG)  # which lets the libraries print while they load
    else:
        quiet_libraries()


@app.command(epilog="Example: reader-rag ingest ~/papers notes.md --store ~/papers-store")
def ingest(
    paths: Annotated[
        list[Path], typer.Argument(help="Folders and files; PDF and office files need the extra 'files'.")
    ],
    store: Store = None,
    vector_store: VectorStore = None,
    chunk_tokens: Annotated[
        int | None,
        typer.Option("--chunk-tokens", help="Longest passage, in the embedding's tokens.", show_default="256 or less"),
    ] = None,
    chunk_overlap: Annotated[int, typer.Option("--chunk-overlap", help="Tokens that neighbours share.")] = 32,
    tenant: Tenant = "",
    embed_model: EmbedModel = DEFAULT_EMBED_MODEL,
    device: Device = "auto",
    datastore: Annotated[
        Path | None,
        typer.Option("--datastore", help="Keep the passages to draft from there too.", show_default="none"),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="LLM that the datastore is for.")] = DEFAULT_MODEL,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Bring a store up to date with files on disk.

    New and changed files go in, files that are gone from a named folder go out, the rest stays, and so does what other
    tenants have. Exit status: 0 if every file could be used, 2 if some were skipped (they are listed with reasons), 1
    if nothing was done.
    """
    place = _place(store, vector_store)
    from reader_rag.cli.display.show import show_ingest
    from reader_rag.cli.loading import ModelOptions
    from reader_rag.rag.ingest import ingest as ingest_files

    models = ModelOptions(embed_model=embed_model, device=device, trust_remote_code=trust_remote_code)
    embedding = models.load_embedding()
    with ingest_progress() as progress:
        report = ingest_files(
            paths,
            place,
            embed_model=embedding,
            chunk_tokens=chunk_tokens,
            chunk_overlap=chunk_overlap,
            progress=progress,
            tenant=tenant,
        )
    show_ingest(output(), report, place)
    if datastore is not None:
        from reader_rag.cli.datastore import keep_passages

        keep_passages(place, datastore, model, embedding, tenant, trust_remote_code)
    if not report.ok:
        raise typer.Exit(2)


@app.command(epilog='Example: reader-rag ask "Who wrote the report?" --store ~/papers-store --compare')
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    store: Store = None,
    vector_store: VectorStore = None,
    top_k: TopK = 4,
    cutoff: Cutoff = None,
    max_tokens: MaxTokens = 256,
    tenant: Tenant = "",
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="Decode the same prompt plainly too, and compare. In float32 unless --dtype is given."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")] = False,
    model: AnsweringModel = None,
    embed_model: EmbedModel = DEFAULT_EMBED_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    exactness: Exact = "fast",
    datastore: DatastoreFolder = None,
    keep_answers: KeepAnswers = False,
    engine: EngineUrl = None,
    engine_timeout: EngineTimeout = 120.0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer a question from a store: the answer, the passages behind it, what was copied from where, and counts."""
    place = _place(store, vector_store)
    from reader_rag.cli.ask import ask as ask_store
    from reader_rag.cli.loading import ModelOptions

    models = ModelOptions(
        model, embed_model, device, dtype, exactness, trust_remote_code, datastore, keep_answers, engine, engine_timeout
    )
    asked = ask_store(
        question,
        place,
        models,
        top_k=top_k,
        cutoff=cutoff,
        max_tokens=max_tokens,
        compare=compare,
        tenant=tenant,
        console=None if as_json else output(),
    )
    if as_json:
        typer.echo(json.dumps(asked.to_dict()))


@app.command(epilog="Example: reader-rag chat --store ~/papers-store")
def chat(
    store: Store = None,
    vector_store: VectorStore = None,
    top_k: TopK = 4,
    cutoff: Cutoff = None,
    max_tokens: MaxTokens = 256,
    tenant: Tenant = "",
    model: AnsweringModel = None,
    embed_model: EmbedModel = DEFAULT_EMBED_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    exactness: Exact = "fast",
    datastore: DatastoreFolder = None,
    keep_answers: KeepAnswers = False,
    engine: EngineUrl = None,
    engine_timeout: EngineTimeout = 120.0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Talk about the documents of a store. Ctrl-C stops an answer; /sources, /stats, /reset, /help, /quit."""
    place = _place(store, vector_store)
    from reader_rag.cli.answers import recorded
    from reader_rag.cli.chat import ChatSession
    from reader_rag.cli.loading import ModelOptions
    from reader_rag.rag.engines import make_chat_engine, open_store

    models = ModelOptions(
        model, embed_model, device, dtype, exactness, trust_remote_code, datastore, keep_answers, engine, engine_timeout
    )
    embedding = models.load_embedding()
    with open_store(place, embedding, tenant) as documents:
        llm, recorder = recorded(models.load_llm(max_tokens))
        talk = make_chat_engine(documents, llm, embedding, top_k=top_k, cutoff=cutoff)
        ChatSession(talk, recorder, output(), remote=engine is not None).run()


@app.command(epilog="Example: reader-rag demo --max-tokens 64")
def demo(
    question: Annotated[
        str | None, typer.Option("--question", help="Ask this instead.", show_default="a prepared one")
    ] = None,
    max_tokens: MaxTokens = 256,
    workdir: Annotated[
        Path | None,
        typer.Option(
            "--workdir", help="Folder for documents and store.", show_default="a folder in the platform's cache"
        ),
    ] = None,
    store: Annotated[
        Path | None, typer.Option("--store", help="Folder of the store.", show_default="in --workdir")
    ] = None,
    tenant: Tenant = "",
    model: Model = DEFAULT_MODEL,
    embed_model: EmbedModel = DEFAULT_EMBED_MODEL,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16, for the LLM.")] = "float32",
    exactness: Exact = "fast",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answer a question about Python's own documentation, and compare with plain decoding.

    Gets the models that are missing. Exit status: 1 if the tokens of the two ways differ where they must not (float32,
    or --exactness strict).
    """
    from reader_rag.cli.demo import QUESTION, run_demo
    from reader_rag.cli.loading import ModelOptions

    passed = run_demo(
        output(),
        ModelOptions(model, embed_model, device, dtype, exactness, trust_remote_code),
        workdir=workdir,
        store_dir=store,
        question=QUESTION if question is None else question,
        max_tokens=max_tokens,
        tenant=tenant,
    )
    if not passed:
        raise typer.Exit(1)


@models_app.command("list", epilog="Example: reader-rag models list")
def list_models() -> None:
    """The models that are known by a short name, and which of them are on this machine."""
    from reader_rag.cli.display.show import show_models
    from reader_rag.model.registry import list_models as statuses

    show_models(output(), statuses())


@models_app.command("get", epilog="Example: reader-rag models get smollm2-135m")
def get_model(name: Annotated[str, typer.Argument(help="Alias or hub id.")]) -> None:
    """Bring a model to this machine and print its folder, so that it can be used without a network."""
    from reader_rag.model.registry import get_model as get

    with status(f"looking for {name}") as say:
        folder = get(name, say)
    typer.echo(folder)


@models_app.command("profile", epilog="Example: reader-rag models profile Qwen/Qwen3-0.6B --dtype bfloat16")
def profile_model(
    name: Annotated[str, typer.Argument(help="Alias, folder or hub id.")],
    out: Annotated[Path | None, typer.Option(help="File to write; none: where every later process finds it.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
) -> None:
    """Ask a model once what follows each token of its vocabulary, so that drafts are good from the first word on.

    The default model's answers come with the package. Takes minutes for a small model on a CPU.
    """
    from reader_rag.engine.engine import Engine
    from reader_rag.engine.profiling import make_profile
    from reader_rag.model.weights_cache import cache_folder

    with status(f"loading {name}"):
        engine = Engine.load(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    with status("asking") as say:
        profile = make_profile(engine, lambda done, of: say(f"asked about {done} of {of} tokens"))
    path = out or cache_folder() / "profiles" / f"{profile.vocabulary[:16]}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    typer.echo(path)


@app.command("vllm-args", epilog='Example: eval "$(reader-rag vllm-args --model Qwen/Qwen3-8B) --port 8000"')
def vllm_args(
    model: Model = DEFAULT_MODEL,
    drafted: Annotated[
        int, typer.Option("-k", "--drafted", min=1, help="Most tokens drafted for one request in a step.")
    ] = DRAFTED,
    datastore: Annotated[
        Path | None,
        typer.Option("--datastore", help="Folder of texts to draft from too.", show_default="none"),
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option("--costs", help="Cost table, from bench vllm-costs.", show_default="assumed costs"),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", help="Searched in it besides what is shared; may be repeated.", show_default=False),
    ] = None,
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="Draft from answers to earlier requests, whosever they were.")
    ] = False,
) -> None:
    """Print the command that starts a vLLM server with these drafts. vLLM itself need not be here."""
    from reader_rag.connectors.vllm_args import serve_line

    typer.echo(serve_line(model, drafted, datastore, costs, namespace or (), keep_answers))


def main() -> None:
    """Entry point of `reader-rag`."""
    app(prog_name="reader-rag")


if __name__ == "__main__":
    main()
