"""L-BFGS with a strong-Wolfe line search fits a small logistic model; the closure runs many times in one step."""
import hashlib

import torch
import torch.nn.functional as F

torch.manual_seed(81)
x = torch.randn(80, 4, dtype=torch.float64)
y = ((x[:, 0] - x[:, 1] * x[:, 2]) + 0.3 * torch.randn(80, dtype=torch.float64) > 0).double()
phi = torch.cat([x, x[:, :1] * x[:, 1:2], x[:, 1:2] * x[:, 2:3]], 1)

w = torch.zeros(6, dtype=torch.float64, requires_grad=True)
b = torch.zeros(1, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.LBFGS([w, b], lr=1.0, max_iter=8, history_size=5, line_search_fn="strong_wolfe")
calls = 0


def closure():
    global calls
    calls += 1
    optimizer.zero_grad()
    objective = F.binary_cross_entropy_with_logits(phi @ w + b, y) + 1e-3 * w.square().sum()
    objective.backward()
    return objective


previous = float("inf")
for outer in range(6):
    value = optimizer.step(closure).item()
    print(f"outer {outer} objective {value:.6f} change {previous - value:.3g} closure calls {calls}")
    if abs(previous - value) < 1e-9:
        break
    previous = value

sha = hashlib.sha256(w.detach().numpy().tobytes() + b.detach().numpy().tobytes())
state = optimizer.state[w]
for key in ("d", "prev_flat_grad", "H_diag"):
    sha.update(state[key].numpy().tobytes())
for t in state["old_dirs"] + state["old_stps"]:
    sha.update(t.numpy().tobytes())
print("digest", sha.hexdigest())
