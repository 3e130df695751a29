"""Target engine ``sglang_server``: one or many SGLang servers over HTTP, ours or somebody else's."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from specforge.errors import ConfigError
from specforge.inference.sglang_client.endpoint import Endpoint, HttpEndpoint
from specforge.inference.sglang_client.launch import LaunchPlan, check_server_arguments
from specforge.inference.sglang_plugin.marks import Transport
from specforge.inference.sglang_process import SGLangProcess
from specforge.inference.target_engine.sglang_base import SGLangTarget
from specforge.runtime.contracts import CaptureSpec, TargetIdentity
from specforge.runtime.data_plane.process_owner import make_private_folder


class SGLangServerTargetEngine(SGLangTarget):
    """See ``conf/target_backend/sglang_server.yaml`` for the values.

    With ``servers`` they are external: asked what they are, never stopped. Without, ``num_servers`` are started for this process, and
    for every rank of a run its own.
    """

    runtime_arguments: ClassVar[tuple[str, ...]] = ("target_folder", "device", "identity", "trust_remote_code")

    def __init__(
        self,
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float16"],
        servers: list[str] | None,
        token_variable: str | None,
        num_servers: Annotated[int, Field(ge=1)],
        first_gpu: Annotated[int, Field(ge=0)],
        server_args: dict[str, Any] | None,
        environment: dict[str, str] | None,
        transport: Transport,
        store_bytes: int | str,
        requests_in_flight: Annotated[int, Field(ge=1)],
        retries: Annotated[int, Field(ge=0)],
        request_timeout_seconds: Annotated[float, Field(gt=0)],
        start_timeout_seconds: Annotated[float, Field(gt=0)],
        target_folder: Path,
        device: torch.device | str,
        identity: TargetIdentity,
        trust_remote_code: bool,
    ) -> None:
        super().__init__(target_folder=target_folder, device=device, identity=identity, trust_remote_code=trust_remote_code, dtype=dtype,
                         transport=transport, requests_in_flight=requests_in_flight, retries=retries,
                         request_timeout_seconds=request_timeout_seconds)
        check_server_arguments(server_args, "target_backend.server_args")
        self.urls = _checked_urls(servers)
        self.token = _read_token(token_variable)
        self.num_servers, self.first_gpu = num_servers, first_gpu
        self.start_timeout_seconds = start_timeout_seconds
        self.plan = LaunchPlan(self, server_args or {}, environment or {}, store_bytes, torch.device(device))
        self._folder: Path | None = None

    def _start(self, spec: CaptureSpec | None) -> list[Endpoint]:
        if self.urls is not None:
            return [HttpEndpoint(url, token=self.token) for url in self.urls]
        self._folder = make_private_folder()
        environment = self.plan.environment(spec, self._folder)
        endpoints: list[Endpoint] = []
        processes: list[SGLangProcess] = []
        try:
            for number in range(self.num_servers):  # all start at once, then each is waited for
                processes.append(self._process(spec, environment, number).start())
                endpoints.append(HttpEndpoint(processes[-1].url, token=self.token, process=processes[-1]))
                self._tell(f"starting an SGLang server for {self.target_folder.name} at {endpoints[-1].name} (log: {processes[-1].log_path})")
            for process in processes:
                process.wait_ready()
        except BaseException:
            for endpoint in endpoints:
                endpoint.close()
            self._remove_folder()
            raise
        return endpoints

    def _process(self, spec: CaptureSpec | None, environment: dict[str, str], number: int) -> SGLangProcess:
        width = int(self.plan.server_args.get("tp_size") or 1)
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        gpu = self.first_gpu + (rank * self.num_servers + number) * width
        arguments = self.plan.arguments(spec, gpu)
        if self.token is not None:
            arguments["api_key"] = self.token
        log_path = Path(tempfile.gettempdir()) / f"specforge-sglang-{uuid.uuid4().hex[:8]}.log"
        return SGLangProcess(model_path=str(self.target_folder), port=None, arguments=arguments, environment=environment, log_path=log_path,
                             start_timeout_seconds=self.start_timeout_seconds)

    def _serves_any_spec(self) -> bool:
        return self.urls is not None

    def _close_servers(self) -> None:
        super()._close_servers()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @classmethod
    def rules(cls, choices: dict[str, str], config: dict[str, Any]) -> list[str]:
        """Addresses and server arguments that cannot work."""
        node, problems = config["target_backend"], []
        for check, value in ((_checked_urls, node.get("servers")), (_check_arguments, node.get("server_args"))):
            try:
                check(value)
            except ConfigError as error:
                problems += error.problems
        return problems


def _check_arguments(arguments: Any) -> None:
    check_server_arguments(arguments, "target_backend.server_args")


def _checked_urls(servers: Any) -> list[str] | None:
    if servers is None:
        return None
    bad = [url for url in servers if not isinstance(url, str) or not url.startswith(("http://", "https://"))]
    if bad or not servers:
        raise ConfigError(f"target_backend.servers: {list(servers)} — must be addresses like http://127.0.0.1:30000, or null to start "
                          "servers.")
    twice = sorted({url for url in servers if servers.count(url) > 1})
    if twice:
        raise ConfigError(f"target_backend.servers: {', '.join(twice)} is named twice. Raise target_backend.requests_in_flight instead.")
    return list(servers)


def _read_token(variable: str | None) -> str | None:
    """The token itself stays out of configurations, which are written into run folders."""
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"target_backend.token_variable={variable}: the environment has no such variable, or it is empty. Set it to "
                          "the token.")
    return token
