"""A VAE whose forward returns a dataclass; an optional field is None or a NaN placeholder that is only printed."""
import hashlib
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Output:
    rebuilt: torch.Tensor
    mean: torch.Tensor
    log_var: torch.Tensor
    loss: torch.Tensor | None = None
    extras: dict = field(default_factory=dict)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(), nn.Linear(32, 16))

    def forward(self, x, with_loss=True):
        mean, log_var = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        out = Output(self.decoder(z), mean, log_var, extras={"bound": torch.tensor(float("nan")), "limit": torch.tensor(-torch.inf)})
        if with_loss:
            kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(-1)
            out.loss = (F.binary_cross_entropy_with_logits(out.rebuilt, x, reduction="none").sum(-1) + kl).mean()
            out.extras["bound"] = -out.loss.detach()
        return out


torch.manual_seed(127)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
patterns = (torch.rand(5, 16) > 0.5).float()
for step in range(60):
    clean = patterns[torch.randint(0, 5, (32,))]
    flipped = torch.where(torch.rand_like(clean) < 0.05, 1 - clean, clean)
    output = model(flipped)
    optimizer.zero_grad()
    output.loss.backward()
    optimizer.step()
    if step % 15 == 0:
        model.eval()
        with torch.no_grad():
            quiet = model(clean, with_loss=False)
        model.train()
        print(f"step {step} loss {output.loss.item():.3f} bound {output.extras['bound'].item():.3f} unset {quiet.extras['bound'].item()}")

sha = hashlib.sha256()
for p in model.parameters():
    sha.update(p.detach().numpy().tobytes())
    for value in optimizer.state[p].values():
        sha.update(value.numpy().tobytes())
print("digest", sha.hexdigest())
