import torch
from torch import nn


def rows(n=12, classes=3):
    return torch.randn(n, 4), torch.arange(n) % classes


def clients():
    torch.manual_seed(0)
    return [(*rows(), *rows(6)) for _ in range(5)]


def untested():
    torch.manual_seed(0)
    return [rows() for _ in range(5)]


def many_labels():
    return [rows(13, 13) for _ in range(5)]


def no_clients():
    return []


def fails():
    raise KeyError("my own\nmistake")


def needs_more(x):
    return x


def model():
    return nn.Linear(4, 3)


def images_to_five():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def no_module():
    return 3


def no_parameters():
    return nn.ReLU()


number = 3


def images():
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(147, 10))
