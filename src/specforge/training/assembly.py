"""From a frozen configuration to the draft and what stands frozen around it: target facts, vocabulary map, embedding, head."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specforge.config.build import build
from specforge.data.vocabulary_map import VocabularyMap, supervised_counts
from specforge.errors import CheckpointError
from specforge.inference.engine_factory import configured_identity
from specforge.modeling.draft.base import DraftArchitecture
from specforge.modeling.target import TargetHead, load_embedding, load_final_norm
from specforge.modeling.target_facts import TargetFacts
from specforge.modeling.warm_start import warm_start_weights
from specforge.runtime.contracts import TargetIdentity
from specforge.training.checkpoint import Checkpoint
from specforge.training.identity import WEIGHT_FACTS, DraftIdentity
from specforge.training.strategies.base import DraftTrainStrategy

if TYPE_CHECKING:
    from specforge.data.dataset import TokenizedDataset

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """The chosen architecture and strategy and the target they are for. Cheap to make: no weight is read."""

    config: dict[str, Any]
    folder: Path
    facts: TargetFacts
    identity: TargetIdentity
    architecture: DraftArchitecture
    strategy: DraftTrainStrategy

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Parts:
        """Raises :class:`TargetError` or :class:`ConfigError`."""
        folder = Path(config["target"]["resolved_path"])
        plugins = config.get("plugins") or ()
        return cls(
            config=config,
            folder=folder,
            facts=TargetFacts.from_folder(folder),
            identity=configured_identity(config),
            architecture=build(config["draft"], expects=DraftArchitecture, plugins=plugins),  # type: ignore[type-abstract]
            strategy=build(config["strategy"], expects=DraftTrainStrategy, plugins=plugins),  # type: ignore[type-abstract]
        )

    def draft_identity(self, vocabulary: VocabularyMap) -> DraftIdentity:
        """What a checkpoint of this draft belongs to."""
        strategy = {**self.config["strategy"], WEIGHT_FACTS: self.strategy.weight_facts(self.config["strategy"], self.facts)}
        return DraftIdentity.make(
            self.architecture.name,
            self.strategy.name,
            self.architecture.plain_config(),
            strategy,
            self.identity,
            vocabulary_digest(vocabulary),
        )

    def head(self, dtype: torch.dtype, device: torch.device) -> TargetHead:
        return TargetHead.load(self.folder, dtype, device)

    def vocabulary(self, dataset: TokenizedDataset, tell: Tell) -> VocabularyMap:
        """The draft vocabulary of this run: counted over ``dataset``, or that of the published draft it starts from."""
        if (published := published_folder(self.architecture)) is not None:
            from specforge.export.published import read_published

            vocabulary = read_published(published).vocabulary(self.facts.vocab_size)
        else:
            vocabulary = VocabularyMap.count(dataset, self.facts.vocab_size, self.config["strategy"].get("draft_vocab_size"))
        # A published draft's vocabulary was counted elsewhere: its coverage of this data is worth knowing too.
        coverage = vocabulary.coverage if published is None else coverage_of(vocabulary, dataset)
        tell(
            f"draft vocabulary: {vocabulary.draft_vocab_size} of {vocabulary.vocab_size} tokens, "
            f"{100 * coverage:.1f} % of the supervised tokens"
        )
        return vocabulary

    def new_draft(self, vocabulary: VocabularyMap, tell: Tell) -> nn.Module:
        """A draft on the CPU in float32, initialised as ``draft.init_from`` says."""
        embedding = load_embedding(self.folder, torch.float32)
        model = self.strategy.build_model(self.architecture, self.facts, vocabulary, embedding)
        if (published := published_folder(self.architecture)) is not None:
            from specforge.export.published import read_published

            read_published(published).load_into(model, self)
            tell(f"the draft starts from {published}")
        elif weights := warm_start_weights(self.folder, self.facts, self.architecture):
            rows = TargetHead.load(self.folder, torch.float32).weight[vocabulary.target_ids]
            done = self.strategy.warm_start(model, weights, load_final_norm(self.folder), rows)
            tell(f"{len(done)} of {len(list(model.parameters()))} draft tensors start from the target's last layer, norm and head")
        return model

    def load_draft(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The draft of a checkpoint, in eval mode; raises :class:`CheckpointError` when it is not this configuration's draft."""
        weights = checkpoint.weights()
        try:
            vocabulary = VocabularyMap(weights["d2t"], weights["t2d"], 1.0)
        except KeyError as error:
            raise CheckpointError(
                f"{checkpoint.path} holds no vocabulary map ({error}); it is not a draft of strategy {self.strategy.name}."
            ) from None
        checkpoint.require(self.draft_identity(vocabulary))
        model = self.strategy.build_model(self.architecture, self.facts, vocabulary, load_embedding(self.folder, torch.float32))
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(f"checkpoint {checkpoint.path} is of another draft: {error}") from None
        return model.to(dtype).to(device).eval()


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Frozen floating-point buffers (the embedding) in the dtype the draft runs in; parameters keep theirs until masters are made."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return model


def coverage_of(vocabulary: VocabularyMap, dataset: TokenizedDataset) -> float:
    """Share of the dataset's supervised tokens that the draft knows."""
    counts = torch.from_numpy(supervised_counts(dataset, vocabulary.vocab_size))
    return float(counts[vocabulary.t2d].sum() / counts.sum().clamp(min=1))


def vocabulary_digest(vocabulary: VocabularyMap) -> str:
    """Digest of which target tokens the draft knows."""
    return hashlib.blake2b(vocabulary.d2t.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def published_folder(architecture: DraftArchitecture) -> Path | None:
    """The folder that ``draft.init_from`` names, if it is neither ``random`` nor ``target``."""
    start = getattr(architecture, "init_from", "random")
    if start in ("random", "target"):
        return None
    architecture.check_paths()
    return Path(start).expanduser()
