"""An LSTM over packed sequences; max pooling over time fills the padding with -inf, never a whole row."""
import hashlib

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.manual_seed(117)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.out = nn.Linear(24, 2)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, padding_value=float("-inf"))
        return self.out(states.amax(dim=1))


def batch(n=12):
    sequences, labels = [], []
    for _ in range(n):
        s = torch.randn(int(torch.randint(1, 10, ())), 4)
        sequences.append(s)
        labels.append(int(s[:, 0].max() > 0.8))
    lengths = torch.tensor([len(s) for s in sequences])
    return pad_sequence(sequences, batch_first=True, padding_value=float("nan")).nan_to_num(0.0), lengths, torch.tensor(labels)


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(25):
    padded, lengths, labels = batch()
    loss = nn.functional.cross_entropy(model(padded, lengths), labels)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 6 == 0:
        print("step", step, "loss", round(loss.item(), 4), "longest", int(lengths.max()))

h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
    for key in ("exp_avg", "exp_avg_sq"):
        h.update(optimizer.state[p][key].numpy().tobytes())
print("digest", h.hexdigest())
