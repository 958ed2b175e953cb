"""A float32 click predictor clamps to [1e-6, 1 - 1e-6], which float32 can tell from 0 and 1."""
import torch
import torch.nn as nn

EPS = 1e-6


class Predictor(nn.Module):
    def __init__(self, n_fields=6, card=20, k=4):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(card, k) for _ in range(n_fields))
        self.mlp = nn.Sequential(nn.Linear(n_fields * k + 1, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, cats, price):
        e = torch.cat([t(cats[:, i]) for i, t in enumerate(self.tables)] + [price[:, None]], dim=1)
        return torch.sigmoid(self.mlp(e)).squeeze(1)


class LogLoss(nn.Module):
    def forward(self, p, y):
        hit = torch.log(p.clamp(min=EPS))
        miss = torch.log(1 - p.clamp(EPS, 1 - EPS))
        return -torch.where(y > 0.5, hit, miss).mean()


def impressions(n):
    cats = torch.randint(0, 20, (n, 6))
    price = torch.rand(n)
    clicked = ((cats[:, 0] > 10) & (price > 0.2)).float()
    return cats, price, clicked


def main():
    torch.manual_seed(3)
    model, criterion = Predictor(), LogLoss()
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(36):
        cats, price, clicked = impressions(32)
        if step == 23:
            price[4], clicked[4] = 2500.0, 0.0  # cents
        p = model(cats, price)
        loss = criterion(p, clicked)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 4 == 0:
            print("step", step, "logloss", loss.item())


if __name__ == "__main__":
    main()
