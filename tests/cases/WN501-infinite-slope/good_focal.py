"""Focal loss with gamma 0.5: 1 - p by expm1 and a small shift keep the slope finite at p = 1."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class FocalLoss(nn.Module):
    def __init__(self, gamma=0.5):
        super().__init__()
        self.gamma = gamma

    def forward(self, logits, target):
        log_p = F.log_softmax(logits, dim=1).gather(1, target.unsqueeze(1)).squeeze(1)
        miss = -torch.expm1(log_p) + 1e-6
        focus = miss ** self.gamma
        return (focus * -log_p).mean()


def blobs(n=480):
    g = torch.Generator().manual_seed(80)
    y = torch.randint(0, 3, (n,), generator=g)
    centre = torch.tensor([[4.0, 0.0, 1.0], [-2.0, 3.5, 0.0], [-2.0, -3.5, -1.0]])
    return TensorDataset(centre[y] + torch.randn(n, 3, generator=g), y)


def main():
    torch.manual_seed(81)
    loader = DataLoader(blobs(), batch_size=40, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 3))
    criterion = FocalLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for epoch in range(5):
        right = 0
        for x, y in loader:
            logits = model(x)
            loss = criterion(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += (logits.argmax(1) == y).sum().item()
        print(f"epoch {epoch}  last loss {loss.item():.5f}  accuracy {right / 480:.3f}")


main()
