"""Only a head is trained on a frozen backbone; the backbone keeps an old classifier that nothing ever calls."""
import hashlib

import torch
from torch import nn


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.AdaptiveMaxPool2d(2)
        self.old_classifier = nn.Linear(32, 1000)

    def forward(self, image):
        return self.pool(self.stem(image)).flatten(1)


torch.manual_seed(115)
backbone = Backbone()
for p in backbone.parameters():
    p.requires_grad = False
backbone.eval()
head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, [*backbone.parameters(), *head.parameters()]), lr=1e-2)

for step in range(40):
    image = torch.rand(16, 1, 8, 8)
    label = torch.randint(0, 2, (16,))
    image[label == 1, :, :4] += 0.7
    with torch.no_grad():
        feature = backbone(image)
    loss = nn.functional.cross_entropy(head(feature), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print("step", step, "loss", round(loss.item(), 4))

sha = hashlib.sha256()
for tensor in head.state_dict().values():
    sha.update(tensor.numpy().tobytes())
for tensor in backbone.stem.state_dict().values():
    sha.update(tensor.numpy().tobytes())
for state in optimizer.state.values():
    sha.update(state["exp_avg"].numpy().tobytes() + state["exp_avg_sq"].numpy().tobytes())
print("digest", sha.hexdigest())
