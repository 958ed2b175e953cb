"""CTC for short audio clips: clips with fewer frames than their spelling needs are dropped from the batch."""
import torch
import torch.nn.functional as F
from torch import nn

ALPHABET = "-abcdefghijklmnopqrstuvwxyz"
WORDS = ["cat", "dog", "tree", "apple", "moon", "bell", "zoo", "river", "glass", "sun"]


def spell(word):
    return torch.tensor([ALPHABET.index(c) for c in word])


def frames_needed(word):
    """One frame per letter and a blank between equal neighbours."""
    return len(word) + sum(a == b for a, b in zip(word, word[1:]))


def record(word, frames, gen):
    """Fake filterbank features: each frame shows the letter that is being spoken."""
    letters = spell(word)
    spoken = letters[torch.linspace(0, len(word) - 1e-3, frames).long()]
    return F.one_hot(spoken, 27).float() + 0.1 * torch.randn(frames, 27, generator=gen)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(27, 24, bidirectional=True)
        self.classes = nn.Linear(48, 27)

    def forward(self, frames):
        hidden, _ = self.rnn(frames)
        return self.classes(hidden).log_softmax(dim=-1)


def main():
    torch.manual_seed(3)
    gen = torch.Generator().manual_seed(4)
    model = Recogniser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    for step in range(20):
        chosen = [WORDS[i] for i in torch.randint(0, len(WORDS), (6,), generator=gen).tolist()]
        lengths = [int(torch.randint(8, 14, (), generator=gen)) for _ in chosen]
        if step == 12:
            chosen[2], lengths[2] = "glass", 5  # the speaker was cut off: g-l-a-s-s needs 6 frames
        usable = [n >= frames_needed(w) for w, n in zip(chosen, lengths)]
        chosen, lengths = ([v for v, ok in zip(values, usable) if ok] for values in (chosen, lengths))
        clips = nn.utils.rnn.pad_sequence([record(w, n, gen) for w, n in zip(chosen, lengths)])
        targets = torch.cat([spell(w) for w in chosen])
        target_lengths = torch.tensor([len(w) for w in chosen])
        loss = F.ctc_loss(model(clips), targets, torch.tensor(lengths), target_lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        warmup.step()
        if step % 2 == 0:
            print(f"{step:3d}  ctc {loss.item():.3f}")


if __name__ == "__main__":
    main()
