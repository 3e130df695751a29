"""A coloured view of one tokenized sample: which tokens are supervised, where tokens begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specforge.data.dataset import TokenizedSample

if TYPE_CHECKING:
    from rich.text import Text

_SUPERVISED = ("black on bright_green", "black on green3")
_CONTEXT = ("grey62", "grey46")


def token_pieces(tokenizer: Any, ids: Sequence[int], mask: Sequence[bool]) -> list[tuple[str, bool, int]]:
    """(text, supervised, number of tokens) of each printable piece; tokens that are parts of one character stay together."""
    pieces: list[tuple[str, bool, int]] = []
    first = 0
    for i in range(len(ids)):
        text = tokenizer.decode(list(ids[first : i + 1]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        border = i + 1 == len(ids) or bool(mask[i + 1]) != bool(mask[i])
        # An unfinished character decodes to U+FFFD; four bytes is the longest.
        if text.endswith("\ufffd") and i - first < 3 and not border:
            continue
        pieces.append((text, bool(mask[i]), i + 1 - first))
        first = i + 1
    return pieces


def sample_text(tokenizer: Any, sample: TokenizedSample) -> Text:
    """The sample as rich text. Brackets ⟦ ⟧ hold what is supervised, so that it can be read without colours too."""
    from rich.text import Text

    out = Text(overflow="fold")
    inside = False
    for number, (piece, supervised, _) in enumerate(token_pieces(tokenizer, sample.input_ids.tolist(), sample.loss_mask.tolist())):
        if supervised != inside:
            out.append("⟦" if supervised else "⟧", style="bold magenta")
            inside = supervised
        elif number:
            out.append("·", style="grey35")
        style = (_SUPERVISED if supervised else _CONTEXT)[number % 2]
        # A line break is shown and made, after its token, so that the layout of the conversation stays visible.
        out.append(piece.replace("\n", "↵").replace("\t", "⇥"), style=style)
        out.append("\n" * piece.count("\n"))
    if inside:
        out.append("⟧", style="bold magenta")
    return out


def legend() -> Text:
    """What colours and signs mean."""
    from rich.text import Text

    out = Text()
    out.append("⟦supervised⟧", style=_SUPERVISED[0])
    out.append(" the target generates it, the draft learns it   ")
    out.append("context", style=_CONTEXT[0])
    out.append(" read only   ")
    out.append("·", style="bold")
    out.append(" token border   ↵ line break")
    return out


def sample_heading(sample: TokenizedSample, index: int, source: str) -> str:
    """One line: where the sample is from and how much of it is supervised."""
    total, supervised = len(sample.input_ids), int(sample.loss_mask.sum())
    where = f"sample {index}  id {sample.sample_id}  {source}:{sample.line}"
    return f"{where}  {total} tokens, {supervised} supervised ({supervised / total:.0%})"
