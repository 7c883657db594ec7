"""Runs into folders: interrupted, resumed, shared out, attacked. Same bytes in every case, nothing outside OUT."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from bench.checkpoint_model import TINY, write_model
from fp4rt import checkpoint
from fp4rt.checkpoint import run as running
from fp4rt.checkpoint.claim import Claim
from fp4rt.checkpoint.shard import write_shard
from fp4rt.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("FP4RT_TEST_KILLS", "5"))


def test_any_number_of_jobs_gives_the_same_bytes(model, quantized, tmp_path, read_tree):
    checkpoint.quantize(model, tmp_path / "q", jobs=3)
    assert read_tree(tmp_path / "q") == read_tree(quantized)


def test_thread_executor_gives_the_same_bytes(model, quantized, tmp_path, read_tree):
    with ThreadPoolExecutor(2) as executor:
        checkpoint.quantize(model, tmp_path / "q", executor=executor)
    assert read_tree(tmp_path / "q") == read_tree(quantized)


@pytest.mark.slow
def test_process_executor_gives_the_same_bytes(model, quantized, tmp_path, read_tree):
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        report = checkpoint.quantize(model, tmp_path / "q", executor=executor)
    assert read_tree(tmp_path / "q") == read_tree(quantized)
    assert all(row.sqnr_db is not None for row in report.tensors if row.action == "quantized")


def test_dask_workers_give_the_same_bytes(model, quantized, tmp_path, read_tree):
    distributed = pytest.importorskip("distributed", reason="needs dask.distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, local_directory=str(tmp_path)
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        checkpoint.quantize(model, tmp_path / "q", executor=client.get_executor())
        assert len(client.scheduler_info()["workers"]) == 2
    assert read_tree(tmp_path / "q") == read_tree(quantized)


def stop_after(monkeypatch, count, error=RuntimeError):
    """Let ``count`` shards be written, then fail."""
    done = []

    def failing(*arguments):
        if len(done) == count:
            raise error("stopped")
        done.append(arguments[0].file)
        return write_shard(*arguments)

    monkeypatch.setattr(running, "write_shard", failing)
    return done


def test_interrupted_run_is_finished_and_keeps_what_was_done(model, quantized, tmp_path, monkeypatch, read_tree):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(RuntimeError):
            checkpoint.quantize(model, tmp_path / "q")
    assert (tmp_path / "q" / ".fp4rt").is_dir()
    assert not (tmp_path / "q" / "model.safetensors.index.json").exists()
    with monkeypatch.context() as patch:
        written = stop_after(patch, 99)
        report = checkpoint.quantize(model, tmp_path / "q")
    assert len(written) == 2
    assert [shard.resumed for shard in report.shards] == [True, True, False, False]
    assert all(row.sqnr_db for row in report.tensors if row.action == "quantized")
    assert read_tree(tmp_path / "q") == read_tree(quantized)


def test_refused_run_removes_what_it_had_written(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2, CheckpointError)
        with pytest.raises(CheckpointError, match="stopped"):
            checkpoint.quantize(model, tmp_path / "q", jobs=2)
    assert not (tmp_path / "q").exists()
    (tmp_path / "q").mkdir()
    with monkeypatch.context() as patch:
        stop_after(patch, 2, CheckpointError)
        with pytest.raises(CheckpointError, match="stopped"):
            checkpoint.quantize(model, tmp_path / "q")
    assert not any((tmp_path / "q").iterdir())


@pytest.mark.parametrize("harm", ["flip a byte", "cut it short", "remove it", "replace it by a link"])
def test_harmed_shard_is_written_again(harm, model, quantized, tmp_path, monkeypatch, read_tree):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(RuntimeError):
            checkpoint.quantize(model, tmp_path / "q")
    shard = sorted((tmp_path / "q" / ".fp4rt" / "new").glob("model-*"))[0]
    content = bytearray(shard.read_bytes())
    shard.unlink()
    if harm == "flip a byte":
        content[-1] ^= 1
        shard.write_bytes(content)
    elif harm == "cut it short":
        shard.write_bytes(content[:-1])
    elif harm == "replace it by a link":
        (tmp_path / "elsewhere").write_bytes(content)
        shard.symlink_to(tmp_path / "elsewhere")
    checkpoint.quantize(model, tmp_path / "q")
    assert read_tree(tmp_path / "q") == read_tree(quantized)
    assert not any(path.is_symlink() for path in (tmp_path / "q").iterdir())


def test_unfinished_output_of_another_run_is_not_mixed_in(model, quantized, tmp_path, monkeypatch, read_tree):
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(RuntimeError):
            checkpoint.quantize(model, tmp_path / "q")
    other = checkpoint.QuantizeOptions(method=checkpoint.Method("mse"))
    with pytest.raises(CheckpointError, match="unfinished output of another run"):
        checkpoint.quantize(model, tmp_path / "q", other)
    checkpoint.quantize(model, tmp_path / "q", other, overwrite=True)
    assert read_tree(tmp_path / "q") != read_tree(quantized)
    assert checkpoint.verify(tmp_path / "q") == []


def whole(folder, read_tree):
    return {name: content for name, content in read_tree(folder).items() if not name.startswith(".fp4rt")}


@pytest.mark.parametrize("error", [RuntimeError, CheckpointError])
def test_what_lies_in_the_target_stays_whole_until_all_is_finished(model, tmp_path, monkeypatch, read_tree, error):
    checkpoint.quantize(model, tmp_path / "q")
    before = read_tree(tmp_path / "q")
    other = checkpoint.QuantizeOptions(method=checkpoint.Method("mse"))
    checkpoint.quantize(model, tmp_path / "wanted", other)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, error)
        with pytest.raises(error):
            checkpoint.quantize(model, tmp_path / "q", other, overwrite=True)
    assert whole(tmp_path / "q", read_tree) == before
    assert (tmp_path / "q" / ".fp4rt").exists() == (error is RuntimeError)  # refused, or to be finished
    assert checkpoint.verify(tmp_path / "q") == []
    report = checkpoint.quantize(model, tmp_path / "q", other, overwrite=True)
    assert sum(shard.resumed for shard in report.shards) == (2 if error is RuntimeError else 0)
    assert read_tree(tmp_path / "q") == read_tree(tmp_path / "wanted")


@pytest.mark.parametrize("where", ["_write_index", "_write_configuration", "_copy_companion"])
def test_a_folder_in_the_middle_of_being_replaced_is_not_read_and_can_be_finished(
    model, tmp_path, monkeypatch, read_tree, where
):
    (source := copy_of(model, tmp_path / "m")).joinpath("notes.txt").write_text("text")
    checkpoint.quantize(source, tmp_path / "q")
    other = checkpoint.QuantizeOptions(method=checkpoint.Method("mse"))
    checkpoint.quantize(source, tmp_path / "wanted", other)

    def fails(*arguments):
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(running, where, fails)
        with pytest.raises(RuntimeError):
            checkpoint.quantize(source, tmp_path / "q", other, overwrite=True)
    with pytest.raises(CheckpointError, match="finish it by the same command"):
        checkpoint.verify(tmp_path / "q")
    report = checkpoint.quantize(source, tmp_path / "q", other, overwrite=True)
    assert all(shard.resumed for shard in report.shards)
    assert read_tree(tmp_path / "q") == read_tree(tmp_path / "wanted")


def one_file(folder):
    """The model as a folder with one file and no index."""
    write_model(folder, TINY, shards=1)
    for index in folder.glob("*.index.json"):
        index.unlink()
    next(folder.glob("*.safetensors")).rename(folder / "model.safetensors")
    return folder


def test_nothing_is_left_of_what_a_result_replaces(model, quantized, tmp_path, read_tree):
    one = one_file(tmp_path / "one")
    steps = {
        "four shards": lambda to, **o: checkpoint.quantize(model, to, **o),
        "floats": lambda to, **o: checkpoint.dequantize(quantized, to, **o),
        "one file": lambda to, **o: checkpoint.quantize(one, to, **o),
        "another format": lambda to, **o: checkpoint.convert(quantized, to, "compressed-tensors", **o),
        "a file again": lambda to, **o: checkpoint.quantize(one, to, checkpoint.QuantizeOptions(form="comfy"), **o),
    }
    for name, step in steps.items():
        step(tmp_path / name)
        step(tmp_path / "q", overwrite=True)
        assert read_tree(tmp_path / "q") == read_tree(tmp_path / name), name


def test_files_of_other_models_are_left_and_refused_beside_a_result_without_an_index(model, tmp_path):
    one, target = one_file(tmp_path / "one"), tmp_path / "q"
    checkpoint.quantize(model, target)
    shard = next(target.glob("model-*.safetensors"))
    shard.rename(target / "another.safetensors")
    with pytest.raises(CheckpointError, match=r"holds another.safetensors, of which no index tells"):
        checkpoint.quantize(one, target, overwrite=True)
    assert not (target / ".fp4rt").exists()
    checkpoint.quantize(model, target, overwrite=True)
    assert (target / "another.safetensors").exists()
    assert checkpoint.verify(target) == []


def test_a_configuration_that_described_a_replaced_file_alone_goes_with_it(model, tmp_path):
    one = one_file(tmp_path / "one") / "model.safetensors"
    checkpoint.quantize(one, tmp_path / "x.safetensors")
    assert (tmp_path / "hf_quant_config.json").exists()
    comfy = checkpoint.QuantizeOptions(form="comfy")
    checkpoint.quantize(one, tmp_path / "x.safetensors", comfy, overwrite=True)
    assert not (tmp_path / "hf_quant_config.json").exists()


def test_a_target_inside_the_source_does_not_go_along_into_itself(model, tmp_path, read_tree):
    source = copy_of(model, tmp_path / "m")
    checkpoint.quantize(source, source / "out")
    first = read_tree(source / "out")
    checkpoint.quantize(source, source / "out", overwrite=True)
    assert read_tree(source / "out") == first


def test_broken_record_is_an_error_and_no_guess(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(RuntimeError):
            checkpoint.quantize(model, tmp_path / "q")
    record = next((tmp_path / "q" / ".fp4rt").glob("model-*.json"))
    record.write_text('{"file": 3}')
    with pytest.raises(CheckpointError, match="record of a finished shard is broken"):
        checkpoint.quantize(model, tmp_path / "q")


def test_second_run_into_a_folder_refuses(model, tmp_path):
    (tmp_path / "q" / ".fp4rt").mkdir(parents=True)
    with (
        Claim(tmp_path / "q" / ".fp4rt" / "lock", tmp_path / "q"),
        pytest.raises(CheckpointError, match=f"another run is writing here .process {os.getpid()} on"),
    ):
        checkpoint.quantize(model, tmp_path / "q")
    checkpoint.quantize(model, tmp_path / "q")


def test_second_run_into_a_file_refuses(tmp_path):
    checkpoint.save(tmp_path / "in.safetensors", {"a.weight": np.ones((2, 16), np.float32)})
    with (
        Claim(tmp_path / ".out.safetensors.lock", tmp_path / "out.safetensors"),
        pytest.raises(CheckpointError, match="another run is writing here"),
    ):
        checkpoint.quantize(tmp_path / "in.safetensors", tmp_path / "out.safetensors")


def test_claim_has_one_holder_at_a_time(tmp_path):
    inside, most, wins = 0, 0, 0
    lock = threading.Lock()

    def contend():
        nonlocal inside, most, wins
        for _ in range(30):
            try:
                with Claim(tmp_path / "lock", tmp_path):
                    with lock:
                        inside += 1
                        most, wins = max(most, inside), wins + 1
                    time.sleep(0.0005)
                    with lock:
                        inside -= 1
            except CheckpointError:
                continue

    threads = [threading.Thread(target=contend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert wins > 0
    assert not (tmp_path / "lock").exists()


def start(model, target, *options):
    command = [sys.executable, "-m", "fp4rt", "quantize", str(model), str(target), "--json", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for_output(process, target, deadline=60.0):
    """Until the run has begun to write."""
    end = time.monotonic() + deadline
    while process.poll() is None and not (target / ".fp4rt").is_dir() and time.monotonic() < end:
        time.sleep(0.002)


@pytest.mark.slow
def test_killed_at_random_moments_a_run_is_finished_with_the_same_bytes(model, quantized, tmp_path, read_tree):
    """Killed at a random moment between its first write and its end; FP4RT_TEST_KILLS says how often."""
    wanted = read_tree(quantized)
    process = start(model, tmp_path / "whole")
    wait_for_output(process, tmp_path / "whole")
    began = time.monotonic()
    process.communicate()
    duration = time.monotonic() - began
    assert read_tree(tmp_path / "whole") == wanted
    rng = random.Random(20250101)
    caught = unfinished = 0
    for round_number in range(KILLS):
        target = tmp_path / str(round_number)
        process = start(model, target)
        wait_for_output(process, target)
        time.sleep(rng.uniform(0, duration))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        caught += (target / ".fp4rt").is_dir()
        unfinished += not (target / "model.safetensors.index.json").exists()
        if (target / ".fp4rt").is_dir() or not target.is_dir():
            checkpoint.quantize(model, target)
        assert read_tree(target) == wanted
    print(f"{KILLS} kills: {caught} while the run was writing, {unfinished} with shards missing")
    assert caught > 0, "no kill hit a run while it wrote; the test shows nothing"


@pytest.mark.slow
def test_two_processes_into_one_folder_leave_one_whole_result(model, quantized, tmp_path, read_tree):
    processes = [start(model, tmp_path / "q") for _ in range(2)]
    errors = [process.communicate()[1].decode() for process in processes]
    codes = [process.returncode for process in processes]
    assert 0 in codes
    for code, error in zip(codes, errors, strict=True):
        if code:
            assert "another run is writing here" in error or "is not empty" in error
            assert "Traceback" not in error
    assert read_tree(tmp_path / "q") == read_tree(quantized)


def copy_of(model, folder):
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


TRAVERSALS = [
    "../outside.safetensors",
    "/etc/passwd",
    "sub/model.safetensors",
    "..",
    "model.safetensors\0.safetensors",
    "..\\outside.safetensors",
    ".hidden.safetensors",
    "model.bin",
    "",
]


@pytest.mark.parametrize("entry", TRAVERSALS)
def test_index_entry_that_is_no_bare_file_name_is_refused(entry, model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    (tmp_path / "outside.safetensors").write_bytes(next(source.glob("*.safetensors")).read_bytes())

    def change(index):
        index["weight_map"][next(iter(index["weight_map"]))] = entry

    edit_index(source, change)
    with pytest.raises(CheckpointError, match="must not leave the folder"):
        checkpoint.quantize(source, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_missing_shard_is_named_with_a_tensor_it_holds(model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"the shard {shard.name} is missing; it holds 'model\."):
        checkpoint.quantize(source, tmp_path / "q")


@pytest.mark.parametrize("others, said", [(0, "'t0'"), (1, "'t0' and 1 more tensor"), (2, "'t0' and 2 more tensors")])
def test_a_missing_shard_says_how_much_it_holds(others, said, tmp_path):
    weight_map = {f"t{i}": "a.safetensors" for i in range(1 + others)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=f"it holds {said}$"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("change", ["extra", "lost", "elsewhere"])
def test_index_that_disagrees_with_the_shards_is_refused(change, model, tmp_path):
    source = copy_of(model, tmp_path / "m")

    def edit(index):
        names = list(index["weight_map"])
        if change == "extra":
            index["weight_map"]["ghost.weight"] = index["weight_map"][names[0]]
        elif change == "lost":
            del index["weight_map"][names[0]]
        else:
            index["weight_map"][names[0]] = index["weight_map"][names[-1]]

    edit_index(source, edit)
    with pytest.raises(CheckpointError, match="index"):
        checkpoint.open(source)


def test_tensor_in_two_shards_is_refused(model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    shards = sorted(source.glob("*.safetensors"))
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(CheckpointError, match="lies in two shards"):
        checkpoint.open(source)


def test_several_files_without_an_index_are_not_guessed_about(model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    (source / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="4 safetensors files .* and no index"):
        checkpoint.open(source)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model-00002-of-00004.safetensors"])
def test_link_out_of_the_source_is_refused(name, model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    secret = tmp_path / "secret"
    (source / name).rename(secret)
    (source / name).symlink_to(secret)
    with pytest.raises(CheckpointError, match="symbolic link that leaves the folder"):
        checkpoint.quantize(source, tmp_path / "q")
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("target", ["content", "nothing"])
def test_configuration_that_links_out_of_the_source_is_read_by_nobody(target, name, quantized, tmp_path):
    source = copy_of(quantized, tmp_path / "m")
    (source / name).unlink()
    if target == "content":
        (tmp_path / "secret").write_text('{"model_type": "llama4"}')
    (source / name).symlink_to(tmp_path / "secret")
    readers = [
        checkpoint.open,
        checkpoint.verify,
        lambda path: checkpoint.compare(quantized, path),
        lambda path: checkpoint.convert(path, tmp_path / "q", "comfy"),
        lambda path: checkpoint.dequantize(path, tmp_path / "q"),
    ]
    for read in readers:
        with pytest.raises(CheckpointError, match=rf"{name}: a symbolic link that leaves the folder"):
            read(source)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_configuration_beside_a_single_file_may_link_only_into_its_folder(inside, tmp_path):
    source = tmp_path / "m"
    source.mkdir()
    checkpoint.save(source / "model.safetensors", {"experts.odd": np.ones((2, 16, 32), np.float32)})
    told = source / "told.json" if inside else tmp_path / "told.json"
    told.write_text('{"model_type": "llama4"}')
    (source / "config.json").symlink_to(told)
    if inside:
        checkpoint.quantize(source / "model.safetensors", tmp_path / "q.safetensors")
        assert checkpoint.open(tmp_path / "q.safetensors").layer("experts.odd").transposed
    else:
        with pytest.raises(CheckpointError, match=r"config\.json: a symbolic link that leaves the folder"):
            checkpoint.quantize(source / "model.safetensors", tmp_path / "q.safetensors")


def test_snapshot_of_the_hugging_face_cache_is_read_through_its_links(model, quantized, tmp_path, read_tree):
    cache = tmp_path / "models--org--llama"
    snapshot = cache / "snapshots" / "0123"
    (cache / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for index, path in enumerate(sorted(model.iterdir())):
        (cache / "blobs" / str(index)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(index))
    checkpoint.quantize(snapshot, tmp_path / "q")
    assert read_tree(tmp_path / "q") == read_tree(quantized)


def test_a_file_in_a_subfolder_of_a_snapshot_has_its_configuration(model, tmp_path):
    inside = tmp_path / "models--org--pipe" / "snapshots" / "0123" / "text_encoder"
    blobs = tmp_path / "models--org--pipe" / "blobs"
    blobs.mkdir(parents=True)
    inside.mkdir(parents=True)
    weights = next(model.glob("*.safetensors")).read_bytes()
    for name, content in (("model.safetensors", weights), ("config.json", b'{"hidden_size": 64}')):
        (blobs / name).write_bytes(content)
        (inside / name).symlink_to(Path("../../../blobs") / name)
    report = checkpoint.quantize(inside / "model.safetensors", tmp_path / "q.safetensors")
    assert any(row.action == "quantized" for row in report.tensors)


def test_link_planted_in_the_target_is_not_written_through(model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    (source / "sub").mkdir()
    (source / "sub" / "notes.txt").write_text("text")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    target = tmp_path / "q"
    target.mkdir()
    (target / "sub").symlink_to(outside)
    (target / "config.json").symlink_to(outside / "precious")
    (target / "model-00001-of-00004.safetensors").symlink_to(outside / "precious")
    with pytest.raises(CheckpointError, match="is a link; nothing is written through it"):
        checkpoint.quantize(source, target, overwrite=True)
    assert [path.name for path in outside.iterdir()] == ["precious"]
    assert (outside / "precious").read_bytes() == b"precious"


def test_state_folder_that_is_a_link_is_refused(model, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / ".fp4rt").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="is a link"):
        checkpoint.quantize(model, tmp_path / "q")
    assert not any((tmp_path / "outside").iterdir())


def test_other_copies_of_the_weights_stay_behind_and_are_listed(model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    (source / "pytorch_model.bin").write_bytes(b"big")
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_bytes(b"big")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("x")
    (source / "modeling.py").write_text("pass")
    report = checkpoint.quantize(source, tmp_path / "q")
    assert sorted(report.left) == ["onnx/model.onnx", "pytorch_model.bin"]
    assert "modeling.py" in report.copied
    assert not (tmp_path / "q" / ".git").exists()
    assert not (tmp_path / "q" / "pytorch_model.bin").exists()


def test_target_that_is_not_empty_is_refused(model, tmp_path):
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "something").write_text("x")
    with pytest.raises(CheckpointError, match="is not empty .something"):
        checkpoint.quantize(model, tmp_path / "q")


def test_target_that_is_the_source_is_refused(model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    with pytest.raises(CheckpointError, match="is the source itself"):
        checkpoint.quantize(source, source, overwrite=True)
    checkpoint.save(tmp_path / "a.safetensors", {"a.weight": np.ones((2, 16), np.float32)})
    with pytest.raises(CheckpointError, match="is the source itself"):
        checkpoint.quantize(tmp_path / "a.safetensors", tmp_path / "a.safetensors", overwrite=True)


def test_shards_do_not_fit_into_one_file(model, tmp_path):
    with pytest.raises(CheckpointError, match="has 4 shards; name a folder"):
        checkpoint.quantize(model, tmp_path / "q.safetensors")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {}}', b"\xff\xfe", b"["])
def test_broken_index_is_refused(content, model, tmp_path):
    source = copy_of(model, tmp_path / "m")
    (source / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        checkpoint.open(source)


def test_report_carries_checksums_of_what_lies_on_the_disk(model, tmp_path):
    import hashlib

    report = checkpoint.quantize(model, tmp_path / "q")
    for shard in report.shards:
        content = (tmp_path / "q" / shard.file).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard.sha256
        assert len(content) == shard.nbytes


def test_progress_counts_every_byte_of_the_source_once(model, tmp_path):
    counted = []
    checkpoint.quantize(model, tmp_path / "q", jobs=2, progress=counted.append)
    assert sum(counted) == sum(array.nbytes for array in checkpoint.open(model).values())
