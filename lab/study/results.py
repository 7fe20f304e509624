"""Keeps the reports of finished jobs in a file, so that a study of hours can be interrupted and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import xxhash

from lab.study.plan import Job
from tools.failures import CommandError
from tools.simulate.runs import CapacityReport, CapacitySpec, RunReport, RunSpec

_REPOSITORY: Final = Path(__file__).resolve().parents[2]
_SIMULATOR: Final = _REPOSITORY / "tools" / "simulate"
_PRESENTATION: Final = ("command.py", "parallel.py", "plot.py", "table.py")
"""Modules of the simulator that do not affect figures. Those of the study itself do not either."""


class _Line(msgspec.Struct):
    key: str
    job: Job
    run: RunReport | None = None
    capacity: CapacityReport | None = None


class StudyResults:
    """Reports are keyed by everything that a figure depends on: the job, the content of its trace, and the code of the
    simulator. Reports of other code or traces stay in the file but are not used."""

    def __init__(self, directory: Path) -> None:
        """Raises CommandError if the directory cannot be used or the file in it has another format."""
        self._path = directory / "results.jsonl"
        self._code = _digest_of_code()
        self._traces: dict[str, str] = {}
        self._reports: dict[str, RunReport | CapacityReport] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._read()
        except OSError as error:
            raise CommandError(f"{self._path}: {error.strerror or error}") from error

    def find_run(self, job: RunSpec) -> RunReport | None:
        report = self._reports.get(self._key(job))
        return report if isinstance(report, RunReport) else None

    def find_capacity(self, job: CapacitySpec) -> CapacityReport | None:
        report = self._reports.get(self._key(job))
        return report if isinstance(report, CapacityReport) else None

    def has(self, job: Job) -> bool:
        return self._key(job) in self._reports

    def keep(self, job: Job, report: RunReport | CapacityReport) -> None:
        key = self._key(job)
        self._reports[key] = report
        line = _Line(key, job)
        if isinstance(report, RunReport):
            line.run = report
        else:
            line.capacity = report
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _read(self) -> None:
        content = self._path.read_bytes()
        whole_lines, _, broken = content.rpartition(b"\n")
        if broken:  # the process was killed while writing it
            self._path.write_bytes(whole_lines + b"\n" if whole_lines else b"")
        decoder = msgspec.json.Decoder(_Result)
        for number, text in enumerate(whole_lines.splitlines(), 1):
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError as error:
                raise CommandError(f"{self._path}: line {number}: {error}") from error
            report = line.run or line.capacity
            if report is not None:
                self._reports[line.key] = report

    def _key(self, job: Job) -> str:
        trace = (job.run if isinstance(job, CapacitySpec) else job).trace
        if trace.path not in self._traces:
            try:
                self._traces[trace.path] = xxhash.xxh3_128_hexdigest(Path(trace.path).read_bytes())
            except OSError as error:
                raise CommandError(f"{trace.path}: {error.strerror or error}") from error
        # The path is not hashed, because the same trace may be stored elsewhere.
        source = msgspec.structs.replace(trace, path=self._traces[trace.path])
        if isinstance(job, CapacitySpec):
            job = msgspec.structs.replace(job, run=msgspec.structs.replace(job.run, trace=source))
        else:
            job = msgspec.structs.replace(job, trace=source)
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode([type(job).__name__, job, self._code]))


class _Result(msgspec.Struct):
    """The fields of a _Line that are read back."""

    key: str
    run: RunReport | None = None
    capacity: CapacityReport | None = None


def _digest_of_code() -> str:
    digest = xxhash.xxh3_128()
    simulator = [path for path in _SIMULATOR.rglob("*.py") if path.name not in _PRESENTATION]
    for path in sorted([*simulator, *(_REPOSITORY / "router" / "core").rglob("*.py")]):
        digest.update(path.relative_to(_REPOSITORY).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
