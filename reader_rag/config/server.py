"""Settings of the HTTP service."""

from __future__ import annotations

from dataclasses import dataclass

from reader_rag.config.setting import Settings, setting


@dataclass(frozen=True)
class ServerConfig(Settings):
    """Addresses and limits of the HTTP service."""

    host: str = setting("127.0.0.1", "Address to listen at. Other addresses than this machine's own need API keys.")
    port: int = setting(8000, "Port to listen at; 0 takes a free one.", ge=0, le=65535)
    allowed_hosts: tuple[str, ...] = setting(
        (), "Names in the Host header, besides the address itself, that requests may come by."
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Origins (such as https://example.com) whose pages may call the API; none by default."
    )
    body_bytes: int = setting(4 << 20, "Most bytes of a request's body, uploads excepted.", ge=1 << 10)
    upload_bytes: int = setting(256 << 20, "Most bytes of one upload with all its files.", ge=1 << 10)
    file_bytes: int = setting(64 << 20, "Most bytes of one uploaded file.", ge=1)
    files_per_request: int = setting(100, "Most files of one upload.", ge=1)
    body_seconds: float = setting(20.0, "Most seconds between two parts of a request's body.", gt=0.0)
    body_bytes_per_second: int = setting(
        1 << 14, "Least bytes a second of a request's body, after its first body_seconds.", ge=1
    )
    header_seconds: float = setting(20.0, "Most seconds until a request's headers are complete.", gt=0.0)
    most_connections: int = setting(1000, "Most connections at once; further ones get 503.", ge=1)
    wrong_keys_per_minute: int = setting(
        10, "Most requests a minute with a wrong API key from one address; further ones get 429.", ge=1
    )
    originals_bytes: int = setting(
        4 << 30,
        "Most bytes of uploaded files kept for a tenant; of the oldest beyond that only the text is kept.",
        ge=0,
    )
    jobs_per_tenant: int = setting(4, "Most ingestions of a tenant that run or wait.", ge=1)
    undo_seconds: float = setting(120.0, "Seconds in which a deleted document can be restored.", ge=0.0)
    conversations_per_key: int = setting(1000, "Most conversations kept for a key; the oldest go first.", ge=1)
    embedding_inputs: int = setting(512, "Most texts of one request for embeddings.", ge=1)
    markdown_footer: bool = setting(
        False, "Whether sources are also written under answers, in Markdown, for clients that drop annotations."
    )
    grace: float = setting(30.0, "Seconds that running requests have to finish after SIGTERM.", ge=0.0)
