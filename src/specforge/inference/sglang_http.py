"""Plain HTTP calls to an SGLang server, with every failure as one of two errors."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from specforge.errors import RunError


class ServerUnreachable(RunError):
    """Nothing answers at the address, or it broke off; another try or another server may help."""


class ServerRefused(RunError):
    """The server answered and said no; ``status`` is the HTTP status. Another try gives the same."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


def get_json(url: str, timeout: float, token: str | None = None) -> Any:
    """GET; the parsed answer, or ``None`` for an empty or non-JSON body."""
    return _call(urllib.request.Request(url, headers=_headers(token)), timeout)


def post_json(url: str, body: dict[str, Any], timeout: float, token: str | None = None) -> Any:
    """POST ``body`` as JSON; the parsed answer."""
    data = json.dumps(body).encode()
    return _call(urllib.request.Request(url, data=data, headers={**_headers(token), "Content-Type": "application/json"}), timeout)


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


# A server is named by its own address: a proxy of the environment must not stand between.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _call(request: urllib.request.Request, timeout: float) -> Any:
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            body = answer.read()
    except urllib.error.HTTPError as error:
        raise _refusal(request.full_url, error) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(request.full_url, error) from None
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None


def _refusal(url: str, error: urllib.error.HTTPError) -> RunError:
    text = error.read().decode(errors="replace")[:500]
    if error.code in (502, 503, 504):  # starting, or behind a proxy whose server is away
        return ServerUnreachable(f"{url}: not ready (HTTP {error.code}) {text}")
    return ServerRefused(error.code, f"{url}: HTTP {error.code}: {_reason(text)}")


def _unreachable(url: str, error: Exception) -> ServerUnreachable:
    reason = getattr(error, "reason", error) or type(error).__name__
    return ServerUnreachable(f"{url}: no answer ({reason}). Is the server running, and is this its address?")


def _reason(text: str) -> str:
    """The sentence inside SGLang's or an OpenAI-like error body."""
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def stream_json(url: str, body: dict[str, Any], timeout: float, token: str | None = None) -> Iterator[Any]:
    """POST ``body`` and yield each event of the answer's event stream as it comes; ``timeout`` is the longest silence."""
    headers = {**_headers(token), "Content-Type": "application/json"}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            for line in answer:
                text = line.decode(errors="replace").strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data:"):
                    event = json.loads(text.removeprefix("data:"))
                    if isinstance(event, dict) and "error" in event:
                        raise ServerRefused(_status(event["error"]), f"{url}: {_reason(json.dumps(event))}")
                    yield event
        raise ServerUnreachable(f"{url}: the answer broke off. Is the server still running?")
    except urllib.error.HTTPError as error:
        raise _refusal(url, error) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, error) from None


def _status(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 400
