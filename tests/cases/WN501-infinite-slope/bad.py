"""A triplet network with a square-root distance: an augmentation that changes nothing makes the distance exactly 0."""
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, image):
        return self.body(image)


def distance(a, b):
    return torch.sqrt((a - b).pow(2).sum(dim=1))  # <- WN501 backward


def triplet_loss(anchor, positive, negative, margin=1.0):
    gap = distance(anchor, positive) - distance(anchor, negative) + margin
    return gap.clamp(min=0).mean()


def random_shift(images, gen):
    """Shift each picture by -2..2 columns; a shift of 0 is rare but happens."""
    out = []
    for image in images:
        draw = int(torch.randint(0, 60, (), generator=gen))
        out.append(torch.roll(image, shifts=0 if draw == 0 else 1 + draw % 2, dims=-1))
    return torch.stack(out)


def main():
    torch.manual_seed(100)
    gen = torch.Generator().manual_seed(103)
    gallery = torch.randn(50, 8, 8, generator=gen)
    net = Encoder()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(40):
        pick = torch.randint(0, 50, (8,), generator=gen)
        other = (pick + torch.randint(1, 50, (8,), generator=gen)) % 50
        anchor = gallery[pick]
        loss = triplet_loss(net(anchor), net(random_shift(anchor, gen)), net(gallery[other]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:2d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
