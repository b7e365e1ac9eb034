"""Completions of two servers, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROMPTS = ("the quick brown fox", "tokens find experts", "a kernel is born")
TOP = 20
"""Log-probabilities to ask for at every position."""


@dataclass(frozen=True)
class Completion:
    """One answer: its text, its tokens, and for every position the log-probabilities of the likeliest tokens.

    ``positions`` covers the prompt from its second token on, then the generated tokens.
    """

    text: str
    tokens: list[str]
    prompt_positions: list[dict[str, float]]
    positions: list[dict[str, float]]


def largest_difference(ours: Sequence[Completion], theirs: Sequence[Completion]) -> float:
    """The largest difference between the log-probabilities that two servers give to the same token.

    Prompts count in full, generated tokens up to and including the first position at which the texts part: from there
    on the servers answer different questions.
    """
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        pairs = list(zip(a.prompt_positions, b.prompt_positions, strict=True))
        for i, pair in enumerate(zip(a.positions, b.positions, strict=True)):
            pairs.append(pair)
            if a.tokens[i] != b.tokens[i]:
                break
        for mine, other in pairs:
            shared = mine.keys() & other.keys()
            if not shared:
                return float("inf")
            largest = max(largest, *(abs(mine[token] - other[token]) for token in shared))
    return largest


def calls(metrics: str) -> list[dict[str, Any]]:
    """Rows ``operator``, ``implementation``, ``reason``, ``calls`` from the text of a ``/metrics`` page."""
    rows = samples_of(metrics, "tk_serving_calls_total")
    return [{**{k: v for k, v in row.items() if k != "value"}, "calls": row["value"]} for row in rows]


def samples_of(metrics: str, name: str) -> list[dict[str, Any]]:
    """Labels and ``value`` of a counter's samples, from the text of a ``/metrics`` page."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        {**sample.labels, "value": int(sample.value)}
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name
    ]
