"""EAGLE-3 wiring: fused target features, a two-input layer and the training-time-test unroll (arXiv 2503.01840).

Which embedding, feature, position and keys a row sees is conventions.md §2 and §4; the four flags are §5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from specforge.modeling.draft.base import DraftArchitecture
from specforge.modeling.warm_start import copy_where_shapes_agree
from specforge.modeling.wiring.rows import RaggedRows
from specforge.ops.attention import Attend, CausalDocumentMask, plain_attention, unroll_attention

StepResult = TypeVar("StepResult")


@dataclass(frozen=True)
class Eagle3Flags:
    """The four switches of conventions §5, explicit in every config and export."""

    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool


@dataclass(frozen=True)
class UnrollInputs:
    """What the unroll reads. C context rows make the step-0 keys; R of them, the supervised rows, are unrolled L steps.

    ``aux`` [C, K·H]; ``context_tokens`` [C] = tok[i+1]; ``context_positions`` [C] = pos[i]; ``row_in_context`` [R];
    ``step_tokens`` [L, R] = tok[i+1+k]; ``mask`` shows rows [B, T] the keys [B, S] of ``context``.
    """

    aux: torch.Tensor
    context: RaggedRows
    rows: RaggedRows
    context_tokens: torch.Tensor
    context_positions: torch.Tensor
    row_in_context: torch.Tensor
    step_tokens: torch.Tensor
    mask: CausalDocumentMask


class Eagle3Layer(nn.Module):
    """Decoder layer on u = [input_layernorm(embedding) ; hidden_norm(g)] with residual g."""

    def __init__(self, architecture: DraftArchitecture, flags: Eagle3Flags) -> None:
        super().__init__()
        width = architecture.hidden_size
        self.norm_before_residual = flags.norm_before_residual
        self.input_layernorm = architecture.norm(width)
        self.hidden_norm = architecture.norm(width)
        self.self_attn = architecture.attention(2 * width, width, 0)
        self.post_attention_layernorm = architecture.norm(width)
        self.mlp = architecture.feed_forward(0)

    def attention_input(self, embedded: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """embedded, g [..., H] -> (u [..., 2H], residual [..., H])."""
        normed = self.hidden_norm(g)
        u = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        return u, (normed if self.norm_before_residual else g)

    def finish(self, residual: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """Attention result o [..., h, Dv] -> the layer's output [..., H]."""
        h = residual + self.self_attn.output(o)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Draft(nn.Module):
    """The draft that EAGLE-3 trains and serves. ``state_dict()`` holds the trained weights and the vocabulary map, not the embedding."""

    d2t: torch.Tensor
    t2d: torch.Tensor
    embedding: torch.Tensor

    def __init__(
        self,
        architecture: DraftArchitecture,
        *,
        target_hidden_size: int,
        num_aux: int,
        embedding: torch.Tensor,
        d2t: torch.Tensor,
        t2d: torch.Tensor,
        flags: Eagle3Flags,
    ) -> None:
        super().__init__()
        width, self.flags, self.num_aux = architecture.hidden_size, flags, num_aux
        self.fc_norm = nn.ModuleList(architecture.norm(target_hidden_size) for _ in range(num_aux)) if flags.fc_norm else None
        self.input_norm = architecture.norm(num_aux * target_hidden_size) if flags.norm_before_fc else None
        self.fc = nn.Linear(num_aux * target_hidden_size, width, bias=False)
        self.midlayer = Eagle3Layer(architecture, flags)
        self.norm = architecture.norm(width)
        self.lm_head = nn.Linear(width, d2t.numel(), bias=False)
        self.rotary = architecture.rotary()
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self.register_buffer("embedding", embedding, persistent=False)  # the target's, frozen; SGLang shares it in
        self.attend: Attend = plain_attention

    @torch.no_grad()
    def warm_start(self, layer_weights: Mapping[str, torch.Tensor], final_norm: torch.Tensor | None, head: torch.Tensor) -> list[str]:
        """Begin as the target's last layer on its highest captured features; ``head`` [Vd, H] are the kept rows. Returns what was set."""
        done = [f"midlayer.{name}" for name in copy_where_shapes_agree(self.midlayer, layer_weights)]
        if done:
            # The highest captured layer passes through, the others start small.
            width = self.fc.out_features
            self.fc.weight.mul_(0.1)
            if self.fc.in_features == self.num_aux * width:
                self.fc.weight[:, -width:] += torch.eye(width)
            done.append("fc.weight")
        for name, source in (("norm.weight", final_norm), ("lm_head.weight", head)):
            parameter = self.get_parameter(name)
            if layer_weights and source is not None and source.shape == parameter.shape:
                parameter.copy_(source)
                done.append(name)
        return done

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """g_0 = fc(aux): [..., K·H] -> [..., H]."""
        aux = aux.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, aux.chunk(self.num_aux, dim=-1), strict=True)], dim=-1)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        return self.fc(aux)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids].to(self.fc.weight.dtype)

    def next_state(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer output -> (what the next step consumes, what the head reads), both [..., H]."""
        normed = self.norm(h)
        return (normed if self.flags.norm_output else h), normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[..., H] -> float32 draft logits [..., Vd]."""
        return self.lm_head(normed).float()

    def forward(self, inputs: UnrollInputs, on_step: Callable[[int, torch.Tensor, torch.Tensor], StepResult]) -> list[StepResult]:
        """Unroll L steps; ``on_step(k, normed [R, H], head weight [Vd, H])`` turns each step's rows into a loss without kept logits."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        dtype = self.fc.weight.dtype
        fused = self.fuse(inputs.aux)
        u, residual = layer.attention_input(self.embed(inputs.context_tokens), fused)
        cos, sin = self.rotary(inputs.context_positions, dtype)
        keys, values = (inputs.context.pad(x) for x in attention.keys_values(u, (cos, sin)))
        rows, picked = inputs.rows, inputs.row_in_context
        u, g, positions = u[picked], residual[picked], inputs.context_positions[picked]
        mask = inputs.mask.block_mask() if self.attend is not plain_attention else inputs.mask.dense()
        state = g
        own_keys: list[torch.Tensor] = []
        own_values: list[torch.Tensor] = []
        results = []
        for k in range(inputs.step_tokens.shape[0]):
            rope = (cos[picked], sin[picked]) if k == 0 else self.rotary(positions + k, dtype)
            if k > 0:  # later steps read their own previous output and add one key of their own
                u, g = layer.attention_input(self.embed(inputs.step_tokens[k]), state)
                own_k, own_v = attention.keys_values(u, rope)
                own_keys.append(rows.pad(own_k))
                own_values.append(rows.pad(own_v))
            q = rows.pad(attention.queries(u, rope))
            o = unroll_attention(q, keys, values, mask, attention.facts.scale, own_keys, own_values, self.attend)
            state, normed = self.next_state(layer.finish(g, rows.unpad(o)))
            results.append(on_step(k, normed, self.lm_head.weight))
        return results
