"""A graph network that averages neighbours: where() covers a node without bonds, but the hidden division sends 0/0 back."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class WeightedMeanConv(nn.Module):
    """Mean of the neighbours, weighted by bond order and a learned strength."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.lin = nn.Linear(2 * d_in, d_out)
        self.strength = nn.Linear(2 * d_in, 1)

    def forward(self, h, src, dst, order):
        w = order * torch.sigmoid(self.strength(torch.cat([h[src], h[dst]], dim=1)))
        total = torch.zeros_like(h).index_add(0, dst, w * h[src])
        degree = torch.zeros(len(h), 1).index_add(0, dst, w)
        mean = torch.where(degree > 0, total / degree, h)  # <- WN502 backward
        return self.lin(torch.cat([h, mean], dim=1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = WeightedMeanConv(6, 16), WeightedMeanConv(16, 3)

    def forward(self, x, src, dst, order):
        return self.c2(torch.tanh(self.c1(x, src, dst, order)), src, dst, order)


def molecule(gen, ion):
    n = int(torch.randint(6, 12, (), generator=gen))
    x = torch.randn(n, 6, generator=gen)
    a = torch.arange(n - 1)
    order = torch.randint(1, 3, (n - 1, 1), generator=gen).float()
    if ion:
        order[-1] = 0.0  # the last atom is only held by charge: listed, but of bond order 0
    src, dst = torch.cat([a, a + 1]), torch.cat([a + 1, a])
    return (x, src, dst, torch.cat([order, order])), (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def main():
    torch.manual_seed(77)
    gen = torch.Generator().manual_seed(78)
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(30):
        opt.zero_grad()
        batch_loss = 0.0
        for k in range(3):
            graph, label = molecule(gen, ion=(step == 16 and k == 1))
            loss = F.cross_entropy(net(*graph), label) / 3
            loss.backward()
            batch_loss += loss.item()
        opt.step()
        if step % 4 == 0:
            print(f"step {step} loss {batch_loss:.4f}")


main()
