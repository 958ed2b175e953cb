"""A denoiser under OneCycleLR: calm during warm-up, then the peak rate is more than the loss surface bears."""
import torch
import torch.nn as nn


class Denoiser(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.inward = nn.Linear(17, width)
        self.middle = nn.Linear(width, width)
        self.outward = nn.Linear(width, 16)

    def forward(self, noisy, level):
        h = torch.tanh(self.inward(torch.cat([noisy, level], 1)))
        h = h + torch.tanh(self.middle(h))
        return self.outward(h)


def clean_signals(n):
    grid = torch.linspace(0, 3, 16)
    return torch.sin(grid + 6 * torch.rand(n, 1)) * (0.5 + torch.rand(n, 1))


class Loop:
    total = 90

    def __init__(self, peak):
        self.model = Denoiser()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=peak)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=peak, total_steps=self.total)
        self.criterion = nn.MSELoss()

    def step(self):
        clean = clean_signals(32)
        level = torch.rand(32, 1)
        noise = torch.randn_like(clean)
        predicted = self.model(clean + level * noise, level)
        loss = self.criterion(predicted, noise)  # <- WN605 loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()

    def fit(self):
        for i in range(self.total):
            loss = self.step()
            if i % 6 == 0:
                print(f"{i:3d}  lr {self.optimizer.param_groups[0]['lr']:.3f}  loss {loss:.4g}")


torch.manual_seed(90)
Loop(peak=3.0).fit()
