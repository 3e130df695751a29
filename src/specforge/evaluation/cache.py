"""Features of the held-out set, captured once a run and kept as ready batches (an evaluation then costs no target forward)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specforge.data.packing import pack
from specforge.distributed.groups import Group
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.collate import collate

if TYPE_CHECKING:
    from specforge.data.dataset import TokenizedDataset
    from specforge.topology.base import RefSource


def held_out_batches(dataset: TokenizedDataset, source: RefSource, batch_tokens: int, group: Group) -> list[TrainBatch]:
    """This rank's share of ``dataset`` (every world_size-th sample) in batches of one row and about ``batch_tokens`` tokens.

    A rank without a sample gets no batch; the metrics are summed over ranks. Batches lie where the store's features lie.
    """
    tasks = [dataset[i] for i in range(group.rank, len(dataset), group.world_size)]
    batches = []
    for row in pack([len(task.input_ids) for task in tasks], max(batch_tokens, max((len(t.input_ids) for t in tasks), default=1))):
        chosen = [tasks[i] for i in row]
        samples = [(ref.sample_id, source.store.get(ref)) for ref in source.take(chosen)]
        batches.append(collate(samples, [list(range(len(samples)))], source.layout, epoch=0))
        source.acknowledge([sample_id for sample_id, _ in samples], step=0)
    return batches
