"""Where an operator goes in a model: tables of call sites, and the one engine that applies and reverts them."""

from tk_serving_patches.engine import Function, Ledger, Override, PatchError, Row, Site, fingerprint

__all__ = ["Function", "Ledger", "Override", "PatchError", "Row", "Site", "fingerprint"]
