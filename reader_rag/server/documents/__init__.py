"""Documents over HTTP: uploads, ingestion in the background, texts, deletion with undo."""
