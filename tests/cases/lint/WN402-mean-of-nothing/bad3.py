import torch


def pooled(hidden, attention_mask):
    count = attention_mask.sum(dim=1, keepdim=True)
    return (hidden * attention_mask[..., None]).sum(1) / count  # expect: WN402
