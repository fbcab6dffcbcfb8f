"""What is installed: light imports, one-way arrows, public names, metadata."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.resources
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import reader_rag
import reader_rag.config
from reader_rag.util.moved import MOVED

HEAVY = (
    "torch",
    "transformers",
    "numba",
    "faiss",
    "llama_index",
    "sentence_transformers",
    "gguf",
    "typer",
    "llguidance",
    "opentelemetry",
    "prometheus_client",
)


def _run(code: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _loaded_by(statement: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after `statement`."""
    return set(_run(f"{statement}\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))").split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    light = "reader_rag.config, reader_rag.config.grammar, reader_rag.errors, reader_rag.model.registry"
    assert _loaded_by(f"import reader_rag, {light}") == set()
    assert _loaded_by("import reader_rag; dir(reader_rag); reader_rag.SamplingParams()") == set()


def test_drafting_and_the_datastore_load_only_the_compiler() -> None:
    code = """
import sys, reader_rag.draft, reader_rag.datastore
print(*({*HEAVY, 'pydivsufsort', 'filelock'} & set(sys.modules)))
"""
    assert set(_run(code.replace("HEAVY", repr(HEAVY))).split()) <= {"numba"}  # the other two are for writing only


ABSENT = ("llama_index", "faiss", "sentence_transformers", "gguf")


def test_lower_floors_work_where_the_upper_ones_are_not_installed() -> None:
    modules = "reader_rag.engine.engine, reader_rag.sampling.constrained, reader_rag.bench"
    absent = f"import sys\nfor name in {ABSENT!r}: sys.modules[name] = None\nimport {modules}\n"
    loaded = f"print(*(name for name in {HEAVY!r} if sys.modules.get(name)))"
    assert set(_run(absent + loaded).split()) <= {"numba", "torch", "transformers"}


def test_the_command_line_answers_help_without_loading_models() -> None:
    assert not _loaded_by("import reader_rag.cli.main") & {"torch", "transformers", "faiss", "llama_index", "numba"}


@pytest.mark.parametrize("name", reader_rag.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(reader_rag, name)
    if name != "__version__":
        assert callable(value)
        assert inspect.getdoc(value)
    assert name in dir(reader_rag)


def test_ingest_is_the_function_also_after_its_module_was_imported() -> None:
    import reader_rag.rag.ingest

    assert inspect.isfunction(reader_rag.ingest)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'reader_rag' has no attribute 'Raeder'"):
        reader_rag.Raeder  # noqa: B018


def test_the_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("reader-rag") == reader_rag.__version__


def test_the_connectors_are_part_of_the_installed_package() -> None:
    import reader_rag.connectors

    assert reader_rag.connectors.__name__ == "reader_rag.connectors"


def test_type_checkers_are_told_that_the_package_is_typed() -> None:
    files = importlib.resources.files("reader_rag")
    assert files.joinpath("py.typed").is_file()


def test_every_folder_of_modules_is_in_the_list_of_packages() -> None:
    root = Path(__file__).resolve().parents[1]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(root) for path in (root / "reader_rag").rglob("*.py")}
    assert sorted(listed) == sorted([".".join(folder.parts) for folder in folders] + ["reader_rag.connectors"])


def test_every_third_party_import_is_declared() -> None:
    root = Path(__file__).resolve().parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.match(r"[\w.-]+", requirement)[0] for listed in lists for requirement in listed}  # type: ignore[index]
    undeclared = {
        (str(path.relative_to(root)), distribution)
        for folder in ("reader_rag", "connectors")
        for path in (root / folder).rglob("*.py")
        for distribution in map(_distribution, _imported(path))
        if distribution not in declared
    }
    assert undeclared == set()


def _imported(path: Path) -> set[str]:
    """The modules outside of Python and this package that a file imports, at any place."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names | {"reader_rag"}}


def _distribution(module: str) -> str:
    """The name on PyPI of the package that a module is imported from."""
    first, *rest = module.split(".")
    if first == "llama_index":  # a namespace that many packages share
        return "llama-index-core" if rest[0] == "core" else "-".join(["llama-index", *rest[:2]]).replace("_", "-")
    other_names = {
        "docx": "python-docx",
        "faiss": "faiss-cpu",
        "grpc": "grpcio",
        "markdown_it": "markdown-it-py",
        "oxmsg": "python-oxmsg",
        "pptx": "python-pptx",
    }
    return other_names.get(first, first.replace("_", "-"))


def test_modules_that_moved_are_found_by_their_old_names_with_a_warning() -> None:
    code = f"""
import warnings
from importlib import import_module
for old, new in {MOVED!r}.items():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        before = import_module(f"reader_rag.{{old}}")
    now = import_module(f"reader_rag.{{new}}")
    assert f"reader_rag.{{old}} is now reader_rag.{{new}};" in str([w.message for w in seen]), (old, seen)
    public = [name for name in vars(now) if not name.startswith("_")]
    assert public and all(getattr(before, name) is getattr(now, name) for name in public), old
print("ok")
"""
    assert _run(code) == "ok\n"


@pytest.mark.parametrize("module", [reader_rag, reader_rag.config])
def test_a_class_that_was_renamed_is_found_by_its_old_name_with_a_warning(module: ModuleType) -> None:
    for old, new in (("GenerationConfig", "SamplingParams"), ("RecallConfig", "DatastoreConfig")):
        with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
            assert getattr(module, old) is getattr(module, new)


def test_the_version_is_that_of_the_citation_and_of_the_latest_dated_changes() -> None:
    root = Path(__file__).parents[1]
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    changes = re.findall(
        r"^## \[(\d[^\]]*)\] - (\d{4}-\d\d-\d\d)$", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert changes[0][0] == reader_rag.__version__
    assert f"\nversion: {reader_rag.__version__}\ndate-released: {changes[0][1]}\n" in citation
