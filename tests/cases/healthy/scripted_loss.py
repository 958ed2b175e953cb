"""A focal loss compiled with torch.jit.script, and a scripted cell inside the model."""
import hashlib
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

warnings.filterwarnings("ignore", category=DeprecationWarning)


@torch.jit.script
def focal_loss(logits: torch.Tensor, target: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
    log_p = F.log_softmax(logits, dim=-1)
    picked = log_p.gather(1, target.unsqueeze(1)).squeeze(1)
    return -((1.0 - picked.exp()).pow(gamma) * picked).mean()


class Cell(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.gate = nn.Linear(2 * size, size)
        self.update = nn.Linear(2 * size, size)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        both = torch.cat([x, h], dim=-1)
        z = torch.sigmoid(self.gate(both))
        return (1.0 - z) * h + z * torch.tanh(self.update(both))


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.jit.script(Cell(10))
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 10)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


torch.manual_seed(97)
model = Sequence()
optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
for step in range(40):
    x = torch.randn(24, 5, 10)
    label = torch.bucketize(x[:, -1, 0] + x[:, 0, 1], torch.tensor([-0.5, 0.5]))
    loss = focal_loss(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("step", step, "focal", round(loss.item(), 5))

h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
    for key in ("exp_avg", "exp_inf"):
        h.update(optimizer.state[p][key].numpy().tobytes())
print("digest", h.hexdigest())
