"""Pointwise mutual information between the clusters that student and teacher give to an image and its neighbour."""

import torch
from torch import nn


def pmi(student: torch.Tensor, teacher: torch.Tensor, prior: torch.Tensor, beta: float, temperatures: tuple[float, float]) -> torch.Tensor:
    """Return log sum_k (p1 p2)^beta / prior for every pair."""
    p1 = torch.softmax(student / temperatures[0], dim=-1)
    p2 = torch.softmax(teacher / temperatures[1], dim=-1)
    return torch.logsumexp(beta * (torch.log_softmax(student / temperatures[0], dim=-1) + torch.log_softmax(teacher / temperatures[1], dim=-1)) - torch.log(prior), dim=-1)


def clamped_pmi(student: torch.Tensor, teacher: torch.Tensor, prior: torch.Tensor, beta: float, temperatures: tuple[float, float]) -> torch.Tensor:
    """The same, with the fix that was used at first."""
    p1 = torch.softmax(student / temperatures[0], dim=-1)
    p2 = torch.softmax(teacher / temperatures[1], dim=-1)
    return torch.log(((p1 * p2).clamp(min=1e-8) ** beta / prior).sum(dim=-1))


class ClusteringLoss(nn.Module):
    """Sum over heads; the prior of every cluster is a moving average of the teacher, a steady head weighs more."""

    def __init__(self, heads: int, clusters: int, beta: float, temperatures: tuple[float, float], old_fix: bool, momentum: float = 0.9):
        super().__init__()
        self.beta, self.temperatures, self.momentum = beta, temperatures, momentum
        self.pmi = clamped_pmi if old_fix else pmi
        self.skip_bad = old_fix
        self.register_buffer("prior", torch.full((heads, clusters), 1 / clusters))
        self.register_buffer("weight", torch.ones(heads))

    def forward(self, student: list[torch.Tensor], teacher: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), requires_grad=True)
        weights = self.weight / self.weight.sum()
        for index, (s, t) in enumerate(zip(student, teacher)):
            prior = self.update(index, t)
            here, there = s.chunk(2)
            teacher_here, teacher_there = t.chunk(2)
            value = -0.5 * (
                self.pmi(here, teacher_there, prior, self.beta, self.temperatures).mean()
                + self.pmi(there, teacher_here, prior, self.beta, self.temperatures).mean()
            )
            if self.skip_bad and not torch.isfinite(value):
                continue
            total = total + weights[index] * value
        return total

    @torch.no_grad()
    def update(self, index: int, teacher: torch.Tensor) -> torch.Tensor:
        chances = torch.softmax(teacher / self.temperatures[1], dim=-1)
        self.prior[index].lerp_(chances.mean(0), 1 - self.momentum)
        self.weight[index].lerp_(chances.amax(-1).mean(), 1 - self.momentum)
        return self.prior[index].clone()
