"""The record of a run: what was measured, where, with what; one JSON object."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

METHOD = (
    "us: median over samples of one call. A sample is one CUDA-graph replay divided by its number of calls, after "
    "more than twice the L2 cache was read. Every call has inputs and outputs of its own or, where these are large, "
    "takes turns with as few sets of them as move more than twice the L2 cache. Implementations alternate (ABBA). "
    "Mode graph: as many calls in a graph as last about 1 ms; mode cold: one call. Method stream: the call "
    "synchronises with the host and is timed with it. gbps: compulsory bytes (inputs read once, outputs written "
    "once) over us. pct_copy: gbps over the bandwidth of a 1 GiB device-to-device copy in the same run; of parts, in"
    " the first. ratio: fastest peer over ours in the same run. equal: before timing, ours and every peer agreed "
    "with the torch reference, peers up to rounding."
)

COPY_SPREAD = 0.05


@dataclass
class PeerResult:
    """One peer of one row. ``us`` is None where it did not run; ``absent`` says why.

    ``beside`` is the time of ours in the run that measured the peer, where that was not the run of the row.
    """

    name: str
    us: float | None = None
    p10: float | None = None
    p90: float | None = None
    method: str = ""
    agreement: str | None = None
    difference: str = ""
    note: str = ""
    absent: str = ""
    beside: float | None = None


@dataclass
class Row:
    """One operator, workload, token count and mode."""

    operator: str
    workload: str
    tokens: int
    mode: str
    us: float | None = None
    p10: float | None = None
    p90: float | None = None
    bytes: int = 0
    gbps: float | None = None
    pct_copy: float | None = None
    peer: str | None = None
    peer_us: float | None = None
    ratio: float | None = None
    equal: bool | None = None
    model: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    method: str = ""
    agreement: str | None = None
    difference: str = ""
    error: str = ""
    peers: list[PeerResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peers = [peer if isinstance(peer, PeerResult) else PeerResult(**peer) for peer in self.peers]

    @property
    def key(self) -> tuple:
        """What identifies the row in another record."""
        return self.operator, self.workload, json.dumps(self.params, sort_keys=True), self.tokens, self.mode

    @property
    def family(self) -> str:
        return self.operator.partition(".")[0]

    @property
    def named(self) -> set[str]:
        """Names of the peers."""
        return {peer.name for peer in self.peers}

    def conclude(self, copy_gbps: float) -> None:
        """Fill in what follows from the times."""
        if self.us:
            self.gbps = self.bytes / (self.us * 1e3)
            self.relate(copy_gbps)
        timed = [peer for peer in self.peers if peer.us is not None]
        fastest = min(timed, key=lambda peer: self.ratio_to(peer) or peer.us or math.inf, default=None)
        if fastest is not None:
            self.peer, self.peer_us, self.ratio = fastest.name, fastest.us, self.ratio_to(fastest)
        kinds = [kind for kind in (self.agreement, *(peer.agreement for peer in self.peers)) if kind]
        self.equal = None if not kinds else "different" not in kinds

    def ratio_to(self, peer: PeerResult) -> float | None:
        """Its time over ours, both of the same run."""
        ours = peer.beside or self.us
        return peer.us / ours if peer.us is not None and ours else None

    def adopt(self, other: Row, copy_gbps: float) -> None:
        """Add the peers of the same row of another run."""
        self.peers += [replace(peer, beside=peer.beside or other.us) for peer in other.peers]
        self.conclude(copy_gbps)

    def relate(self, copy_gbps: float) -> None:
        """Refer to this copy bandwidth."""
        if self.gbps is not None:
            self.pct_copy = 100 * self.gbps / copy_gbps


@dataclass
class ChainRow:
    """The operators of one decoder layer at one token count, as one graph: ours against an engine's own kernels."""

    chain: str
    tokens: int
    us: float | None = None
    p10: float | None = None
    p90: float | None = None
    peer: str = ""
    peer_us: float | None = None
    ratio: float | None = None
    equal: bool | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def key(self) -> tuple:
        return self.chain, self.peer, self.tokens


