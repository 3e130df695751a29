"""The process around ``sgl.Engine``: started by :class:`HostEndpoint`, ends with it.

SGLang's engine takes over the process it runs in (signal handlers, event loop, environment, start method; its shutdown kills every
child of the process). So it gets a process of its own, which holds nothing else.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from multiprocessing.connection import Connection, Listener
from typing import Any

KEY_VARIABLE = "SPECFORGE_HOST_KEY"
# What async_generate of every supported release takes; the engine runs without a prefix cache, so extra_key is not needed.
_REQUEST_KEYS = ("input_ids", "sampling_params", "rid", "return_hidden_states")


def main(address: str) -> int:
    """Accept one connection at ``address``, make the engine of the arguments that come first, answer requests until it closes."""
    with Listener(address, "AF_UNIX", authkey=bytes.fromhex(os.environ.pop(KEY_VARIABLE))) as listener:
        connection = listener.accept()
    arguments: dict[str, Any] = connection.recv()
    try:
        import sglang

        engine = sglang.Engine(**arguments)
    except Exception as error:
        connection.send(("failed", f"{type(error).__name__}: {error}"))
        raise
    connection.send(("ready", None))
    try:
        engine.loop.run_until_complete(_serve(engine, connection))
    finally:
        engine.shutdown()
    return 0


async def _serve(engine: Any, connection: Connection) -> None:
    """Answer every request in a task of its own; return when the other side is gone."""
    requests: asyncio.Queue[tuple[int, dict[str, Any]] | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read, args=(connection, loop, requests), daemon=True).start()
    tasks: set[asyncio.Task[None]] = set()
    while (request := await requests.get()) is not None:
        task = loop.create_task(_answer(engine, connection, *request))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def _read(connection: Connection, loop: asyncio.AbstractEventLoop, requests: asyncio.Queue[Any]) -> None:
    """Hand requests over until the other side says None or is gone."""
    request: Any = ()
    try:
        while request is not None:
            request = connection.recv()
            loop.call_soon_threadsafe(requests.put_nowait, request)
    except (EOFError, OSError):
        loop.call_soon_threadsafe(requests.put_nowait, None)


async def _answer(engine: Any, connection: Connection, number: int, body: dict[str, Any]) -> None:
    try:
        answer = await engine.async_generate(**{key: body[key] for key in _REQUEST_KEYS if key in body})
    except Exception as error:  # SGLang's own refusals come as ValueError, others must reach the caller too
        connection.send((number, "refused", f"{type(error).__name__}: {error}"))
    else:
        connection.send((number, "answer", answer))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
