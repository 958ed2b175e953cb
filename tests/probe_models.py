"""Small models of many kinds, healthy ones and the same with one hazard; the hazardous line carries its mark.

Each factory returns what `whynan.probe` takes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Made = tuple[nn.Module | None, Any, Any]


def seeded(seed: int = 0) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


# -- healthy ----------------------------------------------------------------------------------------------------


def mlp() -> Made:
    seeded()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    return model, nn.CrossEntropyLoss(), (torch.randn(16, 8), torch.randint(0, 3, (16,)))


def cnn_with_batchnorm() -> Made:
    seeded()
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return model, F.cross_entropy, (torch.rand(8, 1, 8, 8), torch.randint(0, 3, (8,)))


class Tagger(nn.Module):
    """A transformer encoder that gives padded rows something to attend to."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        padding = ids == 0
        padding = padding & ~padding.all(1, keepdim=True)
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))


def transformer_with_padding() -> Made:
    seeded()
    ids = torch.randint(1, 20, (4, 7))
    ids[1, 5:] = 0
    return Tagger(), lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["tags"].flatten()), {"ids": ids, "tags": torch.randint(0, 5, (4, 7))}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(x)
        return self.out(hidden[:, -1]).squeeze(-1)


def lstm() -> Made:
    seeded()
    return Recurrent(), nn.MSELoss(), (torch.randn(6, 9, 3), torch.randn(6))


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mu, log_var = self.encode(x).chunk(2, -1)
        return self.decode(mu + torch.randn_like(mu) * (0.5 * log_var).exp()), mu, log_var


def elbo(out: Any, x: torch.Tensor) -> torch.Tensor:
    made, mu, log_var = out
    return F.mse_loss(made, x) - 0.5 * (1 + log_var - mu.square() - log_var.exp()).mean()


def vae() -> Made:
    seeded()
    return VAE(), elbo, torch.randn(8, 6)


def info_nce(model: nn.Module, batch: Any) -> torch.Tensor:
    a, b = (F.normalize(model(part), dim=-1) for part in batch)
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))


def contrastive() -> Made:
    seeded()
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)), info_nce, (torch.randn(8, 5), torch.randn(8, 5))


