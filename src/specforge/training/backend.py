"""How one draft is spread over ranks and how its weights are updated: the only place that knows masters, buckets and reductions.

:class:`ReplicatedBackend` keeps a whole draft on every rank. A sharded one fits the same seam: the trainer only ever calls
``prepare``, ``backward``, ``reduce_gradients``, ``gradient_norm``, ``update`` and the four state methods.

Gradients are sums over rows. They are accumulated in fp32 over micro-batches, summed over ranks once per optimizer step, and divided
by the weight_sum of all ranks and micro-batches (conventions §3); so nothing depends on how a global batch was cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from specforge.distributed.groups import Group
from specforge.errors import CheckpointError
from specforge.training.optimizer import OptimizerFactory


class Backend(ABC):
    """The seam between the trainer and a way of spreading a model. Methods marked collective must be called by every rank."""

    timeout_minutes: float

    @abstractmethod
    def prepare(self, model: nn.Module, group: Group, optimizer: OptimizerFactory, param_dtype: torch.dtype) -> nn.Module:
        """Collective. Cast, make the ranks equal, make masters and optimizer; returns the module to run from now on."""

    @abstractmethod
    def backward(self, loss_sum: torch.Tensor) -> None:
        """Add the gradient of one micro-batch's ``loss_sum`` to the step's fp32 gradient. No communication when replicated."""

    @abstractmethod
    def reduce_gradients(self) -> None:
        """Collective, exactly once per optimizer step: sum the accumulated gradient over ranks."""

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """The norm of the whole reduced gradient as a float64 scalar tensor, the same on every rank. Collective when sharded."""

    @abstractmethod
    def update(self, lr_factor: float, gradient_scale: float) -> None:
        """One optimizer update with ``gradient_scale`` times the reduced gradient and ``lr_factor`` times the configured lr."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget the accumulated gradient; the next micro-batch starts from zero."""

    @abstractmethod
    def model_state(self) -> dict[str, torch.Tensor]:
        """Collective when sharded: the full ``state_dict`` in the run dtype; complete on rank 0."""

    @abstractmethod
    def training_state(self) -> dict[str, Any]:
        """Collective when sharded: masters (where they are not the weights) and moments; complete on rank 0."""

    @abstractmethod
    def load_model_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of :meth:`model_state`; :class:`CheckpointError` names missing and unknown tensors."""

    @abstractmethod
    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`training_state`, after :meth:`load_model_state`."""


