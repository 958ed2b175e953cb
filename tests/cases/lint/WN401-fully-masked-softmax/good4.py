import torch


def attend(scores: torch.Tensor, own: torch.Tensor, key_padding_mask: torch.Tensor):
    scores = scores.masked_fill(key_padding_mask, float("-inf"))
    return torch.softmax(torch.cat([scores, own], dim=-1), dim=-1)
