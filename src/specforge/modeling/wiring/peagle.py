"""P-EAGLE wiring: every depth of a draft in one forward (arXiv 2602.01469).

The first layer is EAGLE-3's, on [token ; fused state]; the rest are ordinary. A row of depth 0 reads a real token and real features, every
deeper one the mask token and one learned vector in the place of features. Which row sees which is conventions.md §2 and ``ops/chain_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from specforge.modeling.draft.base import DraftArchitecture, DraftAttention, Rope
from specforge.modeling.warm_start import copy_where_shapes_agree
from specforge.modeling.wiring.block import BlockLayer
from specforge.modeling.wiring.eagle3 import Eagle3Flags, Eagle3Layer
from specforge.modeling.wiring.rows import RaggedRows
from specforge.ops.attention import Attend, plain_attention
from specforge.ops.chain_attention import AnchorMask, join, own_chain_attention

Result = TypeVar("Result")

# The learned vector starts small beside real features; Adam's step is a few per cent of it at once.
_MASK_HIDDEN_STD = 0.02


@dataclass(frozen=True)
class Queries:
    """Rows that ask in a layer: some of depth 0, padded by ``shared``, then all chain rows; ``mask`` shows [B, T0 + Tc] the context.

    ``chosen`` int64: places of the depth-0 rows among the context, or None for all of them.
    """

    shared: RaggedRows
    chosen: torch.Tensor | None
    mask: AnchorMask


@dataclass(frozen=True)
class ParallelInputs:
    """What one forward reads: C context rows (depth 0) and M chain rows (depths 1 … D − 1), in this order wherever both are flat.

    ``aux`` [C, K·H]; ``tokens`` [C] = tok[a+1]; ``positions`` [C + M] = pos[a] + d; chain rows are anchor-major, so that ``own`` can lay
    each anchor's chain out as one padded row. ``scored`` asks in the last layer, ``everything`` in the others.
    """

    aux: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    context: RaggedRows
    chains: RaggedRows
    own: RaggedRows
    everything: Queries
    scored: Queries


class PEagleDraft(nn.Module):
    """The draft that P-EAGLE trains and vLLM serves; parameters have the names of its loader. The embedding is the target's, frozen."""

    d2t: torch.Tensor
    t2d: torch.Tensor
    embedding: torch.Tensor
    layers: Any  # an Eagle3Layer, then BlockLayers

    def __init__(
        self,
        architecture: DraftArchitecture,
        *,
        target_hidden_size: int,
        num_aux: int,
        mask_token_id: int,
        embedding: torch.Tensor,
        d2t: torch.Tensor,
        t2d: torch.Tensor,
        flags: Eagle3Flags,
    ) -> None:
        super().__init__()
        width, self.flags, self.num_aux, self.mask_token_id = architecture.hidden_size, flags, num_aux, mask_token_id
        self.fc_norm = nn.ModuleList(architecture.norm(target_hidden_size) for _ in range(num_aux)) if flags.fc_norm else None
        self.input_norm = architecture.norm(num_aux * target_hidden_size) if flags.norm_before_fc else None
        self.fc = nn.Linear(num_aux * target_hidden_size, width, bias=False)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, num_aux * target_hidden_size) * _MASK_HIDDEN_STD)
        deeper = (BlockLayer(architecture, i) for i in range(1, architecture.num_layers))
        self.layers = nn.ModuleList([Eagle3Layer(architecture, flags), *deeper])
        self.norm = architecture.norm(width)
        self.lm_head = nn.Linear(width, d2t.numel(), bias=False)
        self.rotary = architecture.rotary()
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self.register_buffer("embedding", embedding, persistent=False)
        self.attend: Attend = plain_attention

    @torch.no_grad()
    def warm_start(self, layer_weights: Mapping[str, torch.Tensor], final_norm: torch.Tensor | None, head: torch.Tensor) -> list[str]:
        """Begin as the target's last layer on its highest captured features; ``head`` [Vd, H] are the kept rows. Returns what was set."""
        if not layer_weights:
            return []
        # An architecture gives the target's input norm as EAGLE-3's hidden_norm; in a deeper layer its input norm has that place.
        deeper = {("input_layernorm.weight" if name == "hidden_norm.weight" else name): t for name, t in layer_weights.items()}
        given = [layer_weights, *[deeper] * (len(self.layers) - 1)]
        pairs = enumerate(zip(self.layers, given, strict=True))
        done = [f"layers.{i}.{name}" for i, (layer, weights) in pairs for name in copy_where_shapes_agree(layer, weights)]
        if done:
            width = self.fc.out_features
            self.fc.weight.mul_(0.1)
            if self.fc.in_features == self.num_aux * width:  # the highest captured layer passes through, the others start small
                self.fc.weight[:, -width:] += torch.eye(width)
            done.append("fc.weight")
        for name, source in (("norm.weight", final_norm), ("lm_head.weight", head)):
            parameter = self.get_parameter(name)
            if source is not None and source.shape == parameter.shape:
                parameter.copy_(source)
                done.append(name)
        return done

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """g = fc(aux): [..., K·H] -> [..., H]."""
        aux = aux.to(self.fc.weight.dtype)
        if self.fc_norm is not None:
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, aux.chunk(self.num_aux, dim=-1), strict=True)], dim=-1)
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        return self.fc(aux)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids].to(self.fc.weight.dtype)

    def first_input(self, tokens: torch.Tensor, aux: torch.Tensor, num_masked: int) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [C], aux [C, K·H] and the same mask row M times -> what the first layer reads: u [C + M, 2H], residual [C + M, H]."""
        real = self.layers[0].attention_input(self.embed(tokens), self.fuse(aux))
        masked = self.layers[0].attention_input(self.embed(tokens.new_full((1,), self.mask_token_id)), self.fuse(self.mask_hidden[0]))
        u, residual = (torch.cat((r, m.expand(num_masked, -1))) for r, m in zip(real, masked, strict=True))
        return u, residual

    def layer_input(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Input of attention ``index`` ≥ 1 for the layer's input x [..., H]."""
        return self.layers[index].input_layernorm(x)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[..., H] -> float32 draft logits [..., Vd]."""
        return self.lm_head(normed).float()

    def hidden(self, inputs: ParallelInputs) -> torch.Tensor:
        """Final normed states [R, H] of the scored rows: those of depth 0 first, then every chain row."""
        num_context = inputs.tokens.numel()
        u, x = self.first_input(inputs.tokens, inputs.aux, inputs.positions.numel() - num_context)
        rope = self.rotary(inputs.positions, u.dtype)
        masks: dict[tuple[int | None, bool], Any] = {}
        for i, layer in enumerate(self.layers):
            if i > 0:
                u = self.layer_input(i, x)
            attention, last = layer.self_attn, i == len(self.layers) - 1
            window, queries = attention.facts.window, inputs.scored if last else inputs.everything
            if (window, last) not in masks:
                masks[window, last] = replace(queries.mask, window=window).prepare(self.attend)
            picked = None if queries.chosen is None else torch.cat((queries.chosen, torch.arange(num_context, u.shape[0], device=u.device)))
            o = self._attention(attention, u, rope, picked, queries, masks[window, last], inputs)
            x = layer.finish(x if picked is None else x.index_select(0, picked), o)
        return self.norm(x)

    def _attention(
        self,
        attention: DraftAttention,
        u: torch.Tensor,
        rope: Rope,
        picked: torch.Tensor | None,
        queries: Queries,
        mask: Any,
        inputs: ParallelInputs,
    ) -> torch.Tensor:
        """u [C + M, ·] -> [rows that ask, h, Dv]."""
        facts, num_context = attention.facts, inputs.tokens.numel()
        k, v = attention.keys_values(u, rope)
        keys, values = (inputs.context.pad(t[:num_context]) for t in (k, v))
        asking = (u, rope) if picked is None else (u.index_select(0, picked), (rope[0][picked], rope[1][picked]))
        q = attention.queries(*asking)
        num_shared = queries.shared.flat.numel()
        padded = torch.cat((queries.shared.pad(q[:num_shared]), inputs.chains.pad(q[num_shared:])), dim=1)
        o, lse = self.attend(padded, keys, values, mask, facts.scale)
        width = queries.shared.gather.shape[1]
        shared, chained = queries.shared.unpad(o[:, :width]), inputs.chains.unpad(o[:, width:])
        own = (inputs.own.pad(t) for t in (q[num_shared:], k[num_context:], v[num_context:]))
        own_o, own_lse = own_chain_attention(*own, facts.window, facts.scale)
        blind = inputs.chains.unpad(replace(queries.mask, window=facts.window).blind[:, width:])
        chained = join(chained, inputs.chains.unpad(lse[:, width:]), blind, inputs.own.unpad(own_o), inputs.own.unpad(own_lse))
        return torch.cat((shared, chained))

    def forward(self, inputs: ParallelInputs, on_rows: Callable[[torch.Tensor, torch.Tensor], Result]) -> Result:
        """``on_rows(normed [R, H], head weight [Vd, H])`` turns the scored rows into a loss inside the module."""
        return on_rows(self.hidden(inputs), self.lm_head.weight)
