"""Log-likelihood of observed pixels only: log is taken of all of them and indexed afterwards, so the hidden ones answer NaN."""
import torch
from torch import nn


class Inpainter(nn.Module):
    def __init__(self, side=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(side * side, 40), nn.ReLU(), nn.Linear(40, side * side))

    def forward(self, visible, known):
        ink = torch.square(torch.tanh(self.net(visible)))
        return ink * known  # nothing is claimed about pixels outside the frame


def log_likelihood(ink, image, known):
    dark = image > 0.5
    on = torch.log(ink)[known & dark]  # <- WN502 backward
    off = torch.log1p(-0.999 * ink[known & ~dark])
    return (on.sum() + off.sum()) / known.sum()


def strokes(n, side=6):
    """Each picture is a horizontal or vertical stroke."""
    image = torch.zeros(n, side, side)
    for picture in image:
        k = int(torch.randint(0, side, ()))
        if torch.rand(()) < 0.5:
            picture[k] = 1.0
        else:
            picture[:, k] = 1.0
    return image.view(n, -1)


def train(steps=24):
    torch.manual_seed(44)
    model = Inpainter()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        image = strokes(32)
        known = torch.ones(32, 36, dtype=torch.bool)
        if step >= 8:  # later the pictures get a black margin
            known[:, :6] = False
        visible = image * (torch.rand_like(image) < 0.8)
        loss = -log_likelihood(model(visible, known), image, known)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        if step % 4 == 0:
            print(f"step {step:2d}  nll per pixel {loss.item():.4f}")


train()
