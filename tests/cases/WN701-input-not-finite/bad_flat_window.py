"""Each window of a sensor log is standardised by its own spread; while the machine stands still the window is flat and gives 0/0."""
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

np.seterr(all="ignore")


class SensorWindows(Dataset):
    def __init__(self, length=1200, window=32):
        noise = np.random.default_rng(17)
        t = np.arange(length, dtype=np.float32)
        log = np.sin(t / 9) + 0.2 * noise.normal(size=length).astype(np.float32)
        log[700:760] = log[700]
        self.log, self.window = log, window

    def __len__(self):
        return (len(self.log) - self.window - 1) // 8

    def __getitem__(self, i):
        start = 8 * i
        piece = self.log[start : start + self.window]
        scaled = (piece - piece[0] - (piece - piece[0]).mean()) / piece.std()  # <- WN701 input
        return scaled, np.float32(self.log[start + self.window] > self.log[start + self.window - 1])


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 7, stride=2)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.up = nn.Linear(16, 1)

    def forward(self, window):
        h = torch.relu(self.conv(window.unsqueeze(1)))
        _, (last, _) = self.lstm(h.transpose(1, 2))
        return self.up(last[-1]).squeeze(-1)


class Experiment:
    def __init__(self):
        torch.manual_seed(29)
        self.net = Forecaster()
        self.opt = torch.optim.RAdam(self.net.parameters(), lr=3e-3)
        self.loader = DataLoader(SensorWindows(), batch_size=12, drop_last=True)

    def run(self):
        for n, (window, rises) in enumerate(self.loader):
            guess = self.net(window)
            loss = nn.functional.binary_cross_entropy_with_logits(guess, rises)
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(self.net.parameters(), 0.5)
            self.opt.step()
            print(f"batch {n} loss {loss.item():.4f}")


Experiment().run()
