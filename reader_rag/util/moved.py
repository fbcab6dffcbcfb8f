"""Modules that moved in 0.2: their old names import with a `DeprecationWarning` until 0.3."""

from __future__ import annotations

import warnings
from collections.abc import Container
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PACKAGE = "reader_rag."
_FOLDERS = frozenset({"decode"})
"""Old packages that had modules only; they import as empty packages."""
MOVED = {
    "decode.delivery": "engine.stream",
    "decode.engine": "engine.engine",
    "decode.observer": "engine.observer",
    "decode.types": "engine.outputs",
    "draft.builder": "draft.tree_builder",
    "draft.context": "draft.context_index",
    "draft.datastore": "datastore",
    "draft.successors": "draft.successor_table",
    "grammar": "config.grammar",
    "hooks": "llm.context_hooks",
    "instrumentation": "llm.instrumentation",
    "metrics": "engine.metrics",
    "models": "model.registry",
    "rag.beyond": "rag.surroundings",
    "rag.citations": "llm.citations",
    "rag.chat": "rag.chat_engine",
    "rag.database": "rag.stores.database",
    "rag.database_store": "rag.stores.database_store",
    "rag.document_store": "rag.stores.contract",
    "rag.passages": "rag.datastore_sync",
    "rag.places": "rag.stores.location",
    "rag.store_file": "rag.stores.sqlite_file",
    "rag.vector_store": "rag.stores.faiss_store",
}
"""Old module to new module, both below `reader_rag`."""

RENAMED = {
    "keep_in_step": "sync_passages",
    "GenerationConfig": "SamplingParams",
    "RecallConfig": "DatastoreConfig",
    "Place": "Occurrence",
    "DatastoreSettings": "CompactionConfig",
    "View": "Searcher",
}
"""Old name of a class to its new one."""


def new_name(module: str, names: Container[str], name: str) -> str:
    """The new name of a class, with a `DeprecationWarning`.

    Args:
        module: Name of the module whose attribute is read, for messages.
        names: The names that the module has.
        name: The old name.

    Raises:
        AttributeError: It is not the old name of a class of the module.
    """
    new = RENAMED.get(name)
    if new is None or new not in names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{name} is now {new}; the old name goes in reader_rag 0.3", DeprecationWarning, stacklevel=3)
    return new


def find_spec(fullname: str) -> ModuleSpec | None:
    """The spec of a module that moved; None for every other name.

    Args:
        fullname: Name that is imported.
    """
    name = fullname.removeprefix(_PACKAGE)
    if name == fullname or name not in MOVED.keys() | _FOLDERS:
        return None
    return ModuleSpec(fullname, _Forwarder(), is_package=any(old.startswith(f"{name}.") for old in MOVED))


class _Forwarder(Loader):
    """Makes modules that forward to the new ones."""

    def exec_module(self, module: ModuleType) -> None:
        """Forward every attribute to the new module."""
        name = module.__name__.removeprefix(_PACKAGE)
        if name not in MOVED:
            return
        new = _PACKAGE + MOVED[name]
        warnings.warn(
            f"{module.__name__} is now {new}; the old name goes in reader_rag 0.3", DeprecationWarning, stacklevel=2
        )
        target = import_module(new)

        def forward(attribute: str) -> Any:
            if not hasattr(target, attribute):
                attribute = new_name(new, vars(target), attribute)
            return getattr(target, attribute)

        module.__dict__["__getattr__"] = forward
