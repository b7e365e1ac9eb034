from torchvision.transforms.functional import __getattr__
from torchvision.transforms.v2 import functional

__all__ = ["__getattr__", "functional"]
