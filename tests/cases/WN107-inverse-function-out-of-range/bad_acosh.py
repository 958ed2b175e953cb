"""Hyperboloid embeddings of a citation graph: self-citations have a Lorentz product that rounds below 1, outside acosh."""
import torch

torch.manual_seed(47)
N = 64


def citations(month, n=24):
    src = torch.randint(1, N, (n,))
    dst = src // 2
    if month == 18:  # somebody imported the self-citations too
        dst[::4] = src[::4]
    return src, dst


def lift(v):
    """R^d -> hyperboloid, x0 = sqrt(1 + |v|^2)"""
    x0 = torch.sqrt(1 + v.square().sum(-1, keepdim=True))
    return torch.cat([x0, v], dim=-1)


def lorentz_distance(a, b):
    prod = a[..., 0] * b[..., 0] - (a[..., 1:] * b[..., 1:]).sum(-1)
    return torch.acosh(prod)  # <- WN107 loss


emb = torch.randn(N, 4, requires_grad=True)
adagrad = torch.optim.Adagrad([emb], lr=0.1)
for month in range(36):
    src, dst = citations(month)
    stranger = (src + torch.randint(7, 50, src.shape)) % N
    x = lift(emb)
    near = lorentz_distance(x[src], x[dst])
    far = lorentz_distance(x[src], x[stranger])
    loss = torch.relu(1.0 + near - far).mean()
    adagrad.zero_grad()
    loss.backward()
    adagrad.step()
    if month % 3 == 0:
        print("month", month, "margin loss", loss.item(), "edge length", near.mean().item())
