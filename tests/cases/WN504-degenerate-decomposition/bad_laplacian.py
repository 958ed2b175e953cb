"""Learned graphs cut by the eigenvectors of their Laplacian: once every edge is pruned, all eigenvalues are 0."""
import torch
from torch import nn


class LearnedGraph(nn.Module):
    """Edge weights from node features; weak edges are pruned by a threshold."""

    def __init__(self, features=4, threshold=0.0):
        super().__init__()
        self.key = nn.Linear(features, 8)
        self.threshold = threshold

    def forward(self, x):
        k = self.key(x)
        similarity = torch.sigmoid(k @ k.T)
        weight = similarity * (similarity > self.threshold)
        return weight - torch.diag(weight.diagonal())


def fiedler_cut(adjacency):
    laplacian = torch.diag(adjacency.sum(dim=1)) - adjacency
    _, vectors = torch.linalg.eigh(laplacian)  # <- WN504 backward
    return vectors[:, 1]


def two_communities(n=10):
    side = torch.arange(n) % 2
    x = torch.randn(n, 4) + 2.0 * (2 * side - 1).unsqueeze(1)
    return x, 2.0 * side - 1.0


def main():
    torch.manual_seed(140)
    graph = LearnedGraph()
    opt = torch.optim.SGD(graph.parameters(), lr=0.02)
    for step in range(20):
        graph.threshold = 0.05 * step  # pruning schedule, 0 .. 0.95
        x, side = two_communities()
        x = x * (0.1 + 0.9 * torch.rand(()))
        cut = fiedler_cut(graph(x))
        agreement = (cut @ side).square() / len(side)
        loss = 1.0 - agreement
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(graph.parameters(), 1.0)
        if torch.isfinite(norm):
            opt.step()
        print(f"step {step:2d} threshold {graph.threshold:.2f} loss {loss.item():.4f} norm {norm.item():.3f}")


main()
