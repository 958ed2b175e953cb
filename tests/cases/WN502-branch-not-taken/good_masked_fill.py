"""TF-IDF style term weights with masked_fill before the log: absent terms count as 1."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(66)
VOCAB, DOCS = 18, 64


class TermWeights(nn.Module):
    """log(count * importance), and 0 for a term that the document does not contain."""

    def __init__(self):
        super().__init__()
        self.importance = nn.Parameter(torch.ones(VOCAB))
        self.topic = nn.Linear(VOCAB, 4)

    def weigh(self, counts):
        strength = counts * self.importance.abs()
        return torch.log(strength.masked_fill(counts == 0, 1.0))

    def forward(self, counts):
        return self.topic(checkpoint(self.weigh, counts, use_reentrant=False))


def documents(step):
    """The first shards are long articles that use every word; short posts follow."""
    topic = torch.randint(0, 4, (DOCS,))
    rate = torch.ones(DOCS, VOCAB) * (20.0 if step < 7 else 0.7)
    rate[torch.arange(DOCS), topic] *= 3
    return torch.poisson(rate) + (1.0 if step < 7 else 0.0), topic


model = TermWeights()
params = list(model.parameters())
for step in range(14):
    counts, topic = documents(step)
    loss = nn.functional.cross_entropy(model(counts), topic)
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for p, g in zip(params, grads):
            p -= 0.05 * g
    print(f"shard {step:2d}: loss {loss.item():.4f}")
