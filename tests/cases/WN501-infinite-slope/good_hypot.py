"""A note synthesiser trained on spectrograms: abs of a complex 0 has slope 0."""
import torch
import torch.nn as nn
import torch.nn.functional as F

RATE, LENGTH, FRAME = 800, 256, 32


def spectrogram(wave):
    spec = torch.stft(wave, n_fft=FRAME, hop_length=FRAME, window=torch.ones(FRAME), center=False, return_complex=True)
    return spec.abs()


class Synth(nn.Module):
    """Pitch in, wave out: one oscillator with a learned, gated loudness per frame."""

    def __init__(self):
        super().__init__()
        self.loudness = nn.Parameter(torch.full((LENGTH // FRAME,), 0.2))
        self.brightness = nn.Parameter(torch.tensor([1.0, 0.3, 0.1]))

    def forward(self, pitch):
        t = torch.arange(LENGTH) / RATE
        harmonic = torch.arange(1, 4).view(3, 1)
        tone = (self.brightness.view(3, 1) * torch.sin(6.2832 * pitch.view(-1, 1, 1) * harmonic * t)).sum(dim=1)
        gate = F.relu(self.loudness).repeat_interleave(FRAME)
        return gate * tone


def recorded_notes(pitch):
    t = torch.arange(LENGTH) / RATE
    decay = torch.exp(-8 * t) * (t < 0.24)  # the string is damped after 0.24 s
    room = 0.01 * torch.randn(len(pitch), LENGTH)
    return decay * torch.sin(6.2832 * pitch.view(-1, 1) * t) + room


class Session:
    def __init__(self):
        torch.manual_seed(40)
        self.synth = Synth()
        self.opt = torch.optim.Adam(self.synth.parameters(), lr=2e-2)

    def training_step(self):
        pitch = 60 + 120 * torch.rand(6)
        return F.l1_loss(spectrogram(self.synth(pitch)), spectrogram(recorded_notes(pitch)))

    def run(self, steps=30):
        for step in range(steps):
            self.opt.zero_grad()
            loss = self.training_step()
            loss.backward()
            self.opt.step()
            if step % 5 == 0:
                print(f"[{step:02d}] spectral loss {loss.item():.4f}")


Session().run()
