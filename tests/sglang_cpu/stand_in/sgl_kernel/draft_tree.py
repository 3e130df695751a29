"""Trees of drafted tokens: building one from the chosen candidates, and walking it along the target's own choices."""

from __future__ import annotations

from torch import Tensor

# The two shapes of the mask that the CPU path asks for; the third one packs bits.
_FULL_MASK, _NEW_TOKENS_ONLY = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    mask_mode: int,
) -> None:
    """Fill mask, positions and links of each request's tree of ``num_nodes`` nodes.

    Node 0 is the root, the last verified token; node i is candidate ``selected_index[b, i - 1]``. Candidate c hangs on the root if
    ``c // topk`` is 0, else on candidate ``parent_list[b, c // topk]``. A node sees itself and its ancestors. ``next_token`` is its
    first child, ``next_sibling`` the next child of its parent (both [B, N], filled with -1 before).
    """
    if int(mask_mode) not in (_FULL_MASK, _NEW_TOKENS_ONLY):
        raise NotImplementedError(f"tree mask mode {mask_mode}")
    row_start = 0
    for b, length in enumerate(seq_lens.tolist()):
        parents = _parents(selected_index[b].tolist(), parent_list[b].tolist() if parent_list.numel() else [], topk)
        lead = length if int(mask_mode) == _FULL_MASK else 0
        for node in range(num_nodes):
            visible = _with_ancestors(node, parents)
            row = tree_mask[row_start + lead : row_start + lead + num_nodes]
            row[:] = False
            row[visible] = True
            row_start += lead + num_nodes
            positions[b * num_nodes + node] = length + len(visible) - 1
            retrieve_index[b, node] = b * num_nodes + node
        for node in range(num_nodes - 1, 0, -1):  # backwards, so that the lowest child is met last and comes first
            if (parent := parents[node]) >= 0:
                next_sibling[b, node] = next_token[b, parent]
                next_token[b, parent] = node


def _parents(chosen: list[int], parent_list: list[int], topk: int) -> list[int]:
    """Parent of each node; -1 for one whose parent was not chosen (equal scores can do that). Such a node is never reached."""
    node_of = {candidate: i + 1 for i, candidate in enumerate(chosen)}
    groups = [candidate // topk for candidate in chosen]
    return [0, *(node_of.get(parent_list[group], -1) if group else 0 for group in groups)]


def _with_ancestors(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while path[-1] > 0:
        path.append(max(0, parents[path[-1]]))
    return path


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each tree from its root to the child that equals the target's argmax, as long as there is one.

    ``accept_index`` [B, S + 1] gets the nodes walked over, ``predicts`` the target's token after each of them, ``accept_token_num`` [B] the
    number of drafts among them.
    """
    best = target_predict.reshape(-1).tolist()
    indices, children, siblings = (t.tolist() for t in (retrive_index, retrive_next_token, retrive_next_sibling))
    for b, tokens in enumerate(candidates.tolist()):
        path = [indices[b][0]]
        node = 0
        while len(path) < accept_index.shape[1]:
            node = children[b][node]
            while node != -1 and tokens[node] != best[path[-1]]:
                node = siblings[b][node]
            if node == -1:
                break
            path.append(indices[b][node])
        for place, index in enumerate(path):
            accept_index[b, place] = index
            predicts[index] = best[index]
        accept_token_num[b] = len(path) - 1
