import torch


def step(model, loss, scaler, opt):
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: WL101
    scaler.step(opt)
    scaler.update()
