"""The constants of the kernels are those of fp4rt.format and fp4rt.layout."""

from __future__ import annotations

from fp4rt.sources import read_source
from tools.generate_constants import NAME, constants_header


def test_the_committed_header_is_what_the_facts_generate():
    assert read_source(NAME) == constants_header(), "run python -m tools.generate_constants"
