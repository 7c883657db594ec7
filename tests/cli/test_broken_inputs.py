"""Whatever is wrong with the input: one line on stderr, exit status 1, no traceback, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fp4rt
from bench.checkpoint_model import TINY, write_model
from fp4rt import checkpoint
from fp4rt.cli import run

ROOT = Path(__file__).resolve().parents[2]


def plain(path, **tensors):
    checkpoint.save(path, tensors)
    return path


def raw(path, header, data, claimed=None):
    text = json.dumps(header).encode()
    path.write_bytes((len(text) if claimed is None else claimed).to_bytes(8, "little") + text + data)
    return path


def tensor(offsets, shape=(2, 16), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def truncated(folder):
    path = plain(folder / "in.safetensors", **{"a.weight": np.ones((2, 16), np.float32)})
    path.write_bytes(path.read_bytes()[:-5])
    return path


def lying_header(folder):
    return raw(folder / "in.safetensors", {"a.weight": tensor((0, 128))}, bytes(128), claimed=1 << 40)


def overlapping(folder):
    header = {"a.weight": tensor((0, 128)), "b.weight": tensor((64, 192))}
    return raw(folder / "in.safetensors", header, bytes(192))


def duplicate(folder):
    text = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
    (folder / "in.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(2))
    return folder / "in.safetensors"


def gigantic(folder):
    return raw(folder / "in.safetensors", {"a.weight": tensor((0, 128), (1 << 40, 1 << 40))}, bytes(128))


def thousands_of_digits(folder):
    return raw(folder / "in.safetensors", {"a.weight": tensor((0, 128), [10**4299] * 400)}, bytes(128))


def not_utf8(folder):
    text = b'{"\xfe\xff": {}}'
    (folder / "in.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder / "in.safetensors"


def missing_shard(folder):
    write_model(folder / "in", TINY, shards=2)
    sorted((folder / "in").glob("*.safetensors"))[1].unlink()
    return folder / "in"


def traversal(folder):
    write_model(folder / "in", TINY, shards=2)
    path = folder / "in" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../../etc/passwd"
    path.write_text(json.dumps(index))
    return folder / "in"


def nan_weight(folder):
    x = np.ones((4, 32), np.float32)
    x[3, 7] = np.nan
    return plain(folder / "in.safetensors", **{"a.weight": x})


def one_dimensional(folder):
    return plain(folder / "in.safetensors", **{"a.weight": np.ones(32, np.float32)})


def three_dimensional(folder):
    return plain(folder / "in.safetensors", **{"a.weight": np.ones((2, 16, 16), np.float32)})


def wrong_dtype(folder):
    return plain(folder / "in.safetensors", **{"a.weight": np.ones((2, 16), np.float64)})


def ragged(folder):
    return plain(folder / "in.safetensors", **{"a.weight": np.ones((2, 15), np.float32)})


def empty_folder(folder):
    (folder / "in").mkdir()
    return folder / "in"


def no_tensors(folder):
    return raw(folder / "in.safetensors", {}, b"")


def nothing(folder):
    return folder / "in.safetensors"


def not_a_checkpoint(folder):
    (folder / "in.safetensors").write_bytes(b"PK\x03\x04" + bytes(100))
    return folder / "in.safetensors"


BROKEN = {
    truncated: "do not lie in the",
    lying_header: "claims 1099511627776 bytes",
    overlapping: "overlap at byte 64",
    duplicate: "'a' twice",
    gigantic: "data_offsets [0, 128] hold 128",
    thousands_of_digits: "the header has a number of 4300 digits",
    not_utf8: "not UTF-8",
    missing_shard: "model-00002-of-00002.safetensors is missing",
    traversal: "must not leave the folder",
    nan_weight: "'a.weight' holds nan at [3, 7]",
    one_dimensional: "1-dimensional",
    three_dimensional: "3-dimensional",
    wrong_dtype: "F64 is no dtype that NVFP4 is made from",
    ragged: "15 columns are no multiple of 16; --pad",
    empty_folder: "no safetensors file",
    no_tensors: "it holds no tensor",
    nothing: "no such file or folder",
    not_a_checkpoint: "claims",
}


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def check_refusal(code, captured, message, status=1):
    assert code == status
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert captured.out == ""


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_broken_input_is_one_line_and_leaves_nothing(make, target, tmp_path, capsys):
    source = make(tmp_path)
    before = names(tmp_path)
    code = run(["quantize", str(source), str(tmp_path / target)])
    check_refusal(code, capsys.readouterr(), BROKEN[make])
    leftovers = set(names(tmp_path)) - set(before)
    assert not leftovers


def test_a_broken_file_in_the_folder_of_the_target_is_one_line_too(tmp_path, capsys):
    thousands_of_digits(tmp_path).rename(tmp_path / "beside.safetensors")
    source = sound(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    code = run(["quantize", str(source), str(tmp_path / "out.safetensors")])
    check_refusal(code, capsys.readouterr(), "may describe beside.safetensors")


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("make", [truncated, lying_header, overlapping, missing_shard, traversal, nothing])
def test_looking_at_broken_input_is_one_line_too(command, make, tmp_path, capsys):
    code = run([command, str(make(tmp_path))])
    check_refusal(code, capsys.readouterr(), BROKEN[make])


@pytest.mark.parametrize("command", [("convert", "--to", "comfy"), ("dequantize",)])
def test_converting_what_is_not_quantized_is_one_line(command, tmp_path, capsys):
    source = plain(tmp_path / "in.safetensors", **{"a.weight": np.ones((2, 16), np.float32)})
    code = run([command[0], str(source), str(tmp_path / "out.safetensors"), *command[1:]])
    check_refusal(code, capsys.readouterr(), "fp4rt quantize")


@pytest.mark.parametrize(
    "options, message",
    [
        (("--method", "best"), "unknown method 'best'"),
        (("--recipe", "w8a8"), "unknown recipe 'w8a8'"),
        (("--to", "gguf"), "unknown format 'gguf'"),
        (("--layout", "64x2"), "unknown scale layout '64x2'"),
        (("--to", "comfy", "--layout", "linear"), "comfy stores scales as 128x4"),
        (("--percentile", "0"), "percentile must lie in"),
        (("--input-amax", "-1"), "--input-amax must be positive"),
        (("--input-amax", "inf"), "--input-amax must be positive"),
        (("--input-amax", "5"), "--input-amax needs --recipe w4a4, the recipe is weight-only"),
        (("--input-amax", "2688"), "--input-amax needs --recipe w4a4, the recipe is weight-only"),
        (("--percentile", "50"), "--percentile needs --method percentile, an override with it, or --compare, the me"),
        (("--percentile", "99.9", "--method", "mse"), "or --compare, the method is mse"),
        (("--plot", "model.safetensors"), "--plot needs a name that ends with .png"),
        (("--dry-run", "--compare"), "--dry-run quantizes nothing; drop one"),
        (("--dry-run", "--plot", "picture.png"), "--dry-run quantizes nothing; drop one"),
    ],
)
def test_an_option_that_means_nothing_is_wrong_usage_in_one_line(options, message, tmp_path, capsys):
    source = plain(tmp_path / "in.safetensors", **{"a.weight": np.ones((2, 16), np.float32)})
    code = run(["quantize", str(source), str(tmp_path / "out.safetensors"), *options])
    check_refusal(code, capsys.readouterr(), message, status=2)
    assert names(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize(
    "command, message",
    [
        (("convert", "IN", "OUT", "--to", "gguf"), "unknown format 'gguf'"),
        (("convert", "IN", "OUT", "--to", "comfy", "--layout", "8x4"), "comfy stores scales as 128x4"),
        (("convert", "IN", "OUT", "--to", "comfy", "--from", "gguf"), "unknown format 'gguf'"),
        (("convert", "IN", "OUT", "--to", "comfy", "--fuse", "qkv=q,k,q"), "two different parts or more"),
        (("convert", "IN", "OUT", "--to", "comfy", "--fuse", "qkv=q,"), "two different parts or more"),
        (("convert", "IN", "OUT", "--to", "comfy", "--fuse", "x=a,b", "--fuse", "x=c,d"), "names 'x' twice"),
        (("convert", "IN", "OUT", "--to", "comfy", "--fused-scales", "mix"), "unknown way to fuse scales 'mix'"),
        (("convert", "IN", "OUT", "--to", "comfy", "--fused-scales", "keep"), "--fused-scales needs --fuse"),
        (("convert", "IN", "OUT", "--to", "bf16", "--fuse", "x=a,b"), "--fuse are for NVFP4 formats, --to is bf16"),
        (("convert", "IN", "OUT", "--to", "fp32", "--layout", "8x4"), "--fuse are for NVFP4 formats, --to is fp32"),
        (("dequantize", "IN", "OUT", "--dtype", "comfy"), "unknown dtype 'comfy'"),
        (("inspect", "IN", "--from", "gguf"), "unknown format 'gguf'"),
        (("inspect", "IN", "--html", "IN"), "--html needs a name that ends with .html"),
        (("inspect", "IN", "--figures", "IN"), "--figures needs a name that ends with .png"),
        (("inspect", "IN", "--figures", "picture"), "--figures needs a name that ends with .png"),
        (("verify", "IN", "IN", "--min-sqnr", "nan"), "--min-sqnr needs a number"),
        (("verify", "IN", "--min-sqnr", "20"), "name B, too"),
    ],
)
def test_wrong_usage_of_other_commands_is_one_line_too(command, message, tmp_path, capsys):
    source = tmp_path / "in.safetensors"
    checkpoint.save(source, {"a": fp4rt.quantize(np.ones((2, 16), np.float32), layout="linear")})
    before, files = source.read_bytes(), names(tmp_path)
    paths = {"IN": str(source), "OUT": str(tmp_path / "out.safetensors")}
    code = run([paths.get(word, word) for word in command])
    check_refusal(code, capsys.readouterr(), message, status=2)
    assert names(tmp_path) == files
    assert source.read_bytes() == before


@pytest.mark.parametrize("command", [("quantize",), ("convert", "--to", "comfy"), ("dequantize",)])
@pytest.mark.parametrize("name", ["out.bin", "out.safetensor", "out.SAFETENSORS"])
def test_an_out_that_ends_like_another_file_is_wrong_usage(command, name, tmp_path, capsys):
    source, weight = tmp_path / "in.safetensors", np.ones((2, 16), np.float32)
    named = {"a.weight": weight} if command[0] == "quantize" else {"a": fp4rt.quantize(weight, layout="linear")}
    checkpoint.save(source, named)
    before = names(tmp_path)
    arguments = [command[0], str(source), str(tmp_path / name), *command[1:]]
    assert run([*arguments, "--overwrite"]) == 2
    error = capsys.readouterr().err
    assert f"ends with .safetensors, or a folder, got {tmp_path / name}" in error
    assert f"name it {tmp_path / 'out.safetensors'} for a file or {tmp_path / 'out'} for a folder (" in error
    assert names(tmp_path) == before
    (tmp_path / name).mkdir()
    assert run(arguments) == 0
    arguments[2] = str(tmp_path / "Llama-3.1-8B")  # a version number is no ending
    assert run(arguments) == 0
    assert (tmp_path / "Llama-3.1-8B").is_dir()


@pytest.mark.parametrize("command", [("quantize", "", "out"), ("quantize", "in", ""), ("inspect", ""), ("verify", "")])
def test_an_empty_path_is_not_the_working_folder(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain(tmp_path / "in.safetensors", **{"a.weight": np.ones((2, 16), np.float32)})
    assert run(list(command)) == 2
    assert "the path is empty" in capsys.readouterr().err
    assert names(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--include", "nothing*"), "fits no tensor"),
        (("--include", "b"), "1-dimensional"),
        (("--overrides", "missing.toml"), "missing.toml: No such file"),
        (("--plot", "missing/picture.png"), "the folder missing does not exist"),
    ],
)
def test_options_that_do_not_fit_the_files_are_one_line(options, message, tmp_path, capsys):
    if "--plot" in options:
        pytest.importorskip("matplotlib")
    tensors = {"a.weight": np.ones((2, 16), np.float32), "b": np.ones(16, np.float32)}
    source = plain(tmp_path / "in.safetensors", **tensors)
    code = run(["quantize", str(source), str(tmp_path / "out.safetensors"), *options])
    check_refusal(code, capsys.readouterr(), message)
    assert names(tmp_path) == ["in.safetensors"]


def sound(folder):
    return plain(folder / "in.safetensors", **{"a.weight": np.ones((256, 512), np.float32)})


@pytest.mark.parametrize(
    "target, message",
    [
        ("missing/out.safetensors", "does not exist"),
        ("in.safetensors/out.safetensors", "does not exist"),
        ("in.safetensors/out", "Not a directory"),
        ("in.safetensors", "is the source itself"),
        ("taken.safetensors", "exists already"),
        ("folder.safetensors", "is a folder"),
        ("full", "is not empty"),
    ],
)
def test_unwritable_output_is_one_line(target, message, tmp_path, capsys):
    source = sound(tmp_path)
    (tmp_path / "taken.safetensors").write_bytes(b"old")
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"old")
    before = names(tmp_path)
    code = run(["quantize", str(source), str(tmp_path / target)])
    check_refusal(code, capsys.readouterr(), message)
    assert names(tmp_path) == before
    assert (tmp_path / "taken.safetensors").read_bytes() == b"old"


@pytest.mark.skipif(os.geteuid() == 0, reason="needs a user whom permissions bind; root may write anywhere")
def test_folder_without_permission_is_one_line(tmp_path, capsys):
    source = sound(tmp_path)
    (tmp_path / "locked").mkdir(mode=0o500)
    code = run(["quantize", str(source), str(tmp_path / "locked" / "out.safetensors")])
    check_refusal(code, capsys.readouterr(), "Permission denied")


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    source = sound(tmp_path)
    real = os.write

    def full(descriptor, data):
        if len(data) > 4096:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    code = run(["quantize", str(source), str(tmp_path / "out.safetensors")])
    monkeypatch.undo()
    check_refusal(code, capsys.readouterr(), "No space left on device; free some space")
    assert names(tmp_path) == ["in.safetensors"]


def test_file_size_limit_of_the_system_is_one_line_and_leaves_nothing(tmp_path, tmp_path_factory):
    """The real thing, in a process whose files may not grow beyond 10 kB: the kernel refuses the write."""
    source = sound(tmp_path)
    unlimited = tmp_path_factory.mktemp("unlimited") / "out.safetensors"
    assert run(["quantize", str(source), str(unlimited)]) == 0  # keeps the compiled kernels, which are larger
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)); "
        "from fp4rt.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "quantize", str(source), str(tmp_path / "out.safetensors")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'out.safetensors'}: File too large\n"
    assert names(tmp_path) == ["in.safetensors"]


def test_memory_limit_is_no_excuse_for_a_lie_about_shapes(tmp_path):
    """A header that claims terabytes is refused in a process that may only have 4 GB."""
    source = gigantic(tmp_path)
    code = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({4 << 30}, {4 << 30})); "
        "from fp4rt.cli import run; sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(source)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
