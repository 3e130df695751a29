"""EAGLE-3 wiring: fused target features, a two-input layer and the training-time-test unroll (arXiv 2503.01840).

Which embedding, feature, position and keys a row sees is conventions.md §2 and §4; the four flags are §5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from specforge.modeling.draft.base import DraftArchitecture, DraftAttention
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


class Eagle3DeeperLayer(nn.Module):
    """Decoder layer after the first: it reads the state alone. SGLang calls its input norm ``hidden_norm``; there is no other."""

    def __init__(self, architecture: DraftArchitecture, layer_idx: int) -> None:
        super().__init__()
        width = architecture.hidden_size
        self.hidden_norm = architecture.norm(width)
        self.self_attn = architecture.attention(width, width, layer_idx)
        self.post_attention_layernorm = architecture.norm(width)
        self.mlp = architecture.feed_forward(layer_idx)

    def attention_input(self, embedded: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """h [..., H] -> (normed h, residual h), both [..., H]; the embedding is the first layer's."""
        return self.hidden_norm(h), h

    def finish(self, residual: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """As that of the first layer."""
        h = residual + self.self_attn.output(o)
        return h + self.mlp(self.post_attention_layernorm(h))


class _UnrollKeys:
    """What the unroll caches of one layer: step-0 keys and values [B, S, hk, ·] and own ones [B, T, hk, ·] of each later step."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, attention: DraftAttention) -> None:
        self.keys, self.values, self.facts = keys, values, attention.facts
        self.own_keys: list[torch.Tensor] = []
        self.own_values: list[torch.Tensor] = []

    def attend(self, q: torch.Tensor, step: int, masks: _Masks) -> torch.Tensor:
        """q [B, T, h, D] of ``step`` -> [B, T, h, Dv]."""
        window = self.facts.window
        first = 0 if window is None else max(0, step - window)  # own key j is of step j + 1
        own = (self.own_keys[first:], self.own_values[first:])
        if window is not None and step >= window:
            return unroll_attention(q, None, None, None, self.facts.scale, *own)
        return unroll_attention(q, self.keys, self.values, masks.of_rows(window, step), self.facts.scale, *own, masks.attend)


class _Masks:
    """Masks in the form that the operator wants, each made once."""

    def __init__(self, mask: CausalDocumentMask, attend: Attend) -> None:
        self.mask, self.attend = mask, attend
        self._made: dict[tuple[int | None, int], Any] = {}

    def of_rows(self, window: int | None, step: int) -> Any:
        key = (window, 0 if window is None else step)  # without a window every step sees the same
        if key not in self._made:
            self._made[key] = replace(self.mask, window=window, shift=key[1]).prepare(self.attend)
        return self._made[key]

    def of_context(self, window: int | None) -> Any:
        key = (window, -1)
        if key not in self._made:
            self._made[key] = replace(self.mask.over_keys(), window=window).prepare(self.attend)
        return self._made[key]


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
        # Under the numbers that SGLang's loader gives them; its layer 0 is ours called midlayer, as in the published drafts.
        self.layers = nn.ModuleDict({str(i): Eagle3DeeperLayer(architecture, i) for i in range(1, architecture.num_layers)})
        self.norm = architecture.norm(width)
        self.lm_head = nn.Linear(width, d2t.numel(), bias=False)
        self.rotary = architecture.rotary()
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self.register_buffer("embedding", embedding, persistent=False)  # the target's, frozen; SGLang shares it in
        self.attend: Attend = plain_attention

    @property
    def stack(self) -> list[Any]:
        """Every decoder layer, first to last."""
        return [self.midlayer, *self.layers.values()]

    @torch.no_grad()
    def warm_start(self, layer_weights: Mapping[str, torch.Tensor], final_norm: torch.Tensor | None, head: torch.Tensor) -> list[str]:
        """Begin as the target's last layer on its highest captured features; ``head`` [Vd, H] are the kept rows. Returns what was set."""
        places = ["midlayer", *(f"layers.{i}" for i in self.layers)]
        pairs = zip(places, self.stack, strict=True)
        done = [f"{place}.{name}" for place, layer in pairs for name in copy_where_shapes_agree(layer, layer_weights)]
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
        masks = _Masks(inputs.mask, self.attend)
        x, caches = self._first_step(inputs, masks)
        state, normed = self.next_state(x)
        results = [on_step(0, normed, self.lm_head.weight)]
        rows, positions = inputs.rows, inputs.context_positions[inputs.row_in_context]
        for k in range(1, inputs.step_tokens.shape[0]):  # later steps read their own previous output and add one key of their own
            x, embedded = state, self.embed(inputs.step_tokens[k])
            rope = self.rotary(positions + k, embedded.dtype)
            for layer, cache in zip(self.stack, caches, strict=True):
                attention = layer.self_attn
                u, residual = layer.attention_input(embedded, x)
                own_k, own_v = attention.keys_values(u, rope)
                cache.own_keys.append(rows.pad(own_k))
                cache.own_values.append(rows.pad(own_v))
                x = layer.finish(residual, rows.unpad(cache.attend(rows.pad(attention.queries(u, rope)), k, masks)))
            state, normed = self.next_state(x)
            results.append(on_step(k, normed, self.lm_head.weight))
        return results

    def _first_step(self, inputs: UnrollInputs, masks: _Masks) -> tuple[torch.Tensor, list[_UnrollKeys]]:
        """The rows' output of the last layer [R, H] at step 0, and the keys and values of all context rows in each layer.

        Keys of layer i + 1 hang on what layer i makes of every context row, so all of them ask there; in the last layer only rows do.
        """
        embedded, x, stack = self.embed(inputs.context_tokens), self.fuse(inputs.aux), self.stack
        rope, picked = self.rotary(inputs.context_positions, embedded.dtype), inputs.row_in_context
        caches = []
        for layer in stack:
            attention, last = layer.self_attn, layer is stack[-1]
            u, residual = layer.attention_input(embedded, x)
            keys, values = (inputs.context.pad(t) for t in attention.keys_values(u, rope))
            caches.append(_UnrollKeys(keys, values, attention))
            if last:
                q = inputs.rows.pad(attention.queries(u[picked], (rope[0][picked], rope[1][picked])))
                return layer.finish(residual[picked], inputs.rows.unpad(caches[-1].attend(q, 0, masks))), caches
            q = inputs.context.pad(attention.queries(u, rope))
            o, _ = self.attend(q, keys, values, masks.of_context(attention.facts.window), attention.facts.scale)
            x = layer.finish(residual, inputs.context.unpad(o))
        raise ValueError("a draft has at least one layer")
