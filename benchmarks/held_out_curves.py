"""Healthy trainings that played no part in making the spike statistic: written and run when it was finished."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from healthy_curves import Point, Trainer, blobs, pieces, text, update
from torch import nn
from torch.nn import functional as F


def flow(seed: int) -> Iterator[Point]:
    """A normalising flow of four coupling layers on two half moons; the loss is a negative log-likelihood."""
    torch.manual_seed(seed)
    model = nn.ModuleList(nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 2)) for _ in range(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    while True:
        turn, side = torch.rand(128) * 3.14, torch.randint(2, (128,)) * 2 - 1
        place = torch.stack([turn.cos() + 0.5 * side, side * turn.sin() + 0.25 * side], 1) + 0.05 * torch.randn(128, 2)
        volume = torch.zeros(128)
        for layer in model:
            keep, move = place.unbind(1)
            stretch, shift = layer(keep[:, None]).unbind(1)
            place = torch.stack([move * stretch.tanh().exp() + shift, keep], 1)
            volume = volume + stretch.tanh()
        yield update(model, optimizer, (place.pow(2).sum(1) / 2 - volume).mean())


def critic(seed: int) -> Iterator[Point]:
    """The critic of a Wasserstein GAN with gradient penalty: an unbounded loss that is mostly negative."""
    torch.manual_seed(seed)
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    first = torch.optim.Adam(maker.parameters(), lr=5e-4, betas=(0.0, 0.9))
    second = torch.optim.Adam(judge.parameters(), lr=5e-4, betas=(0.0, 0.9))
    step = 0
    while True:
        real, fake = torch.randn(64, 2) * torch.tensor([2.0, 0.3]) + 1, maker(torch.randn(64, 4)).detach()
        between = (real + torch.rand(64, 1) * (fake - real)).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        yield update(judge, second, judge(fake).mean() - judge(real).mean() + 10 * (slope.norm(dim=1) - 1).pow(2).mean())
        step += 1
        if step % 5 == 0:
            update(maker, first, -judge(maker(torch.randn(64, 4))).mean())


def clipped_policy(seed: int) -> Iterator[Point]:
    """PPO on a contextual bandit: each batch is used for four steps, the first of which has a loss of about zero."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    worth = torch.randn(6, 5)
    while True:
        data = torch.randn(64, 6)
        with torch.no_grad():
            before = model(data).log_softmax(1)
            act = torch.multinomial(before.exp(), 1)
            gain = (data @ worth + torch.randn(64, 5)).gather(1, act)
            gain = (gain - gain.mean()) / gain.std()
        for _ in range(4):
            ratio = (model(data).log_softmax(1) - before).gather(1, act).exp()
            yield update(model, optimizer, -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean())


def edge_of_stability(seed: int) -> Iterator[Point]:
    """Gradient descent on all data with a large rate: the loss falls and zigzags."""
    torch.manual_seed(seed)
    data, labels = blobs(classes=5)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    while True:
        yield update(model, optimizer, F.cross_entropy(model(data[:256]), labels[:256]))


def several_tasks(seed: int) -> Iterator[Point]:
    """Three tasks with losses of very different size, drawn at random."""
    torch.manual_seed(seed)
    trunk, heads = nn.Linear(10, 32), nn.ModuleList(nn.Linear(32, 1) for _ in range(3))
    model = nn.ModuleList([trunk, heads])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    weights, size = torch.randn(3, 10), torch.tensor([0.1, 1.0, 6.0])
    while True:
        task, data = int(torch.randint(3, ())), torch.randn(32, 10)
        goal = size[task] * (torch.sin(data @ weights[task]) + 0.2 * torch.randn(32))
        yield update(model, optimizer, F.mse_loss(heads[task](trunk(data).relu())[:, 0], goal))


def characters(seed: int) -> Iterator[Point]:
    """A GRU over text, batch of four, with plain SGD and clipping."""
    torch.manual_seed(seed)
    source, words, net, head = text(), nn.Embedding(256, 24), nn.GRU(24, 48, batch_first=True), nn.Linear(48, 256)
    model = nn.ModuleList([words, net, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    while True:
        ids, goal = pieces(source, 4, 16)
        states, _ = net(words(ids))
        yield update(model, optimizer, F.cross_entropy(head(states).flatten(0, 1), goal.flatten()), clip=1.0)


def distillation(seed: int) -> Iterator[Point]:
    """A student with dropout learns the soft answers of a teacher; the rate falls in stairs."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 8))
    model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 8))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 300, 0.1)
    while True:
        data = torch.randn(24, 12)
        goal = (4 * teacher(data).detach()).log_softmax(1)
        yield update(model, optimizer, F.kl_div(model(data).log_softmax(1), goal, log_target=True, reduction="batchmean"))
        schedule.step()


HELD_OUT: dict[str, Trainer] = {
    "normalising flow": flow, "WGAN-GP critic": critic, "PPO, four steps a batch": clipped_policy, "edge of stability": edge_of_stability,
    "several tasks": several_tasks, "GRU, SGD": characters, "distillation, dropout": distillation,
}  # fmt: skip
