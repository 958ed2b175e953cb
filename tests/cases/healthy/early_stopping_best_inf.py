"""Early stopping with best_loss = inf, a buffer that remembers the best score from inf on, and ReduceLROnPlateau."""
import hashlib
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        self.register_buffer("best_seen", torch.tensor(math.inf))

    def forward(self, x):
        return self.layers(x).squeeze(-1)


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        total = sum(nn.functional.mse_loss(model(x), y, reduction="sum") for x, y in loader)
    model.train()
    return total / len(loader.dataset)


def main():
    torch.manual_seed(31)
    x = torch.randn(160, 6)
    y = x[:, 0] * x[:, 1] + x[:, 2].abs() + 0.1 * torch.randn(160)
    train_set, valid_set = random_split(TensorDataset(x, y), [128, 32])
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=32)
    model = Regressor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.3)
    best_loss, patience = float("inf"), 4
    for epoch in range(12):
        for xb, yb in train_loader:
            loss = nn.functional.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        score = evaluate(model, valid_loader)
        scheduler.step(score)
        print(f"epoch {epoch} valid {score:.4f} best so far {best_loss:.4f} lr {optimizer.param_groups[0]['lr']:.4f}")
        if score < model.best_seen:
            model.best_seen.copy_(score)
            best_loss, patience = score.item(), 4
        else:
            patience -= 1
            if patience == 0:
                break

    sha = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha.update(tensor.numpy().tobytes())
    for group in optimizer.state_dict()["state"].values():
        for key in sorted(group):
            sha.update(group[key].numpy().tobytes())
    print("digest", sha.hexdigest())


if __name__ == "__main__":
    main()
