"""The script form, and the pytest fixture as a kernel's author uses it."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from fp4rt.cli import run
from fp4rt.coverage import CoverageError
from fp4rt.coverage.script import find_checks, run_checks
from fp4rt.errors import ShapeError

SCRIPT = """
import numpy as np
from fp4rt import coverage

def kernel(out):
    out[:-1] = 0

def cover_last_row():
    return coverage.check(kernel, np.empty((4, 4), np.uint8))

def cover_rows():
    return coverage.check_partition({"kernel": kernel, "last": lambda out: out[-1:].fill(0)}, np.empty((4, 4)))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "kernel_coverage.py"
    path.write_text(SCRIPT)
    return path


def test_what_is_no_function_is_named(script):
    script.write_text("cover_it = 5")
    with pytest.raises(ShapeError, match=r"cover_it of .*kernel_coverage\.py is no function, it is int"):
        find_checks(script)


def test_every_check_of_a_script_is_run(script):
    verdicts = run_checks(script)
    assert {name: bool(verdict) for name, verdict in verdicts.items()} == {"last_row": False, "rows": True}


def test_checks_are_chosen_by_a_part_of_their_name(script):
    assert list(run_checks(script, only="last")) == ["last_row"]
    with pytest.raises(ShapeError, match="no check with 'first' in its name; it has last_row, rows"):
        run_checks(script, only="first")


def test_script_without_checks_says_what_to_define(tmp_path):
    path = tmp_path / "nothing.py"
    path.write_text("x = 1\n")
    with pytest.raises(ShapeError, match=r"no function named cover_\.\.\.; define one that returns"):
        find_checks(path)


def test_check_that_returns_no_verdict_is_refused(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("def cover_it():\n    return True\n")
    with pytest.raises(ShapeError, match=r"cover_it of .* returned bool"):
        run_checks(path)


def test_command_prints_the_verdicts_and_exits_with_1_where_one_is_broken(script, capsys):
    assert run(["coverage", str(script)]) == 1
    said = capsys.readouterr().out
    assert "last_row: coverage is BROKEN" in said
    assert "never written: 4 bytes (0 in the padding, 4 in the valid part), first byte 12 = (row 3, column 0)" in said
    assert "rows: coverage holds" in said
    assert run(["coverage", str(script), "--only", "rows"]) == 0


def test_command_speaks_json(script, capsys):
    assert run(["coverage", str(script), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["rows"]["ok"] is True
    assert said["last_row"]["outputs"][0]["missed"]["first"]["offset"] == 12


def test_command_refuses_a_script_that_is_not_there_and_one_without_checks(tmp_path, capsys):
    assert run(["coverage", str(tmp_path / "none.py")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none.py'}: No such file or directory\n"
    assert run(["coverage", str(tmp_path)]) == 1
    assert "Is a directory" in capsys.readouterr().err
    path = tmp_path / "nothing.py"
    path.write_text("")
    assert run(["coverage", str(path)]) == 1
    assert "no function named cover_..." in capsys.readouterr().err


BOOM = "table = {}\n\ndef cover_x():\n    return look('zz')\n\ndef look(key):\n    return table[key]\n"


@pytest.mark.parametrize(
    ("text", "message", "shown"),
    [
        (BOOM, "check 'x' raised KeyError: 'zz' (boom.py:7)", "return table[key]"),
        ("1 / 0\n", "script 'boom.py' raised ZeroDivisionError: division by zero (boom.py:1)", "1 / 0"),
        ("\ndef cover_x(:\n", "script 'boom.py' raised SyntaxError: invalid syntax (boom.py:2)", "def cover_x(:"),
        ("import json\njson.loads('')\n", "raised JSONDecodeError: Expecting value", "json.loads('')"),
        ("def cover_x(): raise OSError\n", "check 'x' raised OSError (boom.py:1)", "raise OSError"),
        ("raise SystemExit(0)\n", "script 'boom.py' raised SystemExit: 0 (boom.py:1)", "raise SystemExit(0)"),
        ("assert False\n", "script 'boom.py' raised AssertionError (boom.py:1)", "assert False"),
    ],
)
def test_what_the_user_s_code_raises_is_one_line_and_its_traceback_is_on_stderr(
    text, message, shown, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "boom.py").write_text(text)
    assert run(["coverage", "boom.py", "--json"]) == 1
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["status"] == 1
    assert message in answer["error"]
    *lines, last = err.splitlines()
    assert last == f"error: {answer['error']}"
    assert shown in "\n".join(lines)
    assert "fp4rt" not in "\n".join(lines)
    assert run(["coverage", "boom.py"]) == 1
    assert capsys.readouterr().out == ""


def test_the_fixture_passes_what_is_covered(assert_covers):
    verdict = assert_covers(lambda out: out.fill(0), np.empty((3, 4)))
    assert verdict.ok


def test_the_fixture_fails_with_the_report(assert_covers):
    with pytest.raises(CoverageError, match=r"never written: 8 bytes .* \(row 2, column 24\)"):
        assert_covers(lambda out: out.reshape(-1)[:-1].fill(0), np.empty((3, 4)))


def test_a_script_finds_what_lies_beside_it_has_no_arguments_and_its_things_can_be_pickled(tmp_path, monkeypatch):
    (tmp_path / "beside_the_script.py").write_text("SIZE = 64")
    script = tmp_path / "checks.py"
    script.write_text(
        """
import pickle, sys
import numpy as np
from beside_the_script import SIZE
from fp4rt import coverage
assert sys.argv == [__file__]
class Thing:
    pass
def cover_all():
    from beside_the_script import SIZE
    assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
    return coverage.check(lambda out: out.fill(1), np.empty(SIZE, np.uint8))
"""
    )
    monkeypatch.chdir("/")
    before = list(sys.argv), list(sys.path)
    assert run_checks(script)["all"]
    assert (sys.argv, sys.path) == before


def test_verdicts_before_a_check_without_one_are_said(tmp_path, capsys):
    script = tmp_path / "checks.py"
    script.write_text(
        "import numpy as np\nfrom fp4rt import coverage\n"
        "def cover_first():\n    return coverage.check(lambda out: out.fill(1), np.zeros(4, np.uint8))\n"
        "def cover_second():\n    pass\n"
    )
    assert run(["coverage", str(script)]) == 1
    said = capsys.readouterr()
    assert said.out.startswith("first: ")
    assert "cover_second of" in said.err
