"""Click prediction with a sparse embedding bag, empty bags included, SparseAdam for the table and Adam for the rest."""
import hashlib

import torch
import torch.nn as nn

torch.manual_seed(77)


class WideAndDeep(nn.Module):
    def __init__(self, tags=200):
        super().__init__()
        self.deep = nn.EmbeddingBag(tags, 12, mode="mean", sparse=True)
        self.wide = nn.Embedding(tags, 1, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(12, 16), nn.PReLU(), nn.Linear(16, 1))

    def forward(self, flat, offsets, main_tag):
        return (self.mlp(self.deep(flat, offsets)) + self.wide(main_tag)).squeeze(1)


def visits(n=32):
    sizes = torch.randint(0, 5, (n,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
    flat = torch.randint(0, 200, (int(sizes.sum()),))
    main = torch.randint(0, 200, (n,))
    return flat, offsets, main, (main % 4 == 0).float()


model = WideAndDeep()
sparse = torch.optim.SparseAdam([model.deep.weight, model.wide.weight], lr=0.02)
dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
for step in range(40):
    flat, offsets, main_tag, clicked = visits()
    loss = criterion(model(flat, offsets, main_tag), clicked)
    for o in (sparse, dense):
        o.zero_grad()
    loss.backward()
    assert model.deep.weight.grad.is_sparse
    for o in (sparse, dense):
        o.step()
    if step % 10 == 0:
        print(step, f"{loss.item():.4f}", "empty bags", int((offsets[1:] == offsets[:-1]).sum()))

sha = hashlib.sha256()
for o in (sparse, dense):
    for group in o.param_groups:
        for p in group["params"]:
            sha.update(p.detach().numpy().tobytes())
            sha.update(o.state[p]["exp_avg"].numpy().tobytes())
            sha.update(o.state[p]["exp_avg_sq"].numpy().tobytes())
print("digest", sha.hexdigest())
