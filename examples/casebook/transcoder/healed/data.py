"""Text from a random grammar, and the noise of masked diffusion: a share t of the tokens is replaced by the mask token."""

import torch


class Grammar:
    """A Markov chain: every token is followed by one of a few others."""

    def __init__(self, vocabulary, branches=4, seed=0):
        self.random = torch.Generator().manual_seed(seed)
        self.next = torch.randint(vocabulary, (vocabulary, branches), generator=self.random)

    def sample(self, length, random):
        token = int(torch.randint(len(self.next), (), generator=random))
        choices = torch.randint(self.next.shape[1], (length,), generator=random).tolist()
        text = []
        for choice in choices:
            text.append(token)
            token = int(self.next[token, choice])
        return torch.tensor(text)


def batches(vocabulary, context, batch, seed, rank=0, world=1):
    """Yield token ids for ever; the ranks draw different texts."""
    grammar = Grammar(vocabulary)
    random = torch.Generator().manual_seed(seed * world + rank)
    while True:
        yield torch.stack([grammar.sample(context, random) for _ in range(batch)])


def add_noise(tokens, mask_token, random):
    """Mask each token with probability t, t even between 0 and 1 for each text."""
    t = torch.rand(len(tokens), 1, generator=random)
    hidden = torch.rand(tokens.shape, generator=random) < t
    return torch.where(hidden, mask_token, tokens)
