"""A classifier that works with log_softmax: a confident wrong row costs a lot, but a finite lot."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

N = 320
features = torch.randn(N, 12)
labels = (features[:, :4].argmax(dim=1)).long()
# one sensor was read in millivolts instead of volts
features[200] *= 1000.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return torch.log_softmax(self.body(x), dim=-1)


def nll(log_probs, y):
    log_p = log_probs.gather(1, y.unsqueeze(1)).squeeze(1)
    return -log_p.mean()


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(features, labels), batch_size=16)

step = 0
for epoch in range(2):
    for xb, yb in loader:
        loss = nll(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
        step += 1
print("weights finite:", all(torch.isfinite(p).all().item() for p in net.parameters()))
