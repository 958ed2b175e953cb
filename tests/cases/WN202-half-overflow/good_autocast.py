"""Mixed precision on CPU: page-view counts go through log1p before the float16 layer."""
import torch
import torch.nn as nn


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 64)
        self.second = nn.Linear(64, 1)
        nn.init.uniform_(self.first.weight, 0.0, 1.0)

    def forward(self, counts):
        h = self.first(counts.log1p())
        h = torch.nn.functional.layer_norm(h.float(), (64,))
        return self.second(torch.relu(h)).squeeze(1)


def traffic(day):
    views = torch.poisson(torch.full((32, 10), 30.0))
    if day == 17:  # the link was on the front page
        views[5] *= 900
    label = (views[:, 0] > views[:, 1]).float()
    return views, label


def main():
    torch.manual_seed(103)
    net = ClickModel()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    bce = nn.BCEWithLogitsLoss()
    for day in range(30):
        views, label = traffic(day)
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(views)
            loss = bce(logits.float(), label)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if day % 4 == 0 or day == 17:
            print("day", day, "loss", loss.item(), "scale", scaler.get_scale())


if __name__ == "__main__":
    main()
