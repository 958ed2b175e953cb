"""An autoencoder that decodes with the transpose of its own encoder weight, in bfloat16 autocast."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class TiedAutoencoder(nn.Module):
    def __init__(self, visible=30, hidden=10):
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(hidden, visible)))
        self.hidden_bias = nn.Parameter(torch.zeros(hidden))
        self.visible_bias = nn.Parameter(torch.zeros(visible))

    def forward(self, x):
        code = F.softplus(F.linear(x, self.weight, self.hidden_bias))
        return F.linear(code, self.weight.t(), self.visible_bias), code


def run():
    torch.manual_seed(91)
    basis = torch.randn(4, 30)
    model = TiedAutoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for i in range(40):
        x = torch.randn(64, 4) @ basis / 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rebuilt, code = model(x)
            loss = F.mse_loss(rebuilt.float(), x) + 1e-3 * code.abs().mean()
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        if not i % 10:
            print(i, loss.item())
    pieces = [p.detach() for p in model.parameters()]
    pieces += [v for s in optimizer.state.values() for v in s.values()]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in pieces)).hexdigest()


print("digest", run())
