"""One SGLang that answers ``/generate`` requests: over HTTP, or over whatever else a subclass speaks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from specforge.errors import RunError
from specforge.inference.sglang_http import ServerUnreachable, get_json, post_json
from specforge.inference.sglang_process import SGLangProcess

_ANSWER_SECONDS = 10.0


class Endpoint(ABC):
    """``name`` is what messages call it. Methods may be called from several threads at once."""

    name: str

    @abstractmethod
    def generate(self, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """SGLang's answer (``output_ids``, ``meta_info`` ...) to one request.

        Raises :class:`ServerUnreachable` when another try or another server may help, :class:`ServerRefused` when SGLang says no.
        """

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether it would answer now."""

    def information(self, path: str) -> Any:
        """The JSON of one of SGLang's own information routes (``model_info``, ``server_info``); None where there is no HTTP."""
        return None

    def last_words(self) -> str:
        """What is known about its end, for a message; empty if nothing is."""
        return ""

    def close(self) -> None:  # noqa: B027 - an external server is left as it is
        """Stop what we started."""


class HttpEndpoint(Endpoint):
    """A server at ``url``. With ``process`` it is ours, and is stopped by :meth:`close`."""

    def __init__(self, url: str, *, token: str | None, process: SGLangProcess | None = None) -> None:
        self.name = url.rstrip("/")
        self.token = token
        self.process = process

    def generate(self, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        answer = post_json(f"{self.name}/generate", body, timeout, self.token)
        if not isinstance(answer, dict):
            raise ServerUnreachable(f"{self.name}/generate: the answer is no JSON object; is this an SGLang server?")
        return answer

    def is_alive(self) -> bool:
        try:
            if self.process is not None:
                self.process.check_alive()
            # Not /health: that runs a forward and waits behind all requests.
            get_json(f"{self.name}/model_info", _ANSWER_SECONDS, self.token)
        except RunError:
            return False
        return True

    def information(self, path: str) -> Any:
        return get_json(f"{self.name}/{path}", _ANSWER_SECONDS, self.token)

    def last_words(self) -> str:
        try:
            if self.process is not None:
                self.process.check_alive()
        except RunError as error:
            return str(error)
        return ""

    def close(self) -> None:
        if self.process is not None:
            self.process.stop()
