"""What runs found: kept as JSON with its provenance, and published in Results.md.

Record    what one run of a suite found, as JSON on disk
Results   Results.md alone, which is rendered from the records
"""

from common.record.provenance import (
    describe_machine,
    describe_run,
    git_commit,
    machine,
    now,
    provenance,
    sources_hash,
)
from common.record.record import Record, Stage, earned, merge, write_json
from common.record.results import POINTS, checks_passed, render, summary

__all__ = [
    "POINTS",
    "Record",
    "Stage",
    "checks_passed",
    "describe_machine",
    "describe_run",
    "earned",
    "git_commit",
    "machine",
    "merge",
    "now",
    "provenance",
    "render",
    "sources_hash",
    "summary",
    "write_json",
]
