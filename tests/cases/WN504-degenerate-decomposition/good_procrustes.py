"""Word translation by a rotation made with the matrix exponential: smooth everywhere, the identity included."""
import torch
import torch.nn.functional as F


class OrthogonalMap(torch.nn.Module):
    """The exponential of a skew-symmetric matrix is a rotation."""

    def __init__(self, dim):
        super().__init__()
        self.free = torch.nn.Parameter(torch.zeros(dim, dim))

    def forward(self, x):
        return x @ torch.matrix_exp(self.free - self.free.T)


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
                moved = translate(moved)
            loss = (1 - F.cosine_similarity(moved, french[rows], dim=1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    align()
