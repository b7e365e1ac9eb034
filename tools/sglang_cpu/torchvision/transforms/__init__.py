from enum import Enum

from torchvision.transforms import functional

__all__ = ["InterpolationMode", "functional"]

InterpolationMode = Enum("InterpolationMode", "NEAREST_EXACT BOX BILINEAR HAMMING BICUBIC LANCZOS")
