import torch


def again(opt, saved):
    opt.load_state_dict(saved)  # expect: WN607
