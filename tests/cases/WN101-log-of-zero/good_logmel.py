"""A keyword spotter on log-mel features: a floor under the power keeps digital silence finite."""
import math
import torch
from torch import nn

torch.manual_seed(5)
SR, CLIP, N_FFT, HOP, BANDS = 8000, 2000, 256, 128, 20


def filterbank():
    edges = torch.linspace(1, N_FFT // 2, BANDS + 2)
    bins = torch.arange(N_FFT // 2 + 1).float()
    up = (bins[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - bins[None]) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0)


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("fb", filterbank())
        self.register_buffer("window", torch.hann_window(N_FFT))
        self.gain = nn.Parameter(torch.ones(BANDS))

    def forward(self, wav):
        spec = torch.stft(wav, N_FFT, HOP, window=self.window, return_complex=True)
        power = spec.real.square() + spec.imag.square()
        mel = self.fb @ power
        db = torch.log10(mel.clamp_min(1e-10))
        return db * self.gain[:, None]


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = LogMel()
        self.conv = nn.Conv1d(BANDS, 16, 3)
        self.out = nn.Linear(16, 2)

    def forward(self, wav):
        h = torch.relu(self.conv(self.front(wav)))
        return self.out(h.mean(dim=-1))


def make_clip(i):
    t = torch.arange(CLIP) / SR
    tone = 440.0 if i % 2 else 1300.0
    wav = torch.sin(2 * math.pi * tone * t) + 0.1 * torch.randn(CLIP)
    if i == 75:
        wav[600:] = 0.0  # the microphone was muted
    return wav, i % 2


clips = [make_clip(i) for i in range(160)]
model = Spotter()
sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
ce = nn.CrossEntropyLoss()
for n in range(0, 160, 8):
    wavs = torch.stack([c[0] for c in clips[n:n + 8]])
    y = torch.tensor([c[1] for c in clips[n:n + 8]])
    loss = ce(model(wavs), y)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    print(f"batch {n // 8}: loss={loss.item():.4f}")
