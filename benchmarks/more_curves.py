"""More healthy trainings, looked at when the spike statistic had its constants."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from healthy_curves import Point, Trainer, blobs, pieces, text, update
from torch import nn
from torch.nn import functional as F


def diffusion(seed: int) -> Iterator[Point]:
    """Denoising at random noise levels, in two dimensions."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while True:
        turn = torch.rand(64, 1) * 6
        clean = torch.cat([turn * turn.cos(), turn * turn.sin()], 1) / 3
        time, noise = torch.rand(64, 1), torch.randn(64, 2)
        seen = (time * math.pi / 2).cos() * clean + (time * math.pi / 2).sin() * noise
        yield update(model, optimizer, F.mse_loss(model(torch.cat([seen, time], 1)), noise), clip=1.0)


def rare_class(seed: int) -> Iterator[Point]:
    """Two classes, one of them 1 in 100: most batches of 16 hold none of it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        label = (torch.rand(16) < 0.01).float()
        data = torch.randn(16, 10) + label[:, None] * 0.8
        yield update(model, optimizer, F.binary_cross_entropy_with_logits(model(data)[:, 0], label))


def values_of_states(seed: int) -> Iterator[Point]:
    """Q-learning on a random walk with a target network that is copied every 100 steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    old = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    moves, prize = torch.randint(16, (16, 4)), torch.randn(16, 4)
    step = 0
    while True:
        state, act = torch.randint(16, (32,)), torch.randint(4, (32,))
        with torch.no_grad():
            goal = prize[state, act] + 0.95 * old(F.one_hot(moves[state, act], 16).float()).max(1).values
        guess = model(F.one_hot(state, 16).float()).gather(1, act[:, None])[:, 0]
        yield update(model, optimizer, F.smooth_l1_loss(guess, goal))
        step += 1
        if step % 100 == 0:
            old.load_state_dict(model.state_dict())


def mixture_density(seed: int) -> Iterator[Point]:
    """The negative log-likelihood of a mixture of five bells: sharp, and below zero at times."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 15))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    while True:
        goal = torch.rand(64, 1) * 2 - 1
        data = goal + 0.3 * torch.sin(6 * goal) + 0.02 * torch.randn(64, 1)
        weight, mean, spread = model(data).chunk(3, 1)
        part = torch.distributions.Normal(mean, F.softplus(spread) + 1e-2).log_prob(goal)
        yield update(model, optimizer, -torch.logsumexp(part + weight.log_softmax(1), 1).mean())


def contrastive(seed: int) -> Iterator[Point]:
    """Two views of each sample find each other in the batch; the temperature is learnt."""
    torch.manual_seed(seed)
    data, _ = blobs(classes=20)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
    heat = nn.Parameter(torch.tensor(2.0))
    model.register_parameter("heat", heat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    while True:
        batch = data[torch.randint(2000, (48,))]
        one, two = (F.normalize(model(batch + 0.3 * torch.randn_like(batch)), dim=1) for _ in range(2))
        yield update(model, optimizer, F.cross_entropy(one @ two.T * heat.exp(), torch.arange(48)))


def equation(seed: int) -> Iterator[Point]:
    """A physics-informed net: the loss holds second derivatives, and falls over five decades."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    while True:
        place = torch.rand(64, 1, requires_grad=True)
        height = model(place) * place * (1 - place)
        (slope,) = torch.autograd.grad(height.sum(), place, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), place, create_graph=True)
        yield update(model, optimizer, (bend + math.pi**2 * torch.sin(math.pi * place)).pow(2).mean())


def embeddings(seed: int) -> Iterator[Point]:
    """Neighbouring bytes of text with negative samples and Adagrad."""
    torch.manual_seed(seed)
    source, model = text(), nn.ModuleList([nn.Embedding(256, 16), nn.Embedding(256, 16)])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    while True:
        one, two = (ids[:, 0] for ids in pieces(source, 64, 1))
        word = model[0](one)
        near, far = (word * model[1](two)).sum(1), (word * model[1](torch.randint(256, (64,)))).sum(1)
        yield update(model, optimizer, F.softplus(-near).mean() + F.softplus(far).mean())


THIRD: dict[str, Trainer] = {
    "diffusion": diffusion, "rare class": rare_class, "Q-learning": values_of_states, "mixture density": mixture_density,
    "contrastive": contrastive, "differential equation": equation, "embeddings, Adagrad": embeddings,
}  # fmt: skip
