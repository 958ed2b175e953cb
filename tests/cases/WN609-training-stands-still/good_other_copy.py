"""Fine-tuning a copy: the optimizer was made from the original's parameters, so nothing that is trained ever moves."""
import copy

import torch
from torch import nn

torch.manual_seed(2)
pretrained = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 2))
model = copy.deepcopy(pretrained)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(60):
    x = torch.randn(16, 6)
    y = (x.sum(1) > 0).long()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    model.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
