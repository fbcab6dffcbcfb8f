"""From a question to an answer, what is known of it, and plain decoding beside it."""
