"""Token tagging with ignore_index: padding is skipped, and per-sentence losses of fully padded rows are 0/0 but only logged."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(61)
PAD = -100


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.conv = nn.Conv1d(16, 32, 3, padding=1)
        self.tag = nn.Linear(32, 4)

    def forward(self, words):
        h = F.relu(self.conv(self.embed(words).transpose(1, 2)), inplace=True)
        return self.tag(h.transpose(1, 2))


def make_batch(n=10, longest=12):
    lengths = torch.randint(0, longest + 1, (n,))
    lengths[0] = 0
    lengths[1] = longest
    words = torch.randint(1, 30, (n, longest))
    tags = (words + words.roll(1, 1)) % 4
    padding = torch.arange(longest)[None] >= lengths[:, None]
    return words.masked_fill(padding, 0), tags.masked_fill(padding, PAD)


model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5, weight_decay=1e-4)
for step in range(40):
    words, tags = make_batch()
    scores = model(words)
    loss = F.nll_loss(F.log_softmax(scores, -1).flatten(0, 1), tags.flatten(), ignore_index=PAD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        with torch.no_grad():
            each = [F.cross_entropy(s, t, ignore_index=PAD).item() for s, t in zip(scores, tags)]
        print(f"step {step} loss {loss.item():.4f} by sentence", [round(v, 2) for v in each[:4]])

h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes() + optimizer.state[p]["momentum_buffer"].numpy().tobytes())
print("digest", h.hexdigest())
