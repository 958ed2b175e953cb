"""Mixed precision with a loss scale of 2**40: the first steps overflow and are skipped until the scale has settled."""
import hashlib

import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast

torch.manual_seed(17)
model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = GradScaler("cpu", init_scale=2.0**40, growth_interval=200)
rule = torch.randn(12, 4)

skipped = 0
for step in range(60):
    x = torch.randn(32, 12)
    label = (x @ rule).argmax(1)
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), label)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped += scaler.get_scale() < before
    if step % 12 == 0:
        print(f"step {step:2d} loss {loss.item():.4f} norm {norm.item():.3f} scale 2**{torch.tensor(before).log2().item():.0f}")

print("skipped", skipped, "of 60")
assert 0 < skipped < 40
digest = hashlib.sha256()
for p in model.parameters():
    digest.update(p.detach().numpy().tobytes())
    for key in ("step", "exp_avg", "exp_avg_sq"):
        digest.update(optimizer.state[p][key].numpy().tobytes())
digest.update(str(scaler.state_dict()).encode())
print("digest", digest.hexdigest())
