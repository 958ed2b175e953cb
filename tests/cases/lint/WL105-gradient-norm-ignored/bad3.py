import torch


def train(model, data, opt):
    for x in data:
        model(x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: WL105
        opt.step()
