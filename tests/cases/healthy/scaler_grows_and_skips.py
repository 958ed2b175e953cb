"""A gradient scaler that grows every few steps: now and then it is one doubling too far, skips one step and halves."""
import hashlib

import torch
from torch import nn

torch.manual_seed(131)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5, padding=2)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean(-1)).squeeze(-1)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
skips = []
for step in range(48):
    x = torch.randn(16, 1, 20).cumsum(-1) / 4
    y = x[:, 0].std(-1)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(x)
    loss = (out.float() - y).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    old = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() < old:
        skips.append(step)
    if step % 12 == 0:
        print(f"step {step} loss {loss.item():.4f} scale {old:.0f}")

print("skipped steps", skips)
assert 1 <= len(skips) < 16
sha = hashlib.sha256(repr(scaler.state_dict()).encode())
for p in net.parameters():
    sha.update(p.detach().numpy().tobytes() + optimizer.state[p]["momentum_buffer"].numpy().tobytes())
print("digest", sha.hexdigest())
