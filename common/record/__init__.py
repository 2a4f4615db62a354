"""What runs found: kept as JSON with its provenance, and published in Results.md.

Record    what one run of a suite found, as JSON on disk
Results   Results.md alone, which is rendered from the records
refused   why a record is none that a run has written
"""

from common.record.points import POINTS, WORTH, Worth, earned
from common.record.provenance import (
    describe_machine,
    describe_run,
    git_commit,
    machine,
    now,
    provenance,
    sources_hash,
)
from common.record.record import Record, Stage, merge, write_json
from common.record.results import DEVICES, checks_passed, edited, render, summary
from common.record.verify import refused

__all__ = [
    "DEVICES",
    "POINTS",
    "Record",
    "Stage",
    "WORTH",
    "Worth",
    "checks_passed",
    "describe_machine",
    "describe_run",
    "earned",
    "edited",
    "git_commit",
    "machine",
    "merge",
    "now",
    "provenance",
    "refused",
    "render",
    "sources_hash",
    "summary",
    "write_json",
]
