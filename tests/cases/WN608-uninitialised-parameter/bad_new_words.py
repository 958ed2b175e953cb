"""The vocabulary grows during training: the new embedding rows are new_empty memory that nobody fills."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.use_deterministic_algorithms(True)  # unfilled memory reads as NaN, not as last week's leftovers
torch.manual_seed(52)


class LanguageModel(nn.Module):
    def __init__(self, words, dim=12):
        super().__init__()
        self.table = nn.Parameter(torch.randn(words, dim) * 0.3)
        self.cell = nn.GRU(dim, dim, batch_first=True)

    def grow(self, extra):
        old = self.table.data
        new = old.new_empty(old.shape[0] + extra, old.shape[1])
        new[: old.shape[0]] = old
        self.table = nn.Parameter(new)

    def forward(self, ids):
        vectors = F.embedding(ids, self.table)  # <- WN608 parameter
        states, _ = self.cell(vectors)
        return states @ self.table[:20].t()


def sentences(words, n=12, length=8):
    first = torch.randint(0, words, (n, 1))
    return (first + 3 * torch.arange(length)) % words


model = LanguageModel(20)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
words = 20
for step in range(24):
    if step == 10:
        words = 24
        model.grow(4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        print("vocabulary is now", words)
    ids = sentences(words)
    logits = model(ids[:, :-1])
    target = ids[:, 1:].masked_fill(ids[:, 1:] >= 20, -100)
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step}: {loss.item():.4f}")
