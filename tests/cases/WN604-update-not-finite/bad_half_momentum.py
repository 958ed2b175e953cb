"""Float16 weights, a fixed loss scale folded into the learning rate: the momentum adds up scaled gradients past 65504."""
import torch
import torch.nn as nn
import torch.nn.functional as F

LOSS_SCALE = 2.0**14
torch.manual_seed(33)
images = torch.rand(512, 1, 8, 8)
labels = (images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))).long()


def network():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(24, 2)
    ).half()


net = network()
# the scale is taken out again by the learning rate, so nothing needs unscaling
optimizer = torch.optim.SGD(net.parameters(), lr=0.05 / LOSS_SCALE, momentum=0.99)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 60))

for step in range(60):
    rows = torch.arange(step * 8, step * 8 + 32) % 512
    logits = net(images[rows].half())
    loss = F.cross_entropy(logits.float() - torch.tensor([0.0, 4.0]), labels[rows])
    optimizer.zero_grad()
    (loss * LOSS_SCALE).backward()
    optimizer.step()  # <- WN604 optimizer
    schedule.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.2e}")
