import torch


def train(model, data, opt):
    for epoch in range(3):
        for x in data:
            model(x).mean().backward()
            opt.step()
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, "last.pt")  # expect: WL108
