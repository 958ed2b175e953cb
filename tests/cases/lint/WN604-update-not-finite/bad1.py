import torch


def main(net):
    model = net().half()
    return torch.optim.Adam(model.parameters(), lr=1e-3)  # expect: WN604
