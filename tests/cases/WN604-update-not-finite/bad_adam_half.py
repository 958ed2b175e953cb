"""Adam on float16 weights with the default eps of 1e-8: it is zero in float16, and an idle embedding row is 0 / 0."""
import torch
from torch import nn
import torch.nn.functional as F


class WordModel(nn.Module):
    def __init__(self, vocab=50, dim=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, w):
        return self.out(self.emb(w))


torch.manual_seed(157)
model = WordModel().half()
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(10):
    words = torch.randint(0, 50, (64,))
    logits = model(words)
    loss = F.cross_entropy(logits.float(), (words + 1) % 50)
    opt.zero_grad()
    loss.backward()
    opt.step()  # <- WN604 optimizer
    print(f"step {step} loss {loss.item():.4f}")
