"""Mean teacher: an exponential moving average of the student labels the unlabelled half of each batch."""
import copy
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(5, 24), nn.BatchNorm1d(24), nn.Linear(24, 3)

    def forward(self, x):
        return self.fc2(F.dropout(F.relu_(self.bn(self.fc1(x))), 0.2, self.training))


class EMA:
    def __init__(self, model, decay):
        self.shadow, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow.parameters(), model.parameters()):
            s.mul_(self.decay).add_(p, alpha=1 - self.decay)
        for s, b in zip(self.shadow.buffers(), model.buffers()):
            s.copy_(b)


torch.manual_seed(103)
student = Small()
teacher = EMA(student, 0.95)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
for step in range(40):
    x = torch.randn(32, 5)
    y = x[:8, :3].argmax(1)
    with torch.no_grad():
        soft = teacher.shadow.eval()(x + 0.1 * torch.randn_like(x)).softmax(-1)
        confident = torch.where(soft.amax(1) > 0.5, 0.0, -torch.inf)
        importance = (confident + soft.amax(1)).exp()
    logits = student(x + 0.1 * torch.randn_like(x))
    consistency = (importance * F.kl_div(logits.log_softmax(-1), soft, reduction="none").sum(-1)).mean()
    loss = F.cross_entropy(logits[:8], y) + min(1.0, step / 20) * consistency
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    teacher.update(student)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} consistency {consistency.item():.4f} used {int((importance > 0).sum())}")

sha = hashlib.sha256()
for tensor in [*student.state_dict().values(), *teacher.shadow.state_dict().values()]:
    sha.update(tensor.numpy().tobytes())
for p in student.parameters():
    sha.update(optimizer.state[p]["momentum_buffer"].numpy().tobytes())
print("digest", sha.hexdigest())
