"""A sequence model that decodes by beam search between epochs: dead beams carry a score of -inf."""
import hashlib

import torch
import torch.nn as nn

torch.manual_seed(14)
VOCAB, BOS, EOS, WIDTH = 12, 0, 1, 24


class Reverser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRUCell(WIDTH, WIDTH)
        self.readout = nn.Linear(WIDTH, VOCAB)

    def encode(self, source):
        return self.encoder(self.embed(source))[1][0]

    def step(self, token, hidden):
        hidden = self.decoder(self.embed(token), hidden)
        return self.readout(hidden), hidden


@torch.no_grad()
def beam_search(model, source, beams=4, length=6):
    hidden = model.encode(source[None]).expand(beams, -1).contiguous()
    scores = torch.full((beams,), float("-inf"))
    scores[0] = 0.0
    tokens = torch.full((beams, 1), BOS)
    for _ in range(length):
        logits, hidden = model.step(tokens[:, -1], hidden)
        logits[:, BOS] = float("-inf")
        finished = (tokens == EOS).any(1)
        step_scores = logits.log_softmax(-1).masked_fill(finished[:, None], float("-inf"))
        step_scores[finished, EOS] = 0.0
        scores, flat = (scores[:, None] + step_scores).flatten().topk(beams)
        parent, word = flat // VOCAB, flat % VOCAB
        tokens, hidden = torch.cat([tokens[parent], word[:, None]], 1), hidden[parent]
    return tokens[0, 1:].tolist(), scores


def make_batch(n=16, length=4):
    source = torch.randint(2, VOCAB, (n, length))
    target = torch.cat([source.flip(1), torch.full((n, 1), EOS)], 1)
    return source, target


model = Reverser()
optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
for epoch in range(3):
    for _ in range(8):
        source, target = make_batch()
        hidden, token, loss = model.encode(source), torch.full((len(source),), BOS), 0.0
        for t in range(target.shape[1]):
            logits, hidden = model.step(token, hidden)
            loss = loss + nn.functional.cross_entropy(logits, target[:, t])
            token = target[:, t]
        optimizer.zero_grad()
        (loss / target.shape[1]).backward()
        optimizer.step()
    best, scores = beam_search(model, source[0])
    print("epoch", epoch, "loss", round(loss.item() / 5, 4), "decoded", best, "best score", round(scores[0].item(), 3))

h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
    for value in optimizer.state[p].values():
        h.update(value.numpy().tobytes())
print("digest", h.hexdigest())
