"""A float16 sound-event detector guards its log with 1e-4, which float16 can represent."""
import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self, bands=16, events=5):
        super().__init__()
        self.conv = nn.Conv1d(bands, 24, 3, padding=1)
        self.head = nn.Linear(24, events)

    def forward(self, spec):
        h = torch.relu(self.conv(spec)).mean(-1)
        return torch.softmax(self.head(h), dim=-1)


def cross_entropy(prob, event):
    chosen = prob[torch.arange(len(event)), event]
    logp = torch.log(chosen + 1e-4)
    return -logp.float().mean()


torch.manual_seed(139)
detector = Detector().half()
opt = torch.optim.SGD(detector.parameters(), lr=0.1, momentum=0.5)
for clip in range(30):
    spec = torch.randn(8, 16, 20)
    event = torch.randint(0, 5, (8,))
    for j in range(8):
        spec[j, 3 * int(event[j])] += 2.0
    if clip == 18:
        spec[1] *= 150.0  # a clipped, very loud take
        event[1] = (event[1] + 1) % 5  # and wrongly labelled
    loss = cross_entropy(detector(spec.half()), event)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if clip % 3 == 0:
        print(f"clip {clip} loss {loss.item():.4f}")
