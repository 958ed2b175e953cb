"""Linear attention with elu + 1 features: every query has some mass to divide by."""
import torch
from torch import nn
import torch.nn.functional as F


class LinearAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.to_qkv(x).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bthi,bthj->bhij", k, v)
        num = torch.einsum("bthi,bhij->bthj", q, kv)
        mass = torch.einsum("bthi,bhi->bth", q, k.sum(1)).unsqueeze(-1)
        out = num / mass
        return self.proj(out.reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = LinearAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class TinyLM(nn.Module):
    def __init__(self, vocab=16, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.block = Block(dim, heads=3)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.out(self.block(self.emb(tokens)))


torch.manual_seed(17)
model = TinyLM()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(30):
    start = torch.randint(0, 12, (4, 1))
    seq = (start + 3 * torch.arange(9)) % (12 if step < 8 else 16)  # rarer symbols appear later
    logits = model(seq[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), seq[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(step, loss.item())
