"""Contract tests for implementations of this package's interfaces. Requires pytest."""

import pytest

pytest.register_assert_rewrite("reader_rag.testing.vector_store", "reader_rag.testing.document_store")
