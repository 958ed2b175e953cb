"""A graph network with symmetric normalisation: an isolated node has degree 0, and 0 to the power -1/2 is infinite."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def random_graph(n_nodes, p, isolate=None):
    upper = torch.triu((torch.rand(n_nodes, n_nodes) < p).float(), diagonal=1)
    # a ring underneath, so that everybody has neighbours
    ring = torch.roll(torch.eye(n_nodes), 1, dims=1)
    adj = ((upper + upper.T + ring + ring.T) > 0).float()
    adj.fill_diagonal_(0)
    if isolate is not None:
        adj[isolate, :] = 0
        adj[:, isolate] = 0
    return adj


class GCNLayer(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin = nn.Linear(d_in, d_out)

    def forward(self, x, adj):
        deg = adj.sum(dim=1)
        d_inv_sqrt = deg.pow(-0.5)  # <- WN106 forward
        a_hat = d_inv_sqrt[:, None] * adj * d_inv_sqrt[None, :]
        return a_hat @ self.lin(x)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = GCNLayer(6, 16), GCNLayer(16, 3)

    def forward(self, x, adj):
        return self.l2(F.relu(self.l1(x, adj)), adj)


def main():
    torch.manual_seed(31)
    model = GCN()
    opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for g in range(30):
        adj = random_graph(20, 0.1, isolate=7 if g == 16 else None)
        x = torch.randn(20, 6)
        y = (adj @ x)[:, :3].argmax(1)
        loss = F.cross_entropy(model(x, adj), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if g % 4 == 0:
            print(f"graph {g}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
