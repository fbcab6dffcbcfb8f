"""Who may call: checks of Host, Origin and API key, before a request reaches any route."""

from __future__ import annotations

import ipaddress
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from reader_rag.config import ServerConfig
from reader_rag.server.errors import ApiError, client_address, log_refusal, response_of
from reader_rag.server.keys import ApiKey, KeyRing, hash_of
from reader_rag.server.service import Service

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")

CLOSED = ("/api/", "/v1/", "/metrics", "/docs", "/openapi.json")
"""Prefixes of the paths that need a key. The page, its files and the two checks of health need none."""
OPERATORS = ("/metrics",)
"""Paths that only keys of operators may read: what is there counts the requests of all tenants."""

_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_WINDOW_S = 60.0
_REMEMBERED = 4096


@dataclass(frozen=True)
class Caller:
    """Who sent a request.

    Attributes:
        tenant: The tenant whose documents, conversations and drafts it uses.
        key: Name of its key; "" where no keys are asked for.
        operator: Whether it may read `/metrics`.
    """

    tenant: str
    key: str = ""
    operator: bool = True


def get_service(request: Request) -> Service:
    """The service of the app that a request came to."""
    service: Service = request.app.state.service
    return service


def get_caller(request: Request) -> Caller:
    """Who sent a request; `AccessChecks` found out."""
    caller: Caller = request.scope["reader_rag.caller"]
    return caller


ServiceDep = Annotated[Service, Depends(get_service)]
CallerDep = Annotated[Caller, Depends(get_caller)]


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine only.

    Args:
        host: A name or an address.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class WrongKeys:
    """Counts requests with wrong keys by address, and remembers which keys were right.

    An address with too many of them gets no further keys checked for the rest of a minute. Keys that were right from
    there before go on to work, so that one client behind a proxy cannot lock out the others.

    Args:
        most: Most wrong keys a minute from one address.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def wait_s(self, address: str, key: str) -> int:
        """Seconds that the address has to wait before the key is checked; 0: it is checked.

        Args:
            address: The client's address.
            key: The key that it sent.
        """
        with self._lock:
            times = self._wrong.get(address)
            now = time.monotonic()
            while times and now - times[0] > _WINDOW_S:
                times.popleft()
            if not times or len(times) < self._most or (address, hash_of(key)) in self._right:
                return 0
            return int(_WINDOW_S - (now - times[0])) + 1

    def note(self, address: str, key: str, right: bool) -> None:
        """Note whether a key was right.

        Args:
            address: The client's address.
            key: The key that it sent.
            right: Whether there is such a key.
        """
        with self._lock:
            if right:
                _remember(self._right, (address, hash_of(key)), None)
            else:
                times = self._wrong.get(address, deque(maxlen=self._most))
                times.append(time.monotonic())
                _remember(self._wrong, address, times)


def _remember(table: OrderedDict[KeyT, ValueT], key: KeyT, value: ValueT) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > _REMEMBERED:
        table.popitem(last=False)


class AccessChecks:
    """ASGI middleware: refuses requests by Host, Origin and key, and tells routes who the caller is.

    Host: a page of another site can have its name resolve to this machine's address (DNS rebinding), and would then
    count as of the same origin; its name gives it away. Origin: browsers name the site whose page sent a request.

    Args:
        app: The app behind it.
        config: Addresses and limits.
        keys: The API keys; None: every caller is let in.
        tenant: The tenant of callers without a key.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, keys: KeyRing | None, tenant: str) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._tenant = tenant
        self._names = {config.host.lower(), *(name.lower() for name in config.allowed_hosts), *_LOOPBACK_NAMES}
        self._any_address = not is_loopback(config.host)
        self._origins = set(config.cors_origins)
        self._wrong_keys = WrongKeys(config.wrong_keys_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and pass it on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # there are no websockets here
        try:
            scope["reader_rag.caller"] = self._caller(scope)
        except ApiError as error:
            log_refusal(scope, error)
            await response_of(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _caller(self, scope: Scope) -> Caller:
        headers = Headers(scope=scope)
        self._check_host(headers.getlist("host"))
        self._check_origin(scope, headers)
        path: str = scope["path"]
        if self._keys is None or not path.startswith(CLOSED) or _is_preflight(scope, headers):
            return Caller(self._tenant if self._keys is None else "", operator=self._keys is None)
        entry = self._entry(scope, headers)
        if path.startswith(OPERATORS) and not entry.operator:
            raise ApiError(403, "this key is not an operator's: make one with `reader-rag keys add NAME --operator`")
        return Caller(entry.tenant, entry.name, entry.operator)

    def _check_host(self, hosts: list[str]) -> None:
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            raise ApiError(400, "the request needs one Host header with a name and a port")
        if name in self._names:
            return
        if self._any_address and _is_address(name):
            return  # no name was resolved, so none was rebound
        raise ApiError(
            421,
            "the Host header names another site than this one; start the service with --allowed-host NAME to add it",
        )

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        origins = headers.getlist("origin")
        if not origins:
            site = headers.get("sec-fetch-site", "none")
            if site in ("cross-site", "same-site") and scope["path"].startswith(CLOSED):
                raise ApiError(403, "a page of another site may not call this service")
            return
        own = urlsplit(origins[0]).netloc.lower() == headers["host"].lower() and origins[0].startswith("http")
        if len(origins) > 1 or not (own or origins[0] in self._origins):
            raise ApiError(
                403,
                "a page of another site may not call this service; --cors-origin ORIGIN lets the pages of one do so",
            )

    def _entry(self, scope: Scope, headers: Headers) -> ApiKey:
        assert self._keys is not None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise ApiError(
                401,
                "this service needs an API key: send the header Authorization: Bearer KEY",
                code="missing_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        address = client_address(scope)
        wait_s = self._wrong_keys.wait_s(address, key)
        if wait_s:
            raise ApiError(
                429,
                f"too many wrong API keys from this address; try again in {wait_s} s",
                code="too_many_wrong_keys",
                headers={"Retry-After": str(wait_s)},
            )
        entry = self._keys.find(key)
        self._wrong_keys.note(address, key, entry is not None)
        if entry is None:
            raise ApiError(
                401, "this API key is not known", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return entry


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _host_name(host: str) -> str | None:
    """The name or address in a Host header, in lower case; None if it is no host."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises if it is none
    except ValueError:
        return None
    if parts.hostname is None or parts.path or parts.query or parts.fragment or "@" in host:
        return None
    return parts.hostname.rstrip(".") or None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
