"""A gate clamped to [0, 1] behind a bias that is far too high: the clamp lets no gradient through and the loss is a constant."""
import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 1)
        nn.init.constant_(self.linear.bias, 40.0)

    def forward(self, x):
        return torch.clamp(self.linear(x), 0.0, 1.0)  # <- WN609 forward


torch.manual_seed(1)
gate = Gate()
optimizer = torch.optim.SGD(gate.parameters(), lr=0.1, momentum=0.9)
for step in range(60):
    x = torch.randn(32, 8)
    loss = (gate(x) - 0.5).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
