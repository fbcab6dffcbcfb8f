"""The passages of a document store in a datastore, to draft from: those that are there, and no others."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from reader_rag.datastore import Datastore
from reader_rag.engine.datastore_lookup import passages_of
from reader_rag.rag.stores.contract import DocumentStore


@dataclass(frozen=True)
class Kept:
    """What keeping in step changed.

    Attributes:
        added: Passages that are new in the datastore.
        removed: Passages that are gone from it.
        total: Passages of the store that it holds now.
    """

    added: int
    removed: int
    total: int


def keep_in_step(store: DocumentStore, datastore: Datastore, tokenizer: PreTrainedTokenizerBase) -> Kept:
    """Make a datastore hold the passages of a store, for the store's tenant; what is gone is taken off the disk.

    Call it after documents were ingested or deleted. Only the differences are tokenised, and other stores' passages
    in the same datastore stay.

    Args:
        store: The store, with its tenant.
        datastore: Opened to be written.
        tokenizer: Of the model that the datastore is for.

    Raises:
        DatastoreError: It cannot be written.
    """
    prefix = hashlib.sha256(store.location.encode()).hexdigest()[:12] + "/"
    space = passages_of(store.tenant)
    wanted = {prefix + node.node_id: node for node in store.get_nodes()}
    there = {name for name in datastore.documents(namespace=space) if name.startswith(prefix)}
    gone, new = sorted(there - wanted.keys()), [name for name in wanted if name not in there]
    for name in gone:
        datastore.remove(name, namespace=space)
    for name in new:
        tokens = tokenizer(wanted[name].get_content(), add_special_tokens=False, verbose=False)["input_ids"]
        if tokens:
            datastore.add(name, tokens, namespace=space)
    datastore.commit()
    if gone:
        datastore.compact(namespace=space, wait=True)
    return Kept(len(new), len(gone), len(wanted))
