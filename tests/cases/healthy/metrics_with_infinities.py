"""Logging computes log(0), a perplexity of inf and 0/0 precision under no_grad; none of it reaches the loss."""
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(3)
device = torch.device("cpu")
centres = torch.randn(5, 8) * 4
model = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 6)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
history = {"loss": [], "entropy_bits": [], "perplexity": [], "precision": [], "worst_log_prob": []}


@torch.no_grad()
def log_metrics(logits, labels):
    p = F.softmax(logits * 50, dim=-1)
    history["worst_log_prob"].append(torch.log(p).min().item())
    history["entropy_bits"].append((-(p * p.log2()).sum(-1)).mean().item())
    history["perplexity"].append(torch.exp(F.cross_entropy(logits * 200, labels, reduction="none")).max().item())
    predicted = logits.argmax(-1)
    hits = torch.stack([((predicted == c) & (labels == c)).sum() for c in range(6)]).float()
    claimed = torch.stack([(predicted == c).sum() for c in range(6)]).float()
    history["precision"].append((hits / claimed).tolist())


for step in range(40):
    labels = torch.randint(0, 5, (24,))
    x = centres[labels] + torch.randn(24, 8)
    logits = model(x.to(device))
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history["loss"].append(loss.item())
    if step % 5 == 0:
        log_metrics(logits.detach(), labels)
        print(step, f"loss {loss.item():.4f}", *(f"{k} {history[k][-1]}" for k in ("worst_log_prob", "entropy_bits", "perplexity")))

assert any(math.isinf(v) for v in history["worst_log_prob"])
assert any(math.isnan(v) for v in history["precision"][-1])
assert all(math.isfinite(v) for v in history["loss"])

h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy())
    h.update(optimizer.state[p]["exp_avg"].numpy())
    h.update(optimizer.state[p]["exp_avg_sq"].numpy())
print("digest", h.hexdigest())
