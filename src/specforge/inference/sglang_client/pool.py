"""Many requests over several servers: a bound a server, a limit of tries a request, and the work of a dead server to the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from specforge.errors import RunError
from specforge.inference.sglang_client.endpoint import Endpoint
from specforge.inference.sglang_http import ServerUnreachable

Item = TypeVar("Item")
Result = TypeVar("Result")

_LOOK_SECONDS = 0.5  # how often a waiting caller looks for an interrupt
_BUSY_FIRST_SECONDS, _BUSY_MOST_SECONDS = 0.05, 2.0


class ServerBusy(Exception):
    """The server has no room for this request at the moment; it is neither a failed try nor a dead server."""


class ServerPool:
    """``endpoints`` with at most ``in_flight`` requests each. A request that finds no answer is tried ``retries`` times more.

    ``admit`` is called for a server that is new or was dead; it raises :class:`ServerUnreachable` when the server cannot be used now,
    and another error when it must not be used at all.
    """

    def __init__(self, endpoints: Sequence[Endpoint], *, admit: Callable[[Endpoint], None], in_flight: int, retries: int,
                 busy_seconds: float) -> None:
        self.endpoints = list(endpoints)
        self.admit = admit
        self.in_flight = in_flight
        self.retries = retries
        self.busy_seconds = busy_seconds
        self.slots = {id(endpoint): threading.Semaphore(in_flight) for endpoint in self.endpoints}
        self.admitted: set[int] = set()
        self._admitting = threading.Lock()

    def run(self, work: Callable[[Endpoint, Item, int], Result], items: Sequence[Item], what: Callable[[Item], str]) -> list[Result]:
        """``work(endpoint, item, attempt)`` for every item; results in their order.

        ``work`` raises :class:`ServerUnreachable` for a failed try and :class:`ServerBusy` for one that comes too early; anything else
        ends the whole run, and nothing is returned of it. Raises :class:`RunError` when a request's tries are used up or no server is left.
        """
        if not items:
            return []
        return _Run(self, work, items, what, self.usable()).results()

    def usable(self) -> list[Endpoint]:
        """The servers that are there, new ones admitted. Raises :class:`RunError` when there is none."""
        last = ""
        with self._admitting:
            for endpoint in self.endpoints:
                if id(endpoint) not in self.admitted:
                    try:
                        self.admit(endpoint)
                        self.admitted.add(id(endpoint))
                    except ServerUnreachable as error:
                        last = str(error)
        found = [endpoint for endpoint in self.endpoints if id(endpoint) in self.admitted]
        if not found:
            raise RunError(self.all_gone(last))
        return found

    def all_gone(self, last: str) -> str:
        """The message when no server is left."""
        names = ", ".join(endpoint.name for endpoint in self.endpoints)
        words = next((w for endpoint in self.endpoints if (w := endpoint.last_words())), "")
        return f"no SGLang server is left (target_backend: {names}). The last: {last} {words}".rstrip()

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


class _Run(Generic[Item, Result]):
    """One call of :meth:`ServerPool.run`: threads of each living server take items from one queue."""

    def __init__(self, pool: ServerPool, work: Callable[[Endpoint, Item, int], Result], items: Sequence[Item],
                 what: Callable[[Item], str], servers: Sequence[Endpoint]) -> None:
        self.pool, self.work, self.items, self.what = pool, work, items, what
        self.queue = deque((index, 0) for index in range(len(items)))
        self.done: dict[int, Result] = {}
        self.error: BaseException | None = None
        self.workers = 0
        self.last = ""
        self.changed = threading.Condition()
        for endpoint in servers:
            for _ in range(min(pool.in_flight, len(items))):
                self.workers += 1
                # Daemons: an interpreter that ends after Ctrl-C waits for no server.
                threading.Thread(target=self._serve, args=(endpoint,), name=f"sglang {endpoint.name}", daemon=True).start()

    def results(self) -> list[Result]:
        with self.changed:
            try:
                while self.error is None and len(self.done) < len(self.items):
                    if self.workers == 0:
                        raise RunError(self.pool.all_gone(self.last))
                    self.changed.wait(_LOOK_SECONDS)
            except BaseException as error:  # Ctrl-C included: the threads must not take another item
                self.error = self.error or error
                raise
            if self.error is not None:
                raise self.error
        return [self.done[index] for index in range(len(self.items))]

    def _serve(self, endpoint: Endpoint) -> None:
        try:
            while (taken := self._take(endpoint)) is not None:
                self._try(endpoint, *taken)
        finally:
            with self.changed:
                self.workers -= 1
                self.changed.notify_all()

    def _take(self, endpoint: Endpoint) -> tuple[int, int] | None:
        with self.changed:
            while True:
                if self.error is not None or len(self.done) == len(self.items) or id(endpoint) not in self.pool.admitted:
                    return None
                if self.queue:
                    return self.queue.popleft()
                self.changed.wait()

    def _try(self, endpoint: Endpoint, index: int, attempt: int) -> None:
        try:
            with self.pool.slots[id(endpoint)]:
                result = self._until_room(endpoint, index, attempt)
        except ServerUnreachable as error:
            self._failed(endpoint, index, attempt, error)
        except BaseException as error:  # whatever it is must surface in the caller
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()
        else:
            with self.changed:
                self.done[index] = result
                self.changed.notify_all()

    def _until_room(self, endpoint: Endpoint, index: int, attempt: int) -> Result:
        pause, deadline = _BUSY_FIRST_SECONDS, time.monotonic() + self.pool.busy_seconds
        while True:
            try:
                return self.work(endpoint, self.items[index], attempt)
            except ServerBusy as busy:
                if time.monotonic() > deadline or self.error is not None:
                    raise RunError(f"{endpoint.name} had no room for {self.what(self.items[index])} for {self.pool.busy_seconds:.0f} s: "
                                   f"{busy}. Lower target_backend.requests_in_flight") from None
                time.sleep(pause)
                pause = min(2 * pause, _BUSY_MOST_SECONDS)

    def _failed(self, endpoint: Endpoint, index: int, attempt: int, error: ServerUnreachable) -> None:
        gone = not endpoint.is_alive()
        with self.changed:
            self.last = str(error)
            if gone:
                self.pool.admitted.discard(id(endpoint))
            if attempt < self.pool.retries:
                self.queue.append((index, attempt + 1))
            elif self.error is None:
                tries = f"{attempt + 1} tries" if attempt else "one try"
                words = endpoint.last_words()
                self.error = RunError(f"{self.what(self.items[index])}: no answer after {tries} "
                                      f"(target_backend.retries={self.pool.retries}); "
                                      f"the last: {error} {words}".rstrip())
            self.changed.notify_all()
