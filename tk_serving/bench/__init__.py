"""Benchmarks: what is measured, how, against whom, and the record of it. Imported by ``tk-serving bench`` only."""