class ReplicatedBackend(Backend):
    """Data parallel with a whole replica on every rank.

    In fp32 the parameter is its own master and its ``.grad`` is a view into one flat buffer, so accumulation and reduction copy
    nothing. In bf16 each parameter has an fp32 master, and its gradient is added to the flat fp32 buffer as soon as autograd has
    it. ``bucket_mib`` cuts the flat buffer for the reduction; null sends it whole.
    """

    def __init__(self, *, bucket_mib: Annotated[int, Field(ge=1)] | None, timeout_minutes: Annotated[float, Field(gt=0)]) -> None:
        self.bucket_numel = None if bucket_mib is None else bucket_mib * 2**20 // 4
        self.timeout_minutes = timeout_minutes

    def prepare(self, model: nn.Module, group: Group, optimizer: OptimizerFactory, param_dtype: torch.dtype) -> nn.Module:
        self.group = group
        self.model = model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("the model has no parameter that requires a gradient")
        with torch.no_grad():
            for tensor in model.state_dict().values():
                group.broadcast(tensor)
            # Masters are taken before the cast: they keep the precision the weights were initialised or imported with.
            self.masters = {name: self._master(p, param_dtype) for name, p in trained.items()}
            for p in model.parameters():
                if p.is_floating_point() and p.dtype != param_dtype:
                    p.data = p.data.to(param_dtype)
        self.trained = trained
        self._lay_out_gradients()
        self.optimizer = optimizer.create(self.masters)
        self.base_lrs = [group_["lr"] for group_ in self.optimizer.param_groups]
        return model

    @staticmethod
    def _master(parameter: nn.Parameter, param_dtype: torch.dtype) -> nn.Parameter:
        if param_dtype == torch.float32:
            parameter.data = parameter.data.float()
            return parameter
        return nn.Parameter(parameter.detach().float().clone(), requires_grad=True)

    def _lay_out_gradients(self) -> None:
        device = next(iter(self.masters.values())).device
        self.flat = torch.zeros(sum(m.numel() for m in self.masters.values()), dtype=torch.float32, device=device)
        self.views: dict[str, torch.Tensor] = {}
        offset = 0
        for name, master in self.masters.items():
            view = self.flat[offset : offset + master.numel()].view_as(master)
            offset += master.numel()
            self.views[name] = master.grad = view
            parameter = self.trained[name]
            if parameter is not master:
                parameter.register_post_accumulate_grad_hook(_add_into(view))

    def backward(self, loss_sum: torch.Tensor) -> None:
        loss_sum.backward()

    def reduce_gradients(self) -> None:
        for name, master in self.masters.items():
            # Somebody who set .grad to None would silently train on zeros.
            if master.grad is not self.views[name]:
                raise RuntimeError(f"the gradient of {name} was replaced during the step; the backend owns every .grad")
        for bucket in self.flat.split(self.bucket_numel or self.flat.numel()):
            self.group.all_reduce_sum(bucket)

    def gradient_norm(self) -> torch.Tensor:
        # Blocks of one million in fp32, then fp64: one long fp32 sum of squares would lose digits on a large draft.
        squares = [torch.linalg.vector_norm(block).double() ** 2 for block in self.flat.split(2**20)]
        return torch.stack(squares).sum().sqrt()

    @torch.no_grad()
    def update(self, lr_factor: float, gradient_scale: float) -> None:
        self.flat.mul_(gradient_scale)
        for param_group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            param_group["lr"] = lr * lr_factor
        self.optimizer.step()
        self._copy_masters_to_weights()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.flat.zero_()

    @torch.no_grad()
    def _copy_masters_to_weights(self) -> None:
        pairs = [(self.trained[name], master) for name, master in self.masters.items() if self.trained[name] is not master]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def model_state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def training_state(self) -> dict[str, Any]:
        own = {name: m.detach() for name, m in self.masters.items() if self.trained[name] is not m}
        return {"masters": own, "optimizer": self.optimizer.state_dict(), "names": list(self.masters)}

    @torch.no_grad()
    def load_model_state(self, state: Mapping[str, torch.Tensor]) -> None:
        current = self.model.state_dict()
        problems = [f"missing: {name}" for name in current.keys() - state.keys()]
        problems += [f"unknown: {name}" for name in state.keys() - current.keys()]
        problems += [
            f"shape of {name}: {tuple(state[name].shape)} instead of {tuple(current[name].shape)}"
            for name in current.keys() & state.keys()
            if state[name].shape != current[name].shape
        ]
        if problems:
            raise CheckpointError("the checkpoint's weights are not this draft's: " + "; ".join(sorted(problems)[:8]))
        for name, tensor in current.items():
            tensor.copy_(state[name])
        for name, master in self.masters.items():
            master.copy_(self.trained[name])

    @torch.no_grad()
    def load_training_state(self, state: Mapping[str, Any]) -> None:
        if state["names"] != list(self.masters):
            raise CheckpointError(
                "the checkpoint's optimizer state names other parameters than this draft's; it was written by another strategy"
            )
        for name, saved in state["masters"].items():
            self.masters[name].copy_(saved)
        if state["masters"]:
            self._copy_masters_to_weights()
        # A changed optimizer.* takes effect on resume: numbers come from the configuration, moments from the checkpoint.
        numbers = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint was written with another optimizer: {error}. Set trainer.resume=never to start anew"
            ) from error
        for param_group, configured in zip(self.optimizer.param_groups, numbers, strict=True):
            param_group.update(configured)


def _add_into(view: torch.Tensor) -> Any:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        view.add_(parameter.grad)
        parameter.grad = None

    return hook
