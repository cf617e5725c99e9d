"""A held-out split that is read once, under a protocol that is hashed before the read.

The folder of a study keeps two files, both written before any data are handed out:

    held_out_protocol.json  the protocol with its hash; if another one was forced, both, in order
    held_out_reads.json     every read, and how many were forced; a read that failed has counted
"""

from collections.abc import Callable
import dataclasses
import datetime
import os
import pathlib
import re
from typing import Any, TypeVar

from moejax.report.record import write_json
from moejax.report.registry import (
  canonical_sha256,
  digest,
  is_finite,
  Prediction,
  read_object,
  sealed,
  unsealed,
)

PROTOCOL = "held_out_protocol.json"
READS = "held_out_reads.json"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Protocol:
  """What is decided before the held-out split is read.

  Attributes:
    endpoints: predictions with their thresholds, settled by the rows of the read.
    model: name of the checkpoint.
    weights_sha256: of its weight files.
    data_sha256: of the split.
    discovery: figures of the calibration split that thresholds come from, by name.
  """

  endpoints: tuple[Prediction, ...]
  model: str
  weights_sha256: str
  data_sha256: str
  discovery: dict[str, float]

  def __post_init__(self):
    if not self.endpoints:
      raise ValueError("the protocol has no endpoints, expected at least one.")
    digest(self.endpoints)  # Refuses ids that are there twice.
    for name in ("weights_sha256", "data_sha256"):
      if not re.fullmatch("[0-9a-f]{64}", getattr(self, name)):
        raise ValueError(
          f"the protocol's {name} is {getattr(self, name)!r}, expected 64 hexadecimal digits."
        )
    for name, value in self.discovery.items():
      if not is_finite(value):
        raise ValueError(f"the protocol's discovery has {name} = {value!r}, expected a number.")

  @property
  def sha256(self) -> str:
    """The hash under which it is recorded."""
    return canonical_sha256(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Reading:
  """One read of the split, as recorded.

  Attributes:
    number: from 1.
    protocol_sha256, data_sha256: of the protocol in force and of the split.
    forced: whether it is a second read, or under a protocol that replaced another.
    forced_reads: how many were, up to this one; every row that comes of the data carries it.
    date: UTC, ISO 8601.
  """

  number: int
  protocol_sha256: str
  data_sha256: str
  forced: bool
  forced_reads: int
  date: str


def open_once(
  folder: str | os.PathLike,
  protocol: Protocol,
  data_sha256: str,
  read: Callable[[], T],
  force: bool = False,
) -> tuple[T, Reading]:
  """Records the protocol and the read, then reads the held-out split.

  A first read under the first protocol needs no force and is not marked as forced.

  Args:
    folder: of the study.
    protocol: decided on before.
    data_sha256: of the split as it lies there.
    read: returns the data. If it fails the read counts all the same.
    force: reads again, or under another protocol than before; both are marked for good.

  Returns:
    What `read` returned, and the read as recorded.

  Raises:
    ValueError: other data than the protocol names, or one of the two files was edited, forced or
      not; without force, a second read or another protocol.
  """
  folder = pathlib.Path(folder)
  if data_sha256 != protocol.data_sha256:
    raise ValueError(
      f"the held-out split has sha256 {data_sha256}, the protocol names {protocol.data_sha256}."
    )
  protocols, reads = _recorded(folder)
  another = bool(protocols) and protocols[-1]["sha256"] != protocol.sha256
  if another and not force:
    raise ValueError(f"{folder / PROTOCOL}: holds another protocol; only force replaces it.")
  if reads and not force:
    raise ValueError(
      f"{folder / READS}: the held-out split was read on {reads[-1]['date']}; it is read once, "
      "and a forced read stays marked."
    )
  if another or not protocols:
    protocols.append(sealed(dataclasses.asdict(protocol)))
    write_json(folder / PROTOCOL, dict(protocols=protocols))
  # A protocol replaced by force marks the next read, also if this one ends before it is recorded.
  forced = bool(reads) or len(protocols) > 1
  reading = Reading(
    number=len(reads) + 1,
    protocol_sha256=protocol.sha256,
    data_sha256=data_sha256,
    forced=forced,
    forced_reads=sum(earlier["forced"] for earlier in reads) + forced,
    date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
  )
  reads = [*reads, dataclasses.asdict(reading)]
  write_json(folder / READS, sealed(dict(forced_reads=reading.forced_reads, reads=reads)))
  return read(), reading


def _recorded(folder: pathlib.Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """The protocols and reads of a folder, none of them edited since."""
  protocols, reads = [], []
  path = folder / PROTOCOL
  if path.is_file():
    protocols = read_object(path).get("protocols")
    if not isinstance(protocols, list) or not protocols:
      raise ValueError(f"{path}: expected a list of protocols.")
    for entry in protocols:
      unsealed(f"{path}: the protocol", entry)
  if (folder / READS).is_file():
    reads = unsealed(str(folder / READS), read_object(folder / READS))["reads"]
  hashes = {entry["sha256"] for entry in protocols}
  for earlier in reads:
    if earlier["protocol_sha256"] not in hashes:
      raise ValueError(f"{path}: the protocol of read {earlier['number']} is no longer there.")
  return protocols, reads
