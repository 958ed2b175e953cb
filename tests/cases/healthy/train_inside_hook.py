"""A sparse autoencoder is trained inside a forward hook of a frozen model: loss, backward and step all happen in there."""
import hashlib

import torch
import torch.nn as nn

torch.manual_seed(107)


class Host(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0) for _ in range(2))
        self.unembed = nn.Linear(16, 40)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h, src_mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1]), is_causal=True)
        return self.unembed(h)


class SparseCoder(nn.Module):
    def __init__(self, dim=16, latents=64, k=6):
        super().__init__()
        self.encode = nn.Linear(dim, latents)
        self.decode = nn.Parameter(self.encode.weight.data.clone())
        self.bias = nn.Parameter(torch.zeros(dim))
        self.k = k

    def forward(self, x):
        top, index = self.encode(x - self.bias).relu().topk(self.k, dim=-1)
        return (top.unsqueeze(-1) * self.decode[index]).sum(-2) + self.bias


host = Host().eval().requires_grad_(False)
coder = SparseCoder()
optimizer = torch.optim.Adam(coder.parameters(), lr=5e-3)
log = []


def train_coder(module, args, output):
    x = output.detach().flatten(0, 1)
    with torch.enable_grad():
        rebuilt = coder(x)
        unexplained = (x - rebuilt).square().sum() / (x - x.mean(0)).square().sum()
        optimizer.zero_grad()
        unexplained.backward()
        optimizer.step()
    log.append(unexplained.item())


handle = host.blocks[0].register_forward_hook(train_coder)
with torch.no_grad():
    for step in range(30):
        host(torch.randint(0, 40, (8, 12)))
        if step % 8 == 0:
            print("step", step, "fraction of variance unexplained", round(log[-1], 4))
handle.remove()

sha = hashlib.sha256()
for p in coder.parameters():
    sha.update(p.detach().numpy().tobytes())
    for v in optimizer.state[p].values():
        sha.update(v.numpy().tobytes())
print("digest", sha.hexdigest())
