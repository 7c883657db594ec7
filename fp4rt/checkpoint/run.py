"""Carry out a plan: one file or a folder, by one worker or many, from the start or from where a run was interrupted.

A folder OUT is claimed by a lock. Shards are written to its state folder; when all are there, they take the place of
the checkpoint that lay in OUT before, if one did, and index, configuration and companions come last. Nothing is written
outside OUT, and no link inside it is followed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Any

from fp4rt.checkpoint.beside import check_beside, describes_alone, refuse_existing
from fp4rt.checkpoint.claim import Claim
from fp4rt.checkpoint.configs import folder_config, hf_quant_config
from fp4rt.checkpoint.folder import (
    CONFIG,
    INDEX_SUFFIX,
    QUANT_CONFIG,
    STATE_FOLDER,
    SUFFIX,
    check_parent,
    companions,
    read_json,
)
from fp4rt.checkpoint.journal import Journal, fingerprint, json_bytes
from fp4rt.checkpoint.plan import Plan, ShardJob
from fp4rt.checkpoint.report import RunReport, ShardReport
from fp4rt.checkpoint.shard import write_shard
from fp4rt.checkpoint.writer import partial_path, write_atomically
from fp4rt.errors import CheckpointError, Fp4rtError

__all__ = ["Progress", "carry_out", "dry_report"]

# Called with the name of what is being done and the bytes of the source that were dealt with.
Progress = Callable[[int], None]


def carry_out(
    plan: Plan,
    target: str | os.PathLike[str],
    *,
    jobs: int = 1,
    executor: Executor | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> RunReport:
    """Write the result of a plan.

    Args:
        plan: what to do.
        target: a file (``*.safetensors``) for a source of one file, else a folder.
        jobs: shards that are written at once by threads of this process.
        executor: any ``concurrent.futures.Executor``, which then spreads the shards; its workers must see the source
            and the target under the same paths.
        overwrite: replace what is there.
        progress: called with bytes of the source as they are dealt with.

    Raises:
        CheckpointError: the target exists, is the source, or is being written by another run; or a tensor is refused.
        OSError: reading or writing failed.
    """
    started = time.monotonic()
    target = Path(target)
    _check_apart(plan, target)
    report = RunReport(
        plan.operation,
        str(plan.store.path),
        str(target),
        plan.outcome.form.name if plan.outcome.form else str(plan.float_dtype),
        notes=list(plan.notes),
    )
    if target.name.endswith(SUFFIX):
        _write_file(plan, target, report, overwrite, progress)
    else:
        _write_folder(plan, target, report, jobs, executor, overwrite, progress)
    report.seconds = time.monotonic() - started
    return report


def _write_file(plan: Plan, target: Path, report: RunReport, overwrite: bool, progress: Progress | None) -> None:
    _check_file(plan, target)
    with Claim(target.with_name(f".{target.name}.lock"), target):
        refuse_existing(target, overwrite)
        beside = target.parent / QUANT_CONFIG
        if not plan.outcome.has_hf_quant_config:
            stale = overwrite and describes_alone(target)
            report.shards.append(write_shard(plan.jobs[0], str(target.parent), target.name, progress))
            if stale:
                beside.unlink(missing_ok=True)
            return
        with Claim(beside.with_name(f".{beside.name}.lock"), beside):
            content = json_bytes(hf_quant_config(plan.outcome))
            check_beside(target, content, overwrite)
            report.shards.append(write_shard(plan.jobs[0], str(target.parent), target.name, progress))
            write_atomically(beside, content)
            report.configuration.append(beside.name)


def _check_file(plan: Plan, target: Path) -> None:
    """A result of several shards takes a folder, and a file's folder is there."""
    if len(plan.store.files) != 1:
        count = len(plan.store.files)
        raise CheckpointError(f"{target}: {plan.store.path} has {count} shards; name a folder to write to")
    check_parent(target)


def _refuse_file(target: Path) -> None:
    if os.path.lexists(target) and not target.is_dir():
        raise CheckpointError(f"{target}: is no folder; name one, or a file that ends in {SUFFIX}")


