"""CTC over the columns of the picture, and the share of characters that are read wrongly."""

import torch
import torch.nn.functional as F

from data import BLANK


def ctc(logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    chances = logits.float().log_softmax(-1).transpose(0, 1)
    columns = torch.full((logits.shape[0],), logits.shape[1])
    return F.ctc_loss(chances, targets, columns, lengths, blank=BLANK, zero_infinity=True)


def read(logits: torch.Tensor) -> list[list[int]]:
    best = [torch.unique_consecutive(row).tolist() for row in logits.argmax(-1)]
    return [[letter for letter in row if letter != BLANK] for row in best]


def wrong(logits: torch.Tensor, targets: torch.Tensor, lengths: torch.Tensor) -> float:
    """Return the edit distance to the plates, over the number of their characters."""
    plates = [t.tolist() for t in targets.split(lengths.tolist())]
    return sum(distance(a, b) for a, b in zip(read(logits), plates)) / int(lengths.sum())


def distance(a: list[int], b: list[int]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]
