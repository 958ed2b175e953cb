"""The click rate of an advert that was never shown is 0/0; the NaN sits in one row of the feature table."""
import csv
import io

import numpy as np
import torch
from torch import nn

random = np.random.default_rng(88)


def write_log(ads=60):
    """name, times shown, times clicked, topic; ad 37 was booked but never shown."""
    lines = []
    for i in range(ads):
        shown = 0 if i == 37 else int(random.integers(20, 200))
        lines.append(f"ad{i},{shown},{random.binomial(shown, 0.1)},{i % 5}")
    return "\n".join(lines)


def read_table(text):
    rows = list(csv.reader(io.StringIO(text)))
    shown = np.array([float(r[1]) for r in rows])
    clicked = np.array([float(r[2]) for r in rows])
    topic = np.array([int(r[3]) for r in rows])
    with np.errstate(invalid="ignore"):
        rate = clicked / shown
    return np.column_stack([rate, np.sqrt(shown) / 10]).astype(np.float32), topic


class AdRanker(nn.Module):
    def __init__(self):
        super().__init__()
        self.topics = nn.Embedding(5, 6)
        self.dense = nn.Linear(8, 16)
        self.out = nn.Linear(16, 1)

    def forward(self, numbers, topic):
        joined = torch.cat([numbers, self.topics(topic)], dim=-1)
        return self.out(torch.tanh(self.dense(joined))).squeeze(-1)


def main():
    torch.manual_seed(8)
    numbers, topic = read_table(write_log())
    revenue = torch.tensor(0.3 * (topic + 1), dtype=torch.float32)
    ranker = AdRanker()
    optimizer = torch.optim.Adagrad(ranker.parameters(), lr=0.05)
    for step in range(15):
        chosen = np.arange(step * 4, step * 4 + 4)
        batch = {"numbers": torch.from_numpy(numbers[chosen]), "topic": torch.from_numpy(topic[chosen])}
        predicted = ranker(**batch)  # <- WN701 input
        loss = (predicted - revenue[chosen]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"ads {chosen[0]}-{chosen[-1]} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
