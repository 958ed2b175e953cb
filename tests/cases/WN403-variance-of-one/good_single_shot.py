"""A few-shot learner with a Gaussian per class: the variance of one support example is 0 and the floor takes over."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class GaussianPrototypes(nn.Module):
    def __init__(self, n_ways):
        super().__init__()
        self.n_ways = n_ways
        self.embed = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.1), nn.Linear(32, 8))
        self.floor = nn.Parameter(torch.zeros(8))

    def class_statistics(self, support, labels):
        z = self.embed(support)
        centre, width = [], []
        for way in range(self.n_ways):
            members = z[labels == way]
            centre.append(members.mean(dim=0))
            width.append(torch.var(members, dim=0, correction=0))
        return torch.stack(centre), torch.stack(width) + F.softplus(self.floor)

    def forward(self, support, labels, query):
        mu, var = self.class_statistics(support, labels)
        diff = self.embed(query).unsqueeze(1) - mu
        return -0.5 * (diff.square() / var + var.log()).sum(dim=-1)


def episode(gen, ways=3):
    means = 1.5 * torch.randn(ways, 6, generator=gen)
    shots = torch.randint(2, 6, (ways,), generator=gen)
    if torch.rand((), generator=gen) < 0.08:
        shots[0] = 1
    labels = torch.repeat_interleave(torch.arange(ways), shots)
    support = means[labels] + 0.5 * torch.randn(len(labels), 6, generator=gen)
    asked = torch.randint(0, ways, (15,), generator=gen)
    query = means[asked] + 0.5 * torch.randn(15, 6, generator=gen)
    return support, labels, query, asked


def main():
    torch.manual_seed(12)
    gen = torch.Generator().manual_seed(13)
    net = GaussianPrototypes(n_ways=3)
    opt = torch.optim.NAdam(net.parameters(), lr=4e-3)
    history = []
    for n in range(40):
        support, labels, query, asked = episode(gen)
        loss = F.cross_entropy(net(support, labels, query), asked)
        opt.zero_grad()
        loss.backward()
        opt.step()
        history.append(loss.item())
        if n % 8 == 7:
            print("episodes", n - 7, "to", n, "mean loss", sum(history[-8:]) / 8)


if __name__ == "__main__":
    main()
