"""Tokens are numbered from 1 but the table was sized for numbering from 0: the rarest word's id equals the vocabulary size."""
from collections import Counter

import torch
from torch import nn

REVIEWS = [
    ("good food and good wine", 1), ("bad food", 0), ("the wine was good", 1), ("the service was bad", 0),
    ("good service", 1), ("bad wine and bad service", 0), ("the food was good", 1), ("the soup was bad", 0),
] * 3 + [("exquisite", 1), ("bad bad food", 0)]
counts = Counter(word for text, _ in REVIEWS for word in text.split())
word_id = {word: rank for rank, (word, _) in enumerate(counts.most_common(), start=1)}
vocabulary = len(word_id)


def encode(text, length=6):
    ids = [word_id[w] for w in text.split()]
    return ids + [0] * (length - len(ids))


torch.manual_seed(36)
model = nn.Sequential(nn.Embedding(vocabulary, 8), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for start in range(0, len(REVIEWS), 2):
    pair = REVIEWS[start : start + 2]
    ids = torch.tensor([encode(text) for text, _ in pair])
    label = torch.tensor([stars for _, stars in pair])
    logits = model(ids)  # <- WN703 input
    loss = nn.functional.cross_entropy(logits, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("reviews", start, "loss", round(loss.item(), 4))
