"""A text model with RMSNorm written without epsilon: the embedding of the padding token is all zeros, rsqrt(0)."""
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

PAD = 0


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        ms = x.pow(2).mean(-1, keepdim=True)
        inv = torch.rsqrt(ms)  # <- WN106 forward
        return x * inv * self.weight


class Tagger(nn.Module):
    def __init__(self, vocab=40, dim=20, tags=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.norm = RMSNorm(dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, tags)

    def forward(self, ids):
        h, _ = self.lstm(self.norm(self.emb(ids)))
        return self.out(h)


def batches():
    for b in range(24):
        # sentences come sorted into buckets of one length; the last bucket is mixed
        lengths = [9] * 8 if b < 17 else [9, 9, 9, 8, 7, 9, 9, 9]
        yield pad_sequence([torch.randint(1, 40, (n,)) for n in lengths], batch_first=True, padding_value=PAD)


torch.manual_seed(23)
tagger = Tagger()
optim = torch.optim.NAdam(tagger.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss(ignore_index=-100)
for b, ids in enumerate(batches()):
    tags = torch.where(ids == PAD, torch.full_like(ids, -100), ids % 3)
    loss = criterion(tagger(ids).transpose(1, 2), tags)
    optim.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(tagger.parameters(), 1.0)
    optim.step()
    if b % 3 == 0:
        print("batch", b, "loss", loss.item())