def _write_folder(
    plan: Plan,
    target: Path,
    report: RunReport,
    jobs: int,
    executor: Executor | None,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    _refuse_file(target)
    copied, left = companions(plan.store.location, target) if plan.store.location.is_folder else ([], [])
    ours = not target.exists()
    target.mkdir(parents=True, exist_ok=True)
    try:
        with _claimed(target, overwrite):
            journal = Journal(target, fingerprint(plan), restart=overwrite)
            try:
                stale = _stale(plan, target)
                for relative in copied:
                    _refuse_links(target, relative)
                done = _run_jobs(plan.jobs, journal, jobs, executor, progress)
            except Fp4rtError:  # the same call would fail again: what it wrote is of no use
                journal.close()
                raise
            report.shards.extend(done[job.file] for job in plan.jobs)
            journal.publish([job.file for job in plan.jobs], stale)
            report.configuration += [*_write_index(plan, target), *_write_configuration(plan, target)]
            for relative in copied:
                _copy_companion(plan.store.location.folder, target, relative)
            journal.close()
    finally:
        if ours and not any(target.iterdir()):
            target.rmdir()
    report.copied, report.left = [str(path) for path in copied], [str(path) for path in left]


def _claimed(target: Path, overwrite: bool) -> Claim:
    """The lock of a folder, taken; its state folder exists afterwards.

    Raises:
        CheckpointError: another run is writing here, or files lie here that no unfinished run explains.
    """
    state = target / STATE_FOLDER
    while True:
        if state.is_symlink():
            raise CheckpointError(f"{state}: is a link; remove it")
        try:
            state.mkdir()
        except FileExistsError:
            pass  # of a run that writes now, or of one that was interrupted
        else:
            try:
                _refuse_foreign(target, overwrite)
            except CheckpointError:
                state.rmdir()
                raise
        try:
            return Claim(state / "lock", target).take()
        except FileNotFoundError:  # a run has just finished and removed its state: look again
            continue


def _refuse_foreign(target: Path, overwrite: bool) -> None:
    foreign = next((path.name for path in target.iterdir() if path.name != STATE_FOLDER), None)
    if foreign is not None and not overwrite:
        raise CheckpointError(f"{target}: is not empty ({foreign}, ...); name another folder, or pass --overwrite")


def _stale(plan: Plan, target: Path) -> list[str]:
    """Files of a checkpoint in ``target`` that the result does not replace, in the order in which to remove them.

    Raises:
        CheckpointError: there are files that no index names, beside which a result without an index is not to be found.
    """
    new = {job.file for job in plan.jobs} | set(_configuration(plan))
    index = plan.store.location.index
    if index is not None:
        new.add(index.name)
    shards = {path.name for path in target.glob(f"*{SUFFIX}")}
    indices = {path.name for path in target.glob(f"*{INDEX_SUFFIX}") if not path.is_symlink()}
    named = {shard for name in indices for shard in _shards_named(target / name)}
    old = shards & named if indices or len(shards) != 1 else shards
    others = sorted(shards - old - new)
    if others and index is None:
        raise CheckpointError(f"{target}: holds {others[0]}, of which no index tells; name a folder of its own")
    configuration = {CONFIG, QUANT_CONFIG} if old or indices else set()
    return [name for part in (old, indices, configuration) for name in sorted(part - new)]


def _shards_named(index: Path) -> list[str]:
    try:
        names = read_json(index).get("weight_map")
    except CheckpointError:
        return []
    return [name for name in names.values() if isinstance(name, str)] if isinstance(names, dict) else []


def _run_jobs(
    jobs: list[ShardJob],
    journal: Journal,
    workers: int,
    executor: Executor | None,
    progress: Progress | None,
) -> dict[str, ShardReport]:
    """Write every shard that no earlier run finished."""
    done: dict[str, ShardReport] = {}
    todo: list[ShardJob] = []
    for job in jobs:
        finished = journal.finished(job.file)
        if finished is None:
            todo.append(job)
            continue
        done[job.file] = finished
        if progress is not None:
            progress(job.nbytes)
    own = ThreadPoolExecutor(workers, "fp4rt-shard") if executor is None else None
    pool = executor if executor is not None else own
    assert pool is not None
    try:
        # Only threads of this process can report single tensors; other executors report whole shards.
        inner = (progress,) if own is not None else ()
        futures = {pool.submit(write_shard, job, str(journal.results), job.file, *inner): job for job in todo}
        try:
            for future in as_completed(futures):
                report = future.result()
                journal.record(report)
                done[report.file] = report
                if own is None and progress is not None:
                    progress(futures[future].nbytes)
        except BaseException:
            for future in futures:
                future.cancel()
            wait(futures)  # nothing writes behind the caller's back
            for future in futures:
                if not future.cancelled() and future.exception() is None:
                    journal.record(future.result())
            raise
    finally:
        if own is not None:
            own.shutdown(cancel_futures=True)
    return done


def _write_index(plan: Plan, target: Path) -> list[str]:
    """The index of a sharded result, in the order of the tensors' names. Returns the names of the files written."""
    index = plan.store.location.index
    if index is None:
        return []
    specs = {spec.name: (job.file, spec.nbytes) for job in plan.jobs for op in job.operations for spec in op.specs()}
    table = {
        "metadata": {"total_size": sum(nbytes for _, nbytes in specs.values())},
        "weight_map": {name: specs[name][0] for name in sorted(specs)},
    }
    assert index.name.endswith(INDEX_SUFFIX)
    write_atomically(target / index.name, json_bytes(table))
    return [index.name]


def _write_configuration(plan: Plan, target: Path) -> list[str]:
    """What serving engines read. Returns the names of the files written."""
    tables = _configuration(plan)
    for name, table in tables.items():
        write_atomically(target / name, json_bytes(table))
    return list(tables)


def _configuration(plan: Plan) -> dict[str, dict[str, Any]]:
    """The configuration that goes with a folder, by the file's name."""
    config = plan.configuration.config
    updated = folder_config(config, plan.outcome, plan.float_dtype)
    tables = {CONFIG: updated} if config or updated else {}
    if plan.outcome.has_hf_quant_config:
        tables[QUANT_CONFIG] = hf_quant_config(plan.outcome)
    return tables


def _copy_companion(source: Path, target: Path, relative: Path) -> None:
    """Copy one file, byte for byte, through no link of the target."""
    _refuse_links(target, relative)
    destination = target / relative
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(destination)
    partial.unlink(missing_ok=True)
    try:
        with open(source / relative, "rb") as reader, open(partial, "xb") as writer:
            shutil.copyfileobj(reader, writer)
        os.replace(partial, destination)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _refuse_links(target: Path, relative: Path) -> None:
    """Raises CheckpointError where a folder of the target, on the way to a file, is a link."""
    folder = target
    for part in relative.parent.parts:
        folder = folder / part
        if folder.is_symlink():
            raise CheckpointError(f"{folder}: is a link; nothing is written through it")


def _check_apart(plan: Plan, target: Path) -> None:
    """The result must not replace what it is made from."""
    location = plan.store.location
    sources = {path.resolve() for path in location.shards}
    inside = not target.name.endswith(SUFFIX) and target.resolve() == location.folder.resolve()
    if target.resolve() in sources or inside:
        raise CheckpointError(f"{target}: is the source itself; name another place")


def dry_report(plan: Plan, target: str | os.PathLike[str], overwrite: bool = False) -> RunReport:
    """What a run would do: the same rows without what only doing it tells.

    Raises:
        CheckpointError: it would be refused for what lies at the target.
    """
    _check_target(plan, Path(target), overwrite)
    form = plan.outcome.form.name if plan.outcome.form else str(plan.float_dtype)
    report = RunReport(plan.operation, str(plan.store.path), str(target), form, notes=list(plan.notes), dry_run=True)
    for job in plan.jobs:
        rows = [operation.run(plan.store)[1] for operation in job.operations]
        report.shards.append(ShardReport(job.file, sum(row.bytes_after for row in rows), "", rows))
    return report


def _check_target(plan: Plan, target: Path, overwrite: bool) -> None:
    """What a run checks before it writes, without the locks."""
    _check_apart(plan, target)
    if target.name.endswith(SUFFIX):
        _check_file(plan, target)
        refuse_existing(target, overwrite)
        if plan.outcome.has_hf_quant_config:
            check_beside(target, json_bytes(hf_quant_config(plan.outcome)), overwrite)
        return
    _refuse_file(target)
    if target.is_dir():
        if not (target / STATE_FOLDER).is_dir():  # of a run that this one would go on with
            _refuse_foreign(target, overwrite)
        _stale(plan, target)
