"""Block-draft wiring: fused target features as context, one masked block an anchor, layers shared by both (DFlash, arXiv 2602.06036).

Which token, feature and position a slot sees is conventions.md §2. The context stream c = hidden_norm(fc(features)) enters every layer
unchanged, through that layer's key and value projections and no norm of its own; only block rows flow through the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from specforge.modeling.draft.base import DraftArchitecture
from specforge.modeling.wiring.rows import RaggedRows
from specforge.ops.attention import Attend, plain_attention
from specforge.ops.block_attention import BlockMask, PreparedMask, block_attention

Result = TypeVar("Result")


@dataclass(frozen=True)
class BlockInputs:
    """What the blocks read: C context rows of features, N anchors with a block of ``mask.block_size`` slots each.

    ``features`` [C, K·H]; ``context_positions`` [C]; ``anchor_tokens`` [N] = tok[a]; ``anchor_positions`` [N] = pos[a];
    ``mask`` shows the padded anchors [B, A] the padded context [B, S].
    """

    features: torch.Tensor
    context: RaggedRows
    context_positions: torch.Tensor
    anchors: RaggedRows
    anchor_tokens: torch.Tensor
    anchor_positions: torch.Tensor
    mask: BlockMask


class BlockLayer(nn.Module):
    """An ordinary pre-norm decoder layer; its attention reads keys from two streams through the same projections."""

    def __init__(self, architecture: DraftArchitecture, layer_idx: int) -> None:
        super().__init__()
        width = architecture.hidden_size
        self.input_layernorm = architecture.norm(width)
        self.self_attn = architecture.attention(width, width, layer_idx)
        self.post_attention_layernorm = architecture.norm(width)
        self.mlp = architecture.feed_forward(layer_idx)

    def finish(self, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """Layer input x [..., H] and attention result o [..., h, Dv] -> the layer's output [..., H]."""
        h = x + self.self_attn.output(o)
        return h + self.mlp(self.post_attention_layernorm(h))


class BlockDraft(nn.Module):
    """The draft of DFlash and D-PACE, and the backbone of Domino and DSpark. Embedding and head are the target's.

    ``d2t`` and ``t2d`` are the identity map over the whole vocabulary; checkpoints carry them for every strategy.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    embedding: torch.Tensor

    def __init__(
        self,
        architecture: DraftArchitecture,
        *,
        target_hidden_size: int,
        num_aux: int,
        block_size: int,
        mask_token_id: int,
        embedding: torch.Tensor,
        d2t: torch.Tensor,
        t2d: torch.Tensor,
    ) -> None:
        super().__init__()
        width = architecture.hidden_size
        self.num_aux, self.block_size, self.mask_token_id = num_aux, block_size, mask_token_id
        self.fc = nn.Linear(num_aux * target_hidden_size, width, bias=False)
        self.hidden_norm = architecture.norm(width)
        self.layers = nn.ModuleList(BlockLayer(architecture, i) for i in range(architecture.num_layers))
        self.norm = architecture.norm(width)
        self.rotary = architecture.rotary()
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
        self.register_buffer("embedding", embedding, persistent=False)
        self.attend: Attend = plain_attention

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The context stream c: [..., K·H] -> [..., H]."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids].to(self.fc.weight.dtype)

    def block_tokens(self, anchor_tokens: torch.Tensor, block_size: int) -> torch.Tensor:
        """[N] -> ids [N, bs]: the anchor, then MASK."""
        ids = anchor_tokens.new_full((anchor_tokens.shape[0], block_size), self.mask_token_id)
        ids[:, 0] = anchor_tokens
        return ids

    def hidden(self, inputs: BlockInputs) -> torch.Tensor:
        """Final normed states of every slot [N, bs, H]; the target's head reads them."""
        dtype, size = self.fc.weight.dtype, inputs.mask.block_size
        context = self.fuse(inputs.features)
        context_rope = self.rotary(inputs.context_positions, dtype)
        x = self.embed(self.block_tokens(inputs.anchor_tokens, size))
        rope = self.rotary(inputs.anchor_positions.unsqueeze(-1) + torch.arange(size, device=x.device), dtype)
        masks: dict[int | None, PreparedMask] = {}
        for layer in self.layers:
            attention = layer.self_attn
            window = attention.facts.window
            if window not in masks:
                masks[window] = replace(inputs.mask, window=window).prepare(self.attend)
            normed = layer.input_layernorm(x)
            own = (inputs.anchors.pad(t).flatten(1, 2) for t in (attention.queries(normed, rope), *attention.keys_values(normed, rope)))
            q, own_keys, own_values = own
            keys, values = (inputs.context.pad(t) for t in attention.keys_values(context, context_rope))
            o = block_attention(q, keys, values, own_keys, own_values, masks[window], attention.facts.scale, self.attend)
            x = layer.finish(x, inputs.anchors.unpad(o.unflatten(1, (-1, size))))
        return self.norm(x)

    def forward(self, inputs: BlockInputs, on_hidden: Callable[[torch.Tensor], Result]) -> Result:
        """Run the blocks; ``on_hidden`` turns their states [N, bs, H] into a loss inside the module, where its weights are at hand."""
        return on_hidden(self.hidden(inputs))
