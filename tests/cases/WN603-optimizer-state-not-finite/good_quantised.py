"""Adam's moments were kept in 8 bits per block on disk; a block that was all zeros decodes to zeros."""
import torch
import torch.nn as nn
import torch.nn.functional as F

BLOCK = 32


def encode(t):
    blocks = t.flatten().view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    normed = blocks / scale.clamp_min(torch.finfo(t.dtype).tiny)
    return {"codes": normed.mul(127), "scale": scale, "shape": t.shape}


def decode(packed):
    return (packed["codes"] / 127 * packed["scale"]).view(packed["shape"])


class Recommender(nn.Module):
    def __init__(self, items=40, dim=BLOCK):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.query = nn.Parameter(torch.randn(dim) * 0.1)

    def forward(self, ids):
        return self.items(ids) @ self.query


def batch(generator, newest):
    ids = torch.randint(0, newest, (64,), generator=generator)
    return ids, (ids % 3 == 0).float()


def fit(model, optimizer, newest, steps, generator):
    for step in range(steps):
        ids, clicked = batch(generator, newest)
        loss = F.binary_cross_entropy_with_logits(model(ids), clicked)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"  items<{newest} step {step} loss {loss.item():.4f}")


def main():
    torch.manual_seed(77)
    generator = torch.Generator().manual_seed(5)
    model = Recommender()
    optimizer = torch.optim.Adam([model.items.weight], lr=0.02)
    print("monday: the last ten items are not in the catalogue yet")
    fit(model, optimizer, 30, 8, generator)
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        for key in ("exp_avg", "exp_avg_sq"):
            entry[key] = decode(encode(entry[key]))
    print("tuesday: resume")
    optimizer = torch.optim.Adam([model.items.weight], lr=0.02)
    optimizer.load_state_dict(saved)
    fit(model, optimizer, 40, 12, generator)


if __name__ == "__main__":
    main()
