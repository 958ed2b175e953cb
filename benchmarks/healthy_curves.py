"""Healthy trainings of many kinds: loss and gradient norm of every step, really trained, one seed each.

Each trainer is a generator without an end. These were looked at while the spike statistic was made (`FIRST` for its constants,
`SECOND` and `more_curves` for its rules); those of `held_out_curves` were written and run after that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

Point = tuple[float, float]  # loss, gradient norm
Trainer = Callable[[int], Iterator[Point]]
ROOT = Path(__file__).resolve().parent.parent


def norm_of(parameters: Iterator[nn.Parameter]) -> float:
    """Return the norm of all gradients."""
    return float(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in parameters if p.grad is not None])))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor, clip: float | None = None) -> Point:
    """Do one step and return its loss and gradient norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = norm_of(model.parameters())
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(loss.detach()), norm


def blobs(classes: int = 10, width: int = 20, noise: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a data set of overlapping clusters with a few wrong labels."""
    centres = torch.randn(classes, width)
    labels = torch.randint(classes, (2000,))
    data = centres[labels] + noise * torch.randn(2000, width)
    wrong = torch.rand(2000) < 0.02
    return data, torch.where(wrong, torch.randint(classes, (2000,)), labels)


def classification(seed: int) -> Iterator[Point]:
    """An MLP with SGD and momentum on noisy clusters, trained until it knows them by heart."""
    torch.manual_seed(seed)
    data, labels = blobs()
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    while True:
        pick = torch.randint(2000, (32,))
        yield update(model, optimizer, F.cross_entropy(model(data[pick]), labels[pick]))


def text() -> torch.Tensor:
    """Return the one text of this repository that does not change, its licence, as byte numbers."""
    return torch.tensor(list((ROOT / "LICENSE").read_bytes()), dtype=torch.long)


class Language(nn.Module):
    """A transformer of two layers over bytes."""

    def __init__(self, width: int = 48, length: int = 32) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(256, width), nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.mask: torch.Tensor
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next byte."""
        return self.head(self.blocks(self.words(ids) + self.places, mask=self.mask, is_causal=True))


def pieces(source: torch.Tensor, batch: int = 8, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a batch of text pieces and what follows each byte."""
    starts = torch.randint(len(source) - length - 1, (batch, 1))
    ids = source[starts + torch.arange(length + 1)]
    return ids[:, :-1], ids[:, 1:]


def language(seed: int) -> Iterator[Point]:
    """The transformer with AdamW, warm-up and clipping."""
    torch.manual_seed(seed)
    source, model = text(), Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    while True:
        ids, goal = pieces(source)
        yield update(model, optimizer, F.cross_entropy(model(ids).flatten(0, 1), goal.flatten()), clip=1.0)
        schedule.step()


def convolution(seed: int) -> Iterator[Point]:
    """A small convolutional net with BatchNorm on striped pictures."""
    torch.manual_seed(seed)
    body = [nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    grid = torch.arange(16.0)
    while True:
        labels = torch.randint(8, (16,))
        angle = labels * math.pi / 8
        waves = torch.cos(angle)[:, None, None] * grid[:, None] + torch.sin(angle)[:, None, None] * grid
        pictures = torch.sin(waves + torch.rand(16, 1, 1) * 6.3)[:, None] + torch.randn(16, 1, 16, 16)
        yield update(model, optimizer, F.cross_entropy(model(pictures), labels))


def adversarial(seed: int) -> Iterator[Point]:
    """A GAN on a ring of points; the curve is the generator's."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    first = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
    while True:
        angle = torch.randint(8, (64,)) * math.pi / 4
        real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
        update(judge, second, F.softplus(-judge(real)).mean() + F.softplus(judge(maker(torch.randn(64, 4)).detach())).mean())
        yield update(maker, first, F.softplus(-judge(maker(torch.randn(64, 4)))).mean())


def push(state: torch.Tensor, force: torch.Tensor) -> torch.Tensor:
    """Move carts with poles by one tick: position, speed, angle, angular speed."""
    x, v, a, w = state.unbind(1)
    temp = (force + 0.05 * w * w * a.sin()) / 1.1
    turn = (9.8 * a.sin() - a.cos() * temp) / (0.5 * (4 / 3 - 0.1 * a.cos() ** 2 / 1.1))
    speed = temp - 0.05 * turn * a.cos() / 1.1
    return torch.stack([x + 0.02 * v, v + 0.02 * speed, a + 0.02 * w, w + 0.02 * turn], 1)


def reinforce(seed: int) -> Iterator[Point]:
    """REINFORCE on the cart with the pole: returns grow, the loss grows with them and changes sign."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    while True:
        state, alive = 0.05 * torch.randn(8, 4), torch.ones(8)
        chances, rewards = [], []
        for _ in range(40):
            choice = torch.distributions.Categorical(logits=model(state))
            act = choice.sample()
            chances.append(choice.log_prob(act) * alive)
            state = push(state, act * 20.0 - 10.0)
            alive = alive * ((state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)).float()
            rewards.append(alive)
        gains = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        yield update(model, optimizer, -(torch.stack(chances) * (gains - gains.mean())).sum() / 8)


def autoencoder(seed: int) -> Iterator[Point]:
    """A VAE with a learnt output variance: its loss falls below zero."""
    torch.manual_seed(seed)
    into, out = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16))
    model, spread = nn.ModuleList([into, out]), nn.Parameter(torch.zeros(()))
    model.register_parameter("spread", spread)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    mixing = torch.randn(3, 16)
    while True:
        data = torch.tanh(torch.randn(64, 3) @ mixing) + 0.05 * torch.randn(64, 16)
        mean, log_var = into(data).chunk(2, 1)
        guess = out(mean + (0.5 * log_var).exp() * torch.randn_like(mean))
        fit = ((data - guess) ** 2 / (2 * (2 * spread).exp()) + spread).sum(1).mean()
        yield update(model, optimizer, fit + 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean())


def heavy_tails(seed: int) -> Iterator[Point]:
    """Least squares with targets whose noise follows Student's t with 3 degrees of freedom."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    noise, weights = torch.distributions.StudentT(3.0), torch.randn(8)
    while True:
        data = torch.randn(64, 8)
        goal = torch.sin(data @ weights) + 0.3 * noise.sample((64,))
        yield update(model, optimizer, F.mse_loss(model(data)[:, 0], goal))


def half_precision(seed: int) -> Iterator[Point]:
    """Classification under bfloat16 autocast: loss and gradients with three digits."""
    torch.manual_seed(seed)
    data, labels = blobs(noise=1.5)
    model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    while True:
        pick = torch.randint(2000, (32,))
        with torch.autocast("cpu", torch.bfloat16):
            scores = model(data[pick])
        yield update(model, optimizer, F.cross_entropy(scores, labels[pick].long()).bfloat16().float())


def warm_restarts(seed: int) -> Iterator[Point]:
    """Cosine learning rate that jumps back to its maximum every 200 steps."""
    torch.manual_seed(seed)
    data, labels = blobs(noise=1.2)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 200)
    while True:
        pick = torch.randint(2000, (32,))
        yield update(model, optimizer, F.cross_entropy(model(data[pick]), labels[pick]))
        schedule.step()


def curriculum(seed: int) -> Iterator[Point]:
    """Classes are added every 250 steps: the loss jumps each time, and stays there a while."""
    torch.manual_seed(seed)
    data, labels = blobs(noise=0.7)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step = 0
    while True:
        known = torch.nonzero(labels < min(4 + 2 * (step // 250), 10))[:, 0]
        pick = known[torch.randint(len(known), (32,))]
        yield update(model, optimizer, F.cross_entropy(model(data[pick]), labels[pick]))
        step += 1


def triplets(seed: int) -> Iterator[Point]:
    """A triplet loss: exactly zero in more and more steps."""
    torch.manual_seed(seed)
    data, labels = blobs(classes=4, noise=0.6)
    groups = [torch.nonzero(labels == c)[:, 0] for c in range(4)]
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        same, other = torch.randperm(4)[:2].tolist()
        picks = [groups[c][torch.randint(len(groups[c]), (8,))] for c in (same, same, other)]
        yield update(model, optimizer, F.triplet_margin_loss(*(model(data[p]) for p in picks)))


def recurrent(seed: int) -> Iterator[Point]:
    """An LSTM that learns to add two marked numbers: a plateau, then a fall."""
    torch.manual_seed(seed)
    net, head = nn.LSTM(2, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleList([net, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    while True:
        numbers, marks = torch.rand(16, 12), torch.zeros(16, 12)
        marks.scatter_(1, torch.rand(16, 12).topk(2, 1).indices, 1.0)
        states, _ = net(torch.stack([numbers, marks], 2))
        yield update(model, optimizer, F.mse_loss(head(states[:, -1])[:, 0], (numbers * marks).sum(1)))


FIRST: dict[str, Trainer] = {
    "classification": classification, "language model": language, "convolution, BatchNorm": convolution,
    "GAN": adversarial, "REINFORCE": reinforce,
}  # fmt: skip
SECOND: dict[str, Trainer] = {
    "VAE, negative loss": autoencoder, "heavy-tailed regression": heavy_tails, "bfloat16": half_precision,
    "warm restarts": warm_restarts, "curriculum": curriculum, "triplet, zeros": triplets, "LSTM": recurrent,
}  # fmt: skip
