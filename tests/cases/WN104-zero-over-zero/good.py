"""Metric learning with hand-written cosine similarity: the norm has a floor, a blank image embeds to zero."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, n=240):
        g = torch.Generator().manual_seed(0)
        self.images = torch.rand(n, 1, 10, 10, generator=g)
        self.labels = torch.arange(n) % 3
        for i in range(n):
            r = 3 * int(self.labels[i])
            self.images[i, 0, r:r + 3] += 1.0
        self.images[150] = 0.0  # a blank scan

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, bias=False)
        self.fc = nn.Linear(8 * 8 * 8, 16, bias=False)

    def forward(self, img):
        h = self.conv(img).relu().flatten(1)
        e = self.fc(h).relu()
        length = e.pow(2).sum(dim=1, keepdim=True).detach().sqrt()
        return e / length.clamp_min(1e-6)


def contrastive(e, y, margin=0.5):
    sim = e @ e.t()
    same = (y[:, None] == y[None, :]).float()
    pull = (1 - sim) * same
    push = torch.relu(sim - margin) * (1 - same)
    return (pull + push).mean()


torch.manual_seed(0)
net = Embedder()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
for i, (img, y) in enumerate(DataLoader(Digits(), batch_size=12)):
    loss = contrastive(net(img), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("batch", i, "loss", f"{loss.item():.4f}")
