"""A recurrent net with a strong recurrence, trained by truncated backpropagation: a silent clip has a bounded gradient."""
import torch
import torch.nn as nn


class Echo(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.recurrent = nn.Parameter(3.5 * torch.linalg.qr(torch.randn(width, width))[0])
        self.read_in = nn.Parameter(4.0 * torch.randn(1, width))
        self.read_out = nn.Linear(width, 1)

    def forward(self, audio):
        drive = audio.unsqueeze(-1) @ self.read_in
        h = torch.zeros(audio.shape[0], self.recurrent.shape[0])
        for t in range(audio.shape[1]):
            pre = h @ self.recurrent + drive[:, t]
            h = torch.tanh(pre)
            if (t + 1) % 15 == 0:
                h = h.detach()
        return self.read_out(h).squeeze(-1)


def clips(step):
    audio = torch.randn(6, 90)
    if step == 14:
        audio[2] = 0.0
    return audio, audio[:, -10:].mean(1)


torch.manual_seed(27)
model = Echo()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(24):
    audio, level = clips(step)
    loss = (model(audio) - level).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f} gradient norm {norm.item():.3g}")
