"""Target engine ``sglang``: an ``sgl.Engine`` that belongs to this process, features through the plug-in and shared memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from specforge.errors import ConfigError
from specforge.inference.sglang_client.endpoint import Endpoint
from specforge.inference.sglang_client.host import HostEndpoint
from specforge.inference.sglang_client.launch import LaunchPlan, check_server_arguments
from specforge.inference.sglang_plugin.marks import Transport
from specforge.inference.target_engine.sglang_base import SGLangTarget
from specforge.runtime.contracts import CaptureSpec, TargetIdentity
from specforge.runtime.data_plane.process_owner import make_private_folder


class SGLangTargetEngine(SGLangTarget):
    """See ``conf/target_backend/sglang.yaml`` for the values. With several ranks, each has an engine on its own device.

    The engine is stopped by :meth:`close`, and with this process however it ends.
    """

    runtime_arguments: ClassVar[tuple[str, ...]] = ("target_folder", "device", "identity", "trust_remote_code")

    def __init__(
        self,
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float16"],
        mem_fraction_static: Annotated[float, Field(gt=0, lt=1)],
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
        self.plan = LaunchPlan(self, {"mem_fraction_static": mem_fraction_static, **(server_args or {})}, environment or {}, store_bytes,
                               torch.device(device))
        self.start_timeout_seconds = start_timeout_seconds
        self._folder: Path | None = None

    def _start(self, spec: CaptureSpec | None) -> list[Endpoint]:
        self._folder = make_private_folder()
        gpu = self.plan.device.index if self.plan.device.type == "cuda" else None
        # Nothing but our requests comes here, and each prompt once: a prefix cache would only hold memory.
        arguments = {"disable_radix_cache": True, **self.plan.arguments(spec, gpu), "model_path": str(self.target_folder)}
        host = HostEndpoint(arguments=arguments, environment=self.plan.environment(spec, self._folder), folder=self._folder,
                            start_timeout_seconds=self.start_timeout_seconds)
        self._tell(f"starting sgl.Engine for {self.target_folder.name} (log: {host.log_path})")
        try:
            return [host.start()]
        except BaseException:
            self._remove_folder()
            raise

    def _serves_any_spec(self) -> bool:
        return False

    def _close_servers(self) -> None:
        super()._close_servers()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @classmethod
    def rules(cls, choices: dict[str, str], config: dict[str, Any]) -> list[str]:
        """Server arguments that cannot be combined with capture."""
        try:
            check_server_arguments(config["target_backend"].get("server_args"), "target_backend.server_args")
        except ConfigError as error:
            return error.problems
        return []
