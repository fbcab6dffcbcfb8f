"""The HTTP service of `reader-rag serve`: an OpenAI-compatible API, a documents API and a web page (extra `serve`)."""
