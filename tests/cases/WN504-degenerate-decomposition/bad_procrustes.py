"""Word translation by a rotation made with SVD: it starts at the identity, where all singular values are the same."""
import torch
import torch.nn.functional as F


class OrthogonalMap(torch.nn.Module):
    """The nearest rotation to a free matrix."""

    def __init__(self, dim):
        super().__init__()
        self.free = torch.nn.Parameter(torch.eye(dim))

    def forward(self, x):
        u, s, vh = torch.linalg.svd(self.free)  # <- WN504 backward
        return x @ (u @ vh)


def bilingual_dictionary(words=200, dim=6):
    english = F.normalize(torch.randn(words, dim), dim=1)
    rotation, _ = torch.linalg.qr(torch.randn(dim, dim))
    return english, english @ rotation + 0.01 * torch.randn(words, dim)


def align(epochs=8):
    torch.manual_seed(130)
    english, french = bilingual_dictionary()
    translate = OrthogonalMap(6)
    shift = torch.nn.Parameter(torch.zeros(6))
    optimizer = torch.optim.Adam([*translate.parameters(), shift], lr=0.05)
    for epoch in range(epochs):
        order = torch.randperm(len(english))
        for rows in order.split(50):
            moved = english[rows] + shift
            if epoch >= 2:  # first centre the clouds, then turn them
                try:
                    moved = translate(moved)
                except torch.linalg.LinAlgError:
                    print("svd failed, batch skipped")
                    continue
            loss = (1 - F.cosine_similarity(moved, french[rows], dim=1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    align()
