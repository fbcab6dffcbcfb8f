"""Tests for what others write against this package's interfaces. Needs pytest."""

import pytest

pytest.register_assert_rewrite("reader_rag.testing.vector_store", "reader_rag.testing.document_store")
