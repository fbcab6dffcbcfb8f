"""An embedding without weights."""

from __future__ import annotations

import re
import zlib

import numpy as np

from reader_rag.rag import SizedEmbedding


class WordEmbedding(SizedEmbedding):
    """Counts words into buckets: texts that share words are near. One token is a run of up to four characters."""

    buckets: int = 64
    limit: int = 48
    salt: str = ""
    embedded: list[str] = []

    @property
    def max_text_tokens(self) -> int:
        return self.limit

    def count_tokens(self, text: str) -> int:
        return len(re.findall(r"\S{1,4}", text))

    def _get_text_embedding(self, text: str) -> list[float]:
        self.embedded.append(text)
        vector = np.zeros(self.buckets)
        for word in re.findall(r"\w+", text.lower()):
            vector[zlib.crc32((self.salt + word).encode()) % self.buckets] += 1.0
        return [float(x) for x in vector]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)
