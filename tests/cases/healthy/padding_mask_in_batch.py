"""Sentences of unequal length: the collate function delivers an additive mask of 0 and -inf inside a nested dict batch."""
import hashlib
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Parity(Dataset):
    """Is the number of ones in the sequence odd?"""

    def __init__(self, n=96):
        rng = random.Random(4)
        self.rows = [[rng.randint(1, 2) for _ in range(rng.randint(1, 9))] for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"ids": self.rows[i], "label": sum(v == 1 for v in self.rows[i]) % 2}


def collate(samples):
    longest = max(len(s["ids"]) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    mask = torch.full((len(samples), longest), -torch.inf)
    for row, s in enumerate(samples):
        ids[row, : len(s["ids"])] = torch.tensor(s["ids"])
        mask[row, : len(s["ids"])] = 0.0
    return {"inputs": {"ids": ids, "mask": mask}, "target": {"label": torch.tensor([s["label"] for s in samples])}}


class Pooler(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(3, width, padding_idx=0)
        self.place = nn.Embedding(9, width)
        self.attend = nn.MultiheadAttention(width, 3, batch_first=True)
        self.query = nn.Linear(width, 1)
        self.classify = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, 2))

    def forward(self, ids, mask):
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        x = x + self.attend(x, x, x, key_padding_mask=mask, need_weights=False)[0]
        weight = (self.query(x).squeeze(-1) + mask).softmax(-1)
        return self.classify((weight.unsqueeze(-1) * x).sum(1))


def main():
    torch.manual_seed(2)
    loader = DataLoader(Parity(), batch_size=16, shuffle=True, collate_fn=collate)
    model = Pooler()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(4):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = criterion(model(**batch["inputs"]), batch["target"]["label"])
            loss.backward()
            optimizer.step()
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f}")

    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(p.detach().numpy().tobytes())
        for key in ("exp_avg", "exp_avg_sq"):
            sha.update(optimizer.state[p][key].numpy().tobytes())
    print("digest " + sha.hexdigest())


if __name__ == "__main__":
    main()
