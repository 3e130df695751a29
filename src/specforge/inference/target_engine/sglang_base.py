"""What both SGLang engines share: one or many SGLangs behind a pool, the handshake, the route that features take, answers."""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import threading
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specforge.errors import RunError, TargetError
from specforge.inference.layer_ids import check_layer_ids
from specforge.inference.sglang_client import bare_server, calls, handshake
from specforge.inference.sglang_client.endpoint import Endpoint
from specforge.inference.sglang_client.pool import ServerPool
from specforge.inference.sglang_http import ServerRefused
from specforge.inference.sglang_plugin.marks import Mark, Transport
from specforge.inference.target_engine.base import TargetEngine, resolve_dtype
from specforge.runtime.contracts import FINAL_HIDDEN_STATES, TARGET_ARGMAX, CapturedFeatures, CaptureSpec, PromptTask, TargetIdentity
from specforge.runtime.data_plane.shared_dir import SharedDirStore

_ANY_SIZE = "1000TiB"  # the server bounds its store; here it is only read
_SPARE_TOKENS = 6  # how many fewer than its context length SGLang takes


class SGLangTarget(TargetEngine):
    """Features are made by SGLang's own kernels, so they are what serving computes; tensors come back in host memory.

    Servers are started or asked at the first call, because only then is known which layers are wanted. A call may come from two
    threads at once; their requests share the servers.
    """

    def __init__(self, *, target_folder: Path, device: torch.device | str, identity: TargetIdentity, trust_remote_code: bool, dtype: str,
                 transport: Transport, requests_in_flight: int, retries: int, request_timeout_seconds: float) -> None:
        from specforge.modeling.target_facts import TargetFacts

        facts = TargetFacts.from_folder(target_folder)
        self.target_folder, self.identity, self.trust_remote_code = Path(target_folder), identity, trust_remote_code
        self.device = torch.device("cpu")
        self.dtype = resolve_dtype(dtype, torch.device(device))
        self.num_layers, self.hidden_size = facts.num_layers, facts.hidden_size
        self.architecture = (facts.raw.get("architectures") or [""])[0]
        self.stop_token_ids = _stop_token_ids(self.target_folder, facts.eos_token_ids)
        self.transport: Transport = transport
        self.in_flight, self.retries, self.timeout = requests_in_flight, retries, request_timeout_seconds
        self.spec: CaptureSpec | None = None  # what the running servers were started or admitted for
        self._pool: ServerPool | None = None
        # What each admitted server's plug-in said, and the folder it stores features in; by the endpoint's id.
        self._facts: dict[int, dict[str, Any] | None] = {}
        self._stores: dict[int, SharedDirStore] = {}
        self._opening = threading.RLock()
        self._head: Any = None
        self._calls = itertools.count()
        self._name = uuid.uuid4().hex[:8]
        self._told: set[str] = set()

    @abstractmethod
    def _start(self, spec: CaptureSpec | None) -> list[Endpoint]:
        """The servers for ``spec`` (None: only answers are wanted), started if they are ours."""

    @abstractmethod
    def _serves_any_spec(self) -> bool:
        """Whether the servers are somebody else's, so that another spec needs no restart but only another handshake."""

    # -- capture ----------------------------------------------------------------------------------------------------------

    def capture(self, tasks: Sequence[PromptTask], spec: CaptureSpec) -> list[CapturedFeatures]:
        check_layer_ids(spec.aux_layer_ids, self.num_layers)
        pool = self._opened(spec)
        call = next(self._calls)
        captured = pool.run(lambda server, task, attempt: self._capture_one(server, task, attempt, spec, call), tasks,
                            lambda task: f"sample {task.sample_id}")
        return [self._completed(features, task, spec) for features, task in zip(captured, tasks, strict=True)]

    def _capture_one(self, server: Endpoint, task: PromptTask, attempt: int, spec: CaptureSpec, call: int) -> CapturedFeatures:
        said = self._facts.get(id(server))
        if (error := calls.too_long(task, said["context_length"] - _SPARE_TOKENS if said else None, server.name)) is not None:
            raise error
        try:
            if said is None:
                return bare_server.capture(server, task, spec, self.timeout)
            # Two runs may share a server and its store, and a late file of an earlier call must not be taken for this one's.
            mark = Mark.of(f"{self._name}.{call}.{task.sample_id}", task.loss_mask, attempt, self.transport)
            answer = server.generate(calls.capture_body(task, mark.rid()), self.timeout)
            return calls.read_capture(answer, mark, task, spec, self._stores.get(id(server)), self.timeout, server.name)
        except ServerRefused as error:
            raise RunError(f"sample {task.sample_id} ({len(task.input_ids)} tokens): {error}") from error

    def _completed(self, features: CapturedFeatures, task: PromptTask, spec: CaptureSpec) -> CapturedFeatures:
        """The target's own choice by our copy of its head, where the server did not give it."""
        if spec.target_argmax and TARGET_ARGMAX not in features.tensors:
            self._tell("target_argmax: computed here from the final hidden states, since the server does not give it")
            rows = torch.tensor(task.loss_mask, dtype=torch.bool)[1:].nonzero().squeeze(-1)
            argmax = torch.full((len(task.input_ids),), -1, dtype=torch.int64)
            if len(rows):
                argmax[rows] = self._own_head().argmax(features.tensors[FINAL_HIDDEN_STATES][rows])
            features.tensors[TARGET_ARGMAX] = argmax
        return features

    def _own_head(self) -> Any:
        if self._head is None:
            from specforge.modeling.target import TargetHead

            self._head = TargetHead.load(self.target_folder, self.dtype)
        return self._head

    # -- generate ---------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> list[list[int]]:
        """See the base class. Above temperature 0 SGLang follows the seeds only with its flag ``enable_deterministic_inference``."""
        with self._opening:
            pool = self._pool or self._opened(None)
        if temperature > 0 and not all(said and said["deterministic"] for said in self._facts.values()):
            self._tell("temperature > 0: SGLang draws from one stream for all requests, so answers differ from run to run; "
                       "target_backend.server_args={enable_deterministic_inference: true} makes them follow the seed")
        seeds = [_mix(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else list(seed)

        def one(server: Endpoint, item: tuple[Sequence[int], int], attempt: int) -> list[int]:
            body = calls.generate_body(item[0], max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=item[1],
                                       stops=stop_token_ids, own_stops=self.stop_token_ids)
            try:
                return calls.answer_tokens(server.generate(body, self.timeout), stop_token_ids)
            except ServerRefused as error:
                raise RunError(f"a prompt of {len(item[0])} tokens with max_new_tokens={max_new_tokens}: {error}") from error

        return pool.run(one, list(zip(prompts, seeds, strict=True)), lambda item: f"the answer to a prompt of {len(item[0])} tokens")

    # -- servers ----------------------------------------------------------------------------------------------------------

    def _opened(self, spec: CaptureSpec | None) -> ServerPool:
        """The pool with every server admitted for ``spec``."""
        with self._opening:
            if self._pool is not None and spec not in (None, self.spec):
                if self._serves_any_spec():
                    self._pool.admitted.clear()
                else:
                    self._close_servers()  # started for answers only, or for other layers
            self.spec = spec or self.spec
            if self._pool is None:
                self._pool = ServerPool(self._start(self.spec), admit=self._admit, in_flight=self.in_flight, retries=self.retries,
                                        busy_seconds=self.timeout)
            self._pool.usable()
            return self._pool

    def _admit(self, server: Endpoint) -> None:
        expected = self.expected(self.spec)
        said = handshake.ask(server)
        if said is None:
            bare_server.check(server, expected, self.target_folder, self.trust_remote_code)
            how = "SGLang's own answers"
        else:
            handshake.check(said, expected, server.name)
            if self.transport == "store" and self.spec is not None:
                self._stores[id(server)] = SharedDirStore(path=said["store_path"], max_bytes=_ANY_SIZE, checksums=True)
            reason = bare_server.why_plugin(self.spec, self.transport, said["sglang"]) if self.spec is not None else None
            how = f"the plug-in {said['specforge']}, transport {self.transport}" + (f" ({reason})" if reason else "")
        self._facts[id(server)] = said
        version = f"SGLang {said['sglang']}" if said else "SGLang without plug-in"
        self._tell(f"{server.name}: {version}; " + (f"features by {how}" if self.spec is not None else "answers only"))

    def expected(self, spec: CaptureSpec | None) -> handshake.Expected:
        """What a server must be for ``spec``."""
        return handshake.Expected(self.identity, self.architecture, self.num_layers, self.hidden_size, spec, self.transport)

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            print(f"specforge: {line}", file=sys.stderr, flush=True)

    def _close_servers(self) -> None:
        pool, self._pool = self._pool, None
        self._facts.clear()
        self._stores.clear()
        if pool is not None:
            pool.close()

    def close(self) -> None:
        self._close_servers()
        self._head = None


def _stop_token_ids(folder: Path, config_ids: tuple[int, ...]) -> tuple[int, ...]:
    """What the target's generation config ends a reply with, else its config's end-of-sequence tokens."""
    try:
        stops = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        stops = None
    except (OSError, ValueError) as error:
        raise TargetError(f"target.path: {folder / 'generation_config.json'} cannot be read as JSON ({error}). Fetch the model "
                          "again.") from None
    if stops is None:
        return config_ids
    return tuple(stops) if isinstance(stops, list) else (int(stops),)


def _mix(seed: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest(), "big")
