"""A linear-chain CRF written by hand: the gold path of one sentence takes a transition that the model forbids."""
import torch
from torch import nn

TAGS = ["O", "B", "I"]


class ChainCRF(nn.Module):
    def __init__(self, n_feat):
        super().__init__()
        self.emit = nn.Linear(n_feat, len(TAGS))
        self.move = nn.Parameter(torch.zeros(len(TAGS), len(TAGS)))
        forbidden = torch.zeros(len(TAGS), len(TAGS), dtype=torch.bool)
        forbidden[0, 2] = True  # I may not follow O
        self.register_buffer("forbidden", forbidden)

    def path_score(self, emission, move, tags):
        score = emission[0, tags[0]]
        for i in range(1, len(tags)):
            score = score + emission[i, tags[i]] + move[tags[i - 1], tags[i]]  # <- WN405 forward
        return score

    def partition(self, emission, move):
        alpha = emission[0]
        for row in emission[1:]:
            alpha = torch.logsumexp(alpha[:, None] + move + row[None], dim=0)
        return torch.logsumexp(alpha, dim=0)

    def forward(self, sentence, tags):
        move = self.move.masked_fill(self.forbidden, float("-inf"))
        emission = self.emit(sentence)
        return self.partition(emission, move) - self.path_score(emission, move, tags)


def sentences(gen, n=24):
    for number in range(n):
        tags = [1, 2, 0, 1, 2, 2, 0, 0] if number != 15 else [1, 0, 2, 2, 0, 1, 0, 0]  # one was annotated in another scheme
        yield torch.randn(len(tags), 6, generator=gen), torch.tensor(tags)


torch.manual_seed(50)
crf = ChainCRF(6)
opt = torch.optim.SGD(crf.parameters(), lr=0.05)
for number, (words, tags) in enumerate(sentences(torch.Generator().manual_seed(51))):
    loss = crf(words, tags)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if number % 6 == 0:
        print(f"sentence {number:2d}: {loss.item():.4f}")
