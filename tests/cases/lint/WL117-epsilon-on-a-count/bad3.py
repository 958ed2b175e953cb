import torch

EPS = 1e-12


def accuracy_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    keep = labels != -100
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return torch.div(loss, EPS + keep.sum())  # expect: WL117
