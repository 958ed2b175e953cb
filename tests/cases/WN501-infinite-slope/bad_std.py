"""Pitch contours with the expressiveness matched by var().sqrt(): a silent clip gives a flat contour of variance 0."""
import torch
from torch import nn


class PitchModel(nn.Module):
    """Frame by frame: phoneme features in, log pitch out."""

    def __init__(self, features=6, hidden=16):
        super().__init__()
        self.frame = nn.Sequential(nn.Linear(features, hidden), nn.Softplus(), nn.Linear(hidden, 1))

    def forward(self, clip):
        return self.frame(clip).squeeze(-1)


def expressiveness(contour):
    return contour.var(dim=1).sqrt()  # <- WN501 backward


def prosody_loss(contour, reference):
    match = nn.functional.smooth_l1_loss(contour, reference)
    lively = (expressiveness(contour) - reference.std(dim=1)).abs().mean()
    return match + 0.5 * lively


def clips(gen, batches, silent_at):
    speaker = torch.randn(6, generator=gen)
    for b in range(batches):
        clip = torch.randn(5, 32, 6, generator=gen)
        if b == silent_at:
            clip[4] = 0.0  # the microphone was muted
        yield clip, torch.tanh(clip @ speaker) + 0.05 * torch.randn(5, 32, generator=gen)


def main():
    torch.manual_seed(33)
    model = PitchModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    for b, (clip, reference) in enumerate(clips(torch.Generator().manual_seed(34), 26, silent_at=15)):
        optimizer.zero_grad()
        loss = prosody_loss(model(clip), reference)
        loss.backward()
        optimizer.step()
        decay.step()
        if b % 4 == 0:
            print("batch", b, "loss", round(loss.item(), 5))


if __name__ == "__main__":
    main()