@dataclass
class Record:
    """Everything one run found out."""

    device: str
    driver: str
    versions: dict[str, str]
    revision: str
    date: str
    copy_gbps: float
    floor_us: float
    floors: dict[str, float] = field(default_factory=dict)
    l2_bytes: int = 0
    method: str = METHOD
    rows: list[Row] = field(default_factory=list)
    chains: list[ChainRow] = field(default_factory=list)
    aborted: str = ""
    earlier: dict[str, str] = field(default_factory=dict)
    """Operators whose rows are of an earlier record: its revision and date."""

    def __post_init__(self) -> None:
        self.rows = [row if isinstance(row, Row) else Row(**row) for row in self.rows]
        self.chains = [row if isinstance(row, ChainRow) else ChainRow(**row) for row in self.chains]

    def absent(self) -> dict[str, dict[str, int]]:
        """Peers that did not run: engine, reason, number of rows."""
        found: dict[str, dict[str, int]] = {}
        for row in self.rows:
            for peer in row.peers:
                if peer.absent:
                    reasons = found.setdefault(peer.name, {})
                    reasons[peer.absent] = reasons.get(peer.absent, 0) + 1
        return found

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record.

        Raises:
            ValueError: the file is no record of ``tk-serving bench``.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: expected a record of tk-serving bench: {error}") from error


def merge(records: Sequence[Record]) -> Record:
    """One record from the parts of a suite that did not fit into one run, or that compare with different peers.

    A later row replaces an earlier one; if it compares with other peers only, these are added to the earlier one.
    Everything refers to the copy bandwidth of the first part.

    Raises:
        ValueError: the parts come from different devices, drivers, versions or revisions, or their copy bandwidths are
            too far apart for that.
    """
    first, *others = records
    for other in others:
        for name in ("device", "driver", "revision"):
            if getattr(other, name) != getattr(first, name):
                raise ValueError(f"merge: {name}: expected {getattr(first, name)!r}, got {getattr(other, name)!r}")
        for name, version in other.versions.items():
            if first.versions.setdefault(name, version) != version:
                raise ValueError(f"merge: {name}: expected version {first.versions[name]}, got {version}")
        if abs(other.copy_gbps / first.copy_gbps - 1) > COPY_SPREAD:
            raise ValueError(f"merge: copy_gbps: expected about {first.copy_gbps:.0f}, got {other.copy_gbps:.0f}")
        known = {row.key: row for row in first.rows}
        rows = []
        for row in other.rows:
            old = known.get(row.key)
            if old is not None and row.peers and not row.named & old.named:
                old.adopt(row, first.copy_gbps)
            else:
                row.relate(first.copy_gbps)
                rows.append(row)
        first.rows = _replace(first.rows, rows)
        first.chains = _replace(first.chains, other.chains)
        first.aborted = other.aborted
        first.date = max(first.date, other.date)
    return first


def complete(record: Record, earlier: Record) -> Record:
    """The record with the rows of an earlier one for operators, and the chains, that it did not measure at all.

    Those rows keep the copy bandwidth of their own run.

    Raises:
        ValueError: the records come from different devices.
    """
    if earlier.device != record.device:
        raise ValueError(f"earlier: device: expected {record.device!r}, got {earlier.device!r}")
    lacking = {row.operator for row in earlier.rows} - {row.operator for row in record.rows}
    record.rows += [row for row in earlier.rows if row.operator in lacking]
    origin = f"{earlier.revision[:12]}, {earlier.date[:10]}"
    record.earlier |= {operator: earlier.earlier.get(operator, origin) for operator in sorted(lacking)}
    known = {row.key for row in record.chains}
    added = [row for row in earlier.chains if row.key not in known]
    record.chains += added
    record.earlier |= {f"chain {row.chain} at {row.tokens} tokens": origin for row in added}
    return record


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def versions() -> dict[str, str]:
    """Installed versions of everything that takes part."""
    from tk_serving.cli.env import collect

    found = collect()
    versions = {"tk-serving": found["tk-serving"], "python": found["python"]}
    versions |= {name: version for name, version in found["packages"].items() if version}
    if found["cuda"]["torch"]:
        versions["cuda"] = found["cuda"]["torch"]
    return versions


def driver() -> str:
    """Version of the NVIDIA driver, empty if unknown."""
    from tk_serving.cli.env import collect

    devices = collect()["cuda"]["devices"]
    return devices[0].split(", ")[1] if devices else ""


def today() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _replace(old: list, new: list) -> list:
    rows = {row.key: row for row in old}
    rows |= {row.key: row for row in new}
    return list(rows.values())
