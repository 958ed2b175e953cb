"""Student and teacher: many linear heads over the same embedding; the teacher follows the student slowly."""

import copy

import torch
from torch import nn


class Heads(nn.Module):
    """Every head is a clustering of its own."""

    def __init__(self, heads: int, dim: int, clusters: int):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(dim, clusters, bias=False) for _ in range(heads))
        for head in self.heads:
            nn.init.normal_(head.weight, std=0.1)

    def forward(self, features: torch.Tensor) -> list[torch.Tensor]:
        return [head(features) for head in self.heads]


class Pair(nn.Module):
    def __init__(self, heads: int, dim: int, clusters: int, momentum: float = 0.97):
        super().__init__()
        self.student = Heads(heads, dim, clusters)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.momentum = momentum

    @torch.no_grad()
    def follow(self) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.student.parameters()):
            slow.lerp_(fast, 1 - self.momentum)

    @torch.no_grad()
    def clusters(self, features: torch.Tensor) -> list[torch.Tensor]:
        return [logits.argmax(-1) for logits in self.teacher(features)]
