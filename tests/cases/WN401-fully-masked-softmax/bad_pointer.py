"""A pointer network that plans deliveries: when no open stop fits into the van, log_softmax sees only -inf."""
import torch
from torch import nn

torch.manual_seed(11)
STOPS, CAPACITY = 6, 10


class Pointer(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.encode = nn.LSTM(3, hidden, batch_first=True)
        self.cell = nn.LSTMCell(3, hidden)
        self.w_ref = nn.Linear(hidden, hidden, bias=False)
        self.w_query = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Parameter(torch.randn(hidden) / hidden ** 0.5)

    def forward(self, stops, order):
        memory, (h, c) = self.encode(stops)
        h, c = h[0], c[0]
        refs = self.w_ref(memory)
        load = stops[..., 2] * CAPACITY
        room = torch.full((len(stops),), float(CAPACITY))
        visited = torch.zeros(len(stops), STOPS, dtype=torch.bool)
        last = torch.zeros(len(stops), 3)
        log_prob = 0.0
        for t in range(order.shape[1]):
            h, c = self.cell(last, (h, c))
            u = torch.tanh(refs + self.w_query(h).unsqueeze(1)) @ self.v
            blocked = visited | (load > room.unsqueeze(1) + 1e-3)
            u = u.masked_fill(blocked, -float("inf"))
            step_log_prob = torch.log_softmax(u, dim=1)  # <- WN401 forward
            pick = order[:, t : t + 1]
            log_prob = log_prob + step_log_prob.gather(1, pick).squeeze(1)
            room = room - load.gather(1, pick).squeeze(1)
            visited = visited.scatter(1, pick, True)
            last = stops[torch.arange(len(stops)), pick.squeeze(1)]
        return log_prob


def planner_tours(n, gen, heavy):
    """Expert tours, nearest stop first; four stops are served in every tour."""
    xy = torch.rand(n, STOPS, 2, generator=gen)
    load = torch.randint(1, 3, (n, STOPS), generator=gen)
    if heavy:
        load[n // 2] = 4  # furniture day: three stops already overfill the van
    stops = torch.cat([xy, load[..., None] / CAPACITY], dim=-1)
    return stops, xy.norm(dim=-1).argsort(dim=1)[:, :4]


gen = torch.Generator().manual_seed(2)
net = Pointer()
opt = torch.optim.RMSprop(net.parameters(), lr=3e-3)
for it in range(14):
    stops, order = planner_tours(12, gen, heavy=(it == 7))
    nll = -net(stops, order).mean()
    opt.zero_grad()
    nll.backward()
    nn.utils.clip_grad_value_(net.parameters(), 1.0)
    opt.step()
    print("iteration", it, "nll", f"{nll.item():.4f}")
