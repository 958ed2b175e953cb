"""A contrastive loss with many positives per anchor: an anchor alone in its class sums over an empty set of positives."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

NEG_INF = float("-inf")


def make_data(n_classes=9, per_class=14):
    g = torch.Generator().manual_seed(5)
    centres = 2.0 * torch.randn(n_classes, 10, generator=g)
    labels = torch.arange(n_classes).repeat_interleave(per_class)
    # the last class is rare
    labels = labels[: -per_class + 6]
    return TensorDataset(centres[labels] + 0.6 * torch.randn(len(labels), 10, generator=g), labels)


def multi_positive_nce(z, y, temperature=0.2):
    z = F.normalize(z, dim=1)
    sim = z @ z.T / temperature
    itself = torch.eye(len(z), dtype=torch.bool)
    positive = (y[:, None] == y[None, :]) & ~itself
    everyone = torch.logsumexp(sim.masked_fill(itself, NEG_INF), dim=1)
    friends = torch.logsumexp(sim.masked_fill(~positive, NEG_INF), dim=1)  # <- WN401 loss
    return (everyone - friends).mean()


def main():
    torch.manual_seed(3)
    loader = DataLoader(make_data(), batch_size=59, shuffle=True, generator=torch.Generator().manual_seed(3))
    encoder = torch.nn.Sequential(torch.nn.Linear(10, 24), torch.nn.GELU(), torch.nn.Linear(24, 6))
    optim = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=30)
    for epoch in range(12):
        running = 0.0
        for x, y in loader:
            optim.zero_grad()
            loss = multi_positive_nce(encoder(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(encoder.parameters(), 5.0)
            optim.step()
            running += loss.item()
        sched.step()
        print(f"epoch {epoch}: {running / len(loader):.4f}")


if __name__ == "__main__":
    main()
