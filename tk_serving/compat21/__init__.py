"""Operators whose 2.1 signature differs from that of the 1.0.0 line, in the 2.1 order, one module for each family."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    _names = vars(importlib.import_module(f"{__name__}.{_module.name}"))
    globals().update({n: v for n, v in _names.items() if getattr(v, "__module__", None) == _names["__name__"]})
