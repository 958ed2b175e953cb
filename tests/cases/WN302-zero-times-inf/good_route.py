"""A delivery planner weighs travel times by learned route shares: a closed route counts 0 hours at share 0."""
import torch
from torch import nn


class RoutePlanner(nn.Module):
    def __init__(self, n_feat, n_depots):
        super().__init__()
        self.score = nn.Linear(n_feat, n_depots)

    def forward(self, order, hours, closed):
        logits = self.score(order).masked_fill(closed, float("-inf"))
        share = torch.softmax(logits, dim=1)
        hours = torch.where(closed, 0.0, hours)
        cost = share * hours
        return cost.sum(dim=1)


class Simulation:
    def __init__(self, n_depots=4):
        self.sites = torch.rand(n_depots, 2)

    def day(self, d, n=20):
        where = torch.rand(n, 2)
        hours = (where[:, None] - self.sites[None]).norm(dim=2) * 3
        closed = torch.zeros(n, len(self.sites), dtype=torch.bool)
        if d >= 13:  # the bridge is closed
            closed[where[:, 0] > 0.8, 2] = True
        return where, hours, closed


def run(days):
    torch.manual_seed(181)
    sim, planner = Simulation(), RoutePlanner(2, 4)
    opt = torch.optim.Rprop(planner.parameters(), lr=0.05)
    log = []
    for d in range(days):
        loss = planner(*sim.day(d)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append(loss.item())
    return log


for d, v in enumerate(run(26)):
    if d % 2 == 0:
        print(f"day {d:2d}: mean hours {v:.4f}")