class Graph(nn.Module):
    """Mean of the neighbours by scatter; a node without any keeps zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        degree = torch.zeros(len(x)).index_add(0, edges[1], torch.ones(edges.shape[1]))
        return self.own(x) + self.other(total / degree.clamp_min(1.0)[:, None])


def gnn() -> Made:
    seeded()
    return Graph(), lambda out, batch: out.square().mean(), (torch.randn(6, 4), torch.randint(0, 6, (2, 12)))


def diffusion_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, t = batch
    keep = torch.cos(t * math.pi / 2)[:, None].clamp(0.001, 0.999)
    noise = torch.randn_like(x)
    return F.mse_loss(model(keep * x + (1 - keep.square()).sqrt() * noise), noise)


def diffusion() -> Made:
    seeded()
    return nn.Sequential(nn.Linear(6, 12), nn.SiLU(), nn.Linear(12, 6)), diffusion_loss, (torch.randn(8, 6), torch.rand(8))


def ctc_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    frames, targets, lengths, target_lengths = batch
    return F.ctc_loss(model(frames).log_softmax(-1).transpose(0, 1), targets, lengths, target_lengths, zero_infinity=True)


def ctc() -> Made:
    seeded()
    return nn.Linear(5, 6), ctc_loss, (torch.randn(3, 12, 5), torch.randint(1, 6, (3, 4)), torch.tensor([12, 10, 11]), torch.tensor([4, 3, 2]))


def detection_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    _, boxes, has_object = batch
    error = (out - boxes).abs().mean(-1)
    return (error * has_object).sum() / has_object.sum().clamp_min(1)


def detection() -> Made:
    seeded()
    return nn.Linear(8, 4), detection_loss, (torch.randn(10, 8), torch.rand(10, 4), torch.rand(10) < 0.5)


def regression_without_model() -> Made:
    seeded()
    return None, lambda batch: F.huber_loss(batch[0], batch[1]), (torch.randn(8), torch.randn(8))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.attend(x, x, x, need_weights=False)[0]).mean(1)


def attention() -> Made:
    seeded()
    return Attention(), lambda out, batch: out.square().mean(), torch.randn(4, 5, 8)


def focal_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_p = F.logsigmoid(torch.where(target > 0.5, logits, -logits))
    return (-((1 - log_p.exp()).clamp_min(1e-6) ** 2) * log_p).mean()


def focal() -> Made:
    seeded()
    return nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), focal_loss, (torch.randn(12, 6), (torch.rand(12) < 0.4).float())


HEALTHY = [
    mlp, cnn_with_batchnorm, transformer_with_padding, lstm, vae, contrastive, gnn, diffusion, ctc, detection, regression_without_model, attention, focal,
]  # fmt: skip


# -- with a hazard ----------------------------------------------------------------------------------------------


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.sqrt((self.embed(a) - self.embed(b)).pow(2).sum(-1))  # <- distance


def distance() -> Made:
    seeded()
    return Distance(), lambda out, batch: F.relu(3 - out).mean(), (torch.randn(8, 5), torch.randn(8, 5))


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.out = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        scores = (self.query(x) @ x.transpose(1, 2)).masked_fill(~mask[:, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)  # <- masked_attention
        return self.out(weights @ x)


def masked_attention() -> Made:
    seeded()
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1, 4:] = False
    return MaskedAttention(), lambda out, batch: F.cross_entropy(out.transpose(1, 2), batch[0]), (torch.randint(0, 20, (4, 6)), mask)


def unexplained(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    error = (model(x) - x).square().sum()
    return error / (x - x.mean(0)).square().sum()  # <- unexplained_variance


def unexplained_variance() -> Made:
    seeded()
    return nn.Linear(4, 4), unexplained, torch.randn(8, 4)


def standardised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    z = model(x)
    z = (z - z.mean(0)) / z.std(0)  # <- spread_of_one
    return z.pow(4).mean()


def spread_of_one() -> Made:
    seeded()
    return nn.Linear(4, 3), standardised, torch.randn(6, 4)


def masked_mean_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    error = (out - batch["y"]).square()
    return error[batch["valid"]].mean()  # <- empty_selection


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).squeeze(-1)


def empty_selection() -> Made:
    seeded()
    return OfDict(), masked_mean_loss, {"x": torch.randn(6, 3), "y": torch.randn(6), "valid": torch.tensor([True, False, True, True, False, True])}


def tokens_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    ids, labels = batch
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # <- all_ignored


def all_ignored() -> Made:
    seeded()
    labels = torch.randint(0, 10, (3, 5))
    labels[0, :2] = -100
    return nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10)), tokens_loss, (torch.randint(0, 10, (3, 5)), labels)


class LogPower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(9, 2)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        power = torch.fft.rfft(wave).abs().square()
        return self.out(torch.log(power))  # <- log_power


def log_power() -> Made:
    seeded()
    return LogPower(), nn.CrossEntropyLoss(), (torch.randn(5, 16), torch.randint(0, 2, (5,)))


class Degrees(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        degree = torch.zeros(len(x)).index_add(0, edges[1], torch.ones(edges.shape[1]))
        scale = degree.pow(-0.5)  # <- isolated_node
        return self.mix(x) * scale[:, None]


def isolated_node() -> Made:
    seeded()
    targets = torch.arange(6).repeat(2)
    return Degrees(), lambda out, batch: out.square().mean(), (torch.randn(6, 4), torch.stack([torch.randint(0, 6, (12,)), targets]))


def angular_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    a, b = (F.normalize(model(x), dim=-1) for x in batch)
    return torch.acos((a * b).sum(-1)).mean()  # <- angle


def angle() -> Made:
    seeded()
    return nn.Linear(4, 3), angular_loss, (torch.randn(6, 4), torch.randn(6, 4))


def percentage_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    actual = batch[1]
    return ((out.squeeze(-1) - actual).abs() / actual).mean()  # <- percentage


def percentage() -> Made:
    seeded()
    return nn.Linear(3, 1), percentage_loss, (torch.randn(8, 3), torch.rand(8))


def box_loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
    wide = (out[:, 2] * batch[1][:, 0]).abs()
    return torch.log(wide / batch[1][:, 1]).square().mean()  # <- box_ratio


def box_ratio() -> Made:
    seeded()
    return nn.Linear(4, 4), box_loss, (torch.randn(8, 4), torch.rand(8, 2))


class Softened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def log_of_softmax_loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_p = torch.log(torch.softmax(out, dim=-1))  # <- log_of_softmax
    return F.nll_loss(log_p, target)


def log_of_softmax() -> Made:
    seeded()
    return Softened(), log_of_softmax_loss, (torch.randn(6, 4), torch.randint(0, 3, (6,)))


class Covariance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.embed(x)
        z = z - z.mean(0)
        return torch.linalg.inv(z.T @ z / len(z))  # <- singular


def singular() -> Made:
    seeded()
    return Covariance(), lambda out, batch: out.square().mean(), torch.randn(12, 4)


def unit_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    z = model(x)
    size = z.square().sum(-1, keepdim=True).sqrt()  # <- unit_by_hand
    return (z / (size + 1e-8)).square().mean()


def unit_by_hand() -> Made:
    """The root is taken before the epsilon is added: its slope at 0 is infinite."""
    seeded()
    return nn.Linear(4, 3, bias=False), unit_loss, torch.randn(6, 4)


def pearson(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    p = model(x).squeeze(-1)
    p, y = p - p.mean(), y - y.mean()
    return 1 - (p * y).sum() / (p.norm() * y.norm())  # <- correlation


def correlation() -> Made:
    seeded()
    return nn.Linear(3, 1), pearson, (torch.randn(8, 3), torch.randn(8))


HAZARDS: dict[str, Any] = {
    f.__name__: f
    for f in (
        distance, masked_attention, unexplained_variance, spread_of_one, empty_selection, all_ignored, log_power, isolated_node, angle, percentage,
        box_ratio, log_of_softmax, singular, correlation, unit_by_hand,
    )
}  # fmt: skip


def marked_line(name: str) -> int:
    """Return the line that carries a mark."""
    from pathlib import Path

    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.rstrip().endswith(f"# <- {name}"))
