"""House prices with a log-cosh loss written by hand: an outlier's residual is above 89 and cosh overflows."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LogCosh(nn.Module):
    def forward(self, pred, target):
        r = pred - target
        c = torch.cosh(r)  # <- WN201 forward
        return torch.log(c).mean()


torch.manual_seed(89)
rooms = torch.randint(1, 8, (300, 1)).float()
area = 20 * rooms + 10 * torch.randn(300, 1)
x = torch.cat([rooms, area / 100], 1)
price = 1.5 * rooms.squeeze() + area.squeeze() / 30 + 0.3 * torch.randn(300)
price[190] = 240.0  # a castle
ds = TensorDataset(x, price)

model = nn.Sequential(nn.Linear(2, 16), nn.ELU(), nn.Linear(16, 1), nn.Flatten(0))
criterion = LogCosh()
opt = torch.optim.Adamax(model.parameters(), lr=0.02)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.05, total_steps=60)
it = 0
for epoch in range(2):
    for xb, yb in DataLoader(ds, batch_size=10):
        opt.zero_grad()
        loss = criterion(model(xb), yb)
        loss.backward()
        opt.step()
        sched.step()
        if it % 6 == 0:
            print(f"it {it} loss {loss.item():.4f} lr {opt.param_groups[0]['lr']:.4f}")
        it += 1
