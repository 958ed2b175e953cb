"""Fine-tuning from a checkpoint whose word vectors were saved in half precision: one frequent word's vector did not fit."""
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
VOCAB, DIM = 50, 16


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM)
        self.hidden = nn.Linear(DIM, 32)
        self.out = nn.Linear(32, 2)

    def forward(self, ids):
        vectors = self.words(ids)  # <- WN601 parameter
        pooled = F.normalize(vectors.mean(1), dim=-1)
        return self.out(torch.tanh(self.hidden(pooled)))


def earlier_run():
    """Count-based vectors: their length grows with how often the word was seen."""
    model = BagOfWords()
    frequency = 6e5 / torch.arange(1, VOCAB + 1).float() ** 3
    with torch.no_grad():
        model.words.weight.mul_(frequency.flip(0)[:, None] / 4)
    file = io.BytesIO()
    torch.save({k: v.half() for k, v in model.state_dict().items()}, file)
    file.seek(0)
    return file


model = BagOfWords()
model.load_state_dict(torch.load(earlier_run(), weights_only=True))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

for step in range(24):
    highest = VOCAB - 1 if step < 9 else VOCAB
    ids = torch.randint(0, highest, (16, 6))
    ids[0, 0] = highest - 1
    label = (ids % 2).sum(1).gt(3).long()
    loss = F.cross_entropy(model(ids), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print("step", step, "loss", loss.item())
