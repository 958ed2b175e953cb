"""Stochastic weight averaging with a cyclic rate; update_bn recomputes the running statistics at the end."""
import hashlib

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(113)
x = torch.randn(128, 7)
y = (x[:, 0].abs() + x[:, 1] > 1).float()
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(3))

model = nn.Sequential(nn.Linear(7, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
swa_model = AveragedModel(model)
swa_scheduler = SWALR(optimizer, swa_lr=0.03, anneal_epochs=2)
for epoch in range(10):
    model.train()
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(xb), yb)
        loss.backward()
        optimizer.step()
    if epoch >= 5:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    model.eval()
    with torch.no_grad():
        accuracy = ((model(x) > 0) == y.bool()).float().mean()
    if epoch % 3 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy.item():.3f}")

update_bn(((xb,) for xb, _ in loader), swa_model)
swa_model.eval()
with torch.no_grad():
    print("averaged model accuracy", ((swa_model(x) > 0) == y.bool()).float().mean().item())

h = hashlib.sha256()
for tensor in [*model.state_dict().values(), *swa_model.state_dict().values()]:
    h.update(tensor.numpy().tobytes())
for p in model.parameters():
    h.update(optimizer.state[p]["momentum_buffer"].numpy().tobytes())
print("digest", h.hexdigest())
