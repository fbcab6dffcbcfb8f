"""Synchronises a datastore for drafts with the passages of a document store."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from reader_rag.datastore import Datastore
from reader_rag.engine.datastore_lookup import passages_of
from reader_rag.rag.stores.contract import DocumentStore


@dataclass(frozen=True)
class SyncReport:
    """Result of `sync_passages`.

    Attributes:
        added: Number of passages added to the datastore.
        removed: Number of passages removed from it.
        total: Number of the store's passages in the datastore now.
    """

    added: int
    removed: int
    total: int


def sync_passages(store: DocumentStore, datastore: Datastore, tokenizer: PreTrainedTokenizerBase) -> SyncReport:
    """Make a datastore hold exactly the passages of a store, for the store's tenant.

    Call it after documents were ingested or deleted. Only the differences are tokenised. Removed passages are deleted
    from the disk; passages of other stores in the same datastore stay.

    Args:
        store: The store; its tenant's passages are read.
        datastore: A datastore that is open for writing.
        tokenizer: Tokenizer of the model that the datastore is for.

    Raises:
        DatastoreError: The datastore cannot be written.
    """
    prefix = hashlib.sha256(store.location.encode()).hexdigest()[:12] + "/"
    namespace = passages_of(store.tenant)
    wanted = {prefix + node.node_id: node for node in store.get_nodes()}
    present = {name for name in datastore.documents(namespace=namespace) if name.startswith(prefix)}
    removed, added = sorted(present - wanted.keys()), [name for name in wanted if name not in present]
    for name in removed:
        datastore.remove(name, namespace=namespace)
    for name in added:
        tokens = tokenizer(wanted[name].get_content(), add_special_tokens=False, verbose=False)["input_ids"]
        if tokens:
            datastore.add(name, tokens, namespace=namespace)
    datastore.commit()
    if removed:
        datastore.compact(namespace=namespace, wait=True)
    return SyncReport(len(added), len(removed), len(wanted))
