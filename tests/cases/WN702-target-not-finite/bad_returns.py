"""Next-day returns of a delisted share are 0/0: the target is NaN, the inputs are fine."""
import numpy as np
import torch
import torch.nn as nn

ASSETS, DAYS, LOOKBACK = 6, 160, 10


def prices(seed=9):
    rng = np.random.default_rng(seed)
    path = 50 * np.exp(np.cumsum(0.02 * rng.normal(size=(DAYS, ASSETS)), axis=0))
    path[120:, 4] = 0.0
    return path.astype(np.float32)


def windows(path):
    """Inputs: price levels against the first of the window; targets: the return of the next day."""
    with np.errstate(all="ignore"):
        for day in range(LOOKBACK, DAYS - 1, 4):
            level = path[day - LOOKBACK : day] / path[0]
            target = (path[day + 1] - path[day]) / path[day]
            yield torch.from_numpy(level.T.copy()), torch.from_numpy(target)


class Alpha(nn.Module):
    def __init__(self):
        super().__init__()
        self.temporal = nn.GRU(1, 12, batch_first=True)
        self.signal = nn.Linear(12, 1)

    def forward(self, level):
        _, h = self.temporal(level.unsqueeze(-1))
        return self.signal(h[0]).squeeze(-1)


def pinball(prediction, target, q=0.5):
    error = target - prediction  # <- WN702 input
    return torch.maximum(q * error, (q - 1) * error).mean()


if __name__ == "__main__":
    torch.manual_seed(9)
    model = Alpha()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    for step, (level, target) in enumerate(windows(prices())):
        forecast = model(level)
        loss = pinball(forecast, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print("step", step, "pinball", round(loss.item(), 5))
