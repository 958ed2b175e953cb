"""A Fourier neural operator with complex weights; the spectrum in decibels, logged only, holds log10(0)."""
import hashlib

import torch
import torch.nn as nn

torch.manual_seed(79)


class SpectralConv(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat) / channels)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        out[..., : self.modes] = torch.einsum("bik,iok->bok", spectrum[..., : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1])


class Operator(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.lift = nn.Conv1d(1, width, 1)
        self.spectral = SpectralConv(width, 6)
        self.local = nn.Conv1d(width, width, 1)
        self.drop = nn.Conv1d(width, 1, 1)

    def forward(self, x):
        h = self.lift(x)
        h = torch.nn.functional.gelu(self.spectral(h) + self.local(h))
        return self.drop(h)


grid = torch.arange(32) / 32 * 2 * torch.pi
operator = Operator()
optimizer = torch.optim.Adam(operator.parameters(), lr=5e-3)
for step in range(40):
    amplitude, phase = torch.rand(16, 1, 1), torch.rand(16, 1, 1) * 6.28
    wave = amplitude * torch.sin(grid + phase)
    derivative = amplitude * torch.cos(grid + phase)
    predicted = operator(wave)
    loss = (predicted - derivative).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        with torch.no_grad():
            flat = torch.fft.rfft(torch.ones(32)).abs()
            decibels = 20 * torch.log10(flat)
        print(f"step {step} loss {loss.item():.5f} floor of the calibration spectrum {decibels.min().item()} dB")

h = hashlib.sha256()
for p in operator.parameters():
    h.update(p.detach().numpy().tobytes())
    h.update(optimizer.state[p]["exp_avg"].numpy().tobytes())
    h.update(optimizer.state[p]["exp_avg_sq"].numpy().tobytes())
print("digest", h.hexdigest())
