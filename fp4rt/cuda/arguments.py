"""Kernel arguments: one struct, declared once in CUDA, read from there by Python.

A kernel takes one struct by value. Its header declares it in plain C, one member a line::

    struct QuantizeArguments {
        const u8* x;      // (m, n)
        i64 row_stride;   // bytes
        u32 m;
    };

``argument_struct("kernels/quantize.cuh", "QuantizeArguments").pack(pointer, stride, m)`` gives its bytes.
"""

from __future__ import annotations

import re
import struct
from functools import cache

from fp4rt.errors import CompileError
from fp4rt.sources import read_source

__all__ = ["ArgumentStruct", "argument_struct"]

_CODES = {"u8": "B", "u16": "H", "u32": "I", "i32": "i", "u64": "Q", "i64": "q", "float": "f", "TensorMap": "128s"}
_MEMBER = re.compile(r"^\s*(?:const\s+)?(?P<type>\w+)\s*(?P<pointer>\*?)\s*(?P<name>\w+)\s*;", re.MULTILINE)


class ArgumentStruct:
    """The members of one argument struct, in order, and their packing with C's native alignment."""

    __slots__ = ("codes", "fields", "name", "nbytes", "pack", "pack_into")

    def __init__(self, name: str, fields: list[str], codes: str) -> None:
        self.codes = codes + "0Q"  # 0Q: the size C's sizeof gives, but for the alignment of a tensor map
        packer = struct.Struct("@" + self.codes)
        self.name = name
        self.fields = tuple(fields)
        self.nbytes = packer.size
        # Values in the order of ``fields``; pointers are integers.
        self.pack, self.pack_into = packer.pack, packer.pack_into


@cache
def argument_struct(header: str, name: str, *inner: ArgumentStruct) -> ArgumentStruct:
    """Read ``struct name`` from a header under ``kernels_src``; members may be of the types ``inner``.

    Raises:
        CompileError: the header has no such struct, or a member's type is not a pointer, an integer or a float.
    """
    text = re.sub(r"//[^\n]*", "", read_source(header))
    body = re.search(rf"struct\s+{name}\s*\{{(.*?)\}}\s*;", text, re.DOTALL)
    if body is None:
        raise CompileError(f"{header} declares no struct {name}")
    structs = {known.name: known for known in inner}
    fields: list[str] = []
    codes = ""
    for member in _MEMBER.finditer(body.group(1)):
        known = structs.get(member["type"])
        if known is not None:
            fields += known.fields
            codes += "0Q" + known.codes
            continue
        code = "P" if member["pointer"] else _CODES.get(member["type"])
        if code is None:
            raise CompileError(
                f"{header}: {name}.{member['name']} has type {member['type']}; wanted one of {', '.join(_CODES)}"
            )
        fields.append(member["name"])
        codes += code
    return ArgumentStruct(name, fields, codes)
