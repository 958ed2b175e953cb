"""A language model that writes a sample every few steps with top-k and top-p filtering by -inf, and reports a perplexity of inf."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(135)
V = 16


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(V, 20)
        self.gru = nn.GRU(20, 20, batch_first=True)
        self.out = nn.Linear(20, V)

    def forward(self, ids, state=None):
        h, state = self.gru(self.table(ids), state)
        return self.out(h), state


def filter_logits(logits, k=6, p=0.8):
    kth = logits.topk(k).values[..., -1:]
    logits = logits.masked_fill(logits < kth, -torch.inf)
    ordered, index = logits.sort(descending=True)
    beyond = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) > p
    return logits.scatter(-1, index, ordered.masked_fill(beyond, -torch.inf))


@torch.no_grad()
def write(model, length=10):
    ids, state = torch.tensor([[0]]), None
    for _ in range(length):
        logits, state = model(ids[:, -1:], state)
        ids = torch.cat([ids, torch.multinomial(filter_logits(logits[:, -1]).softmax(-1), 1)], 1)
    return ids[0].tolist()


def text(n=12, length=11):
    start = torch.randint(0, V, (n, 1))
    stride = torch.randint(1, 3, (n, 1))
    return (start + stride * torch.arange(length)) % V


model = Bigram()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(30):
    ids = text()
    logits, _ = model(ids[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        perplexity = torch.exp(loss.detach() * (ids.numel() - len(ids)))
        print("step", step, "loss", round(loss.item(), 4), "total perplexity", perplexity.item(), "sample", write(model))

sha = hashlib.sha256()
for p in model.parameters():
    for t in (p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
        sha.update(t.numpy().tobytes())
print("digest", sha.hexdigest())
