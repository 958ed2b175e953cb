"""Attention pooling with softmax written by hand: exp of a large score over a sum of the same is inf / inf."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Bags(Dataset):
    """multiple-instance learning: a bag of 12 instances, one label"""

    def __len__(self):
        return 200

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        bag = torch.randn(12, 5, generator=g)
        label = float(i % 2)
        bag[0, 0] += 3 * label
        if i == 123:
            bag[4] *= 400.0  # a saturated instance
        return bag, torch.tensor(label)


class AttentionPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(5, 1)
        nn.init.constant_(self.score.weight, 0.3)
        self.clf = nn.Linear(5, 1)

    def forward(self, bag):
        s = self.score(bag)
        w = torch.exp(s) / torch.exp(s).sum(dim=1, keepdim=True)  # <- WN303 forward
        return self.clf((w * bag.clamp(-5, 5)).sum(dim=1)).squeeze(-1)


torch.manual_seed(193)
pool = AttentionPool()
opt = torch.optim.Adam(pool.parameters(), lr=0.02)
bce = nn.BCEWithLogitsLoss()
for b, (bags, labels) in enumerate(DataLoader(Bags(), batch_size=8)):
    loss = bce(pool(bags), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"batch {b:2d} loss {loss.item():.4f}")
