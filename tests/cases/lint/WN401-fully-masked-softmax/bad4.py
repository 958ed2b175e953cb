import torch


def attend(scores: torch.Tensor, extra: torch.Tensor, key_padding_mask: torch.Tensor):
    scores = scores.masked_fill(key_padding_mask, float("-inf"))
    extra = extra.masked_fill(key_padding_mask, float("-inf"))
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)  # expect: WN401
