"""Writes NVML's structures and constants as a C header, from nvidia-ml-py's ctypes classes.

Static assertions compare the C compiler's layout with that of ctypes, so a header that compiles has the layout that
nvidia-ml-py passes to the library.
"""

from __future__ import annotations

import ctypes
import re
from types import ModuleType
from typing import Any

_NUMBERS: dict[Any, str] = {
    ctypes.c_char: "char",
    ctypes.c_ubyte: "unsigned char",
    ctypes.c_ushort: "unsigned short",
    ctypes.c_int: "int",
    ctypes.c_uint: "unsigned int",
    ctypes.c_ulong: "unsigned long long",  # of 64 bits on Linux, where it is also c_ulonglong
    ctypes.c_long: "long long",
    ctypes.c_double: "double",
    ctypes.c_char_p: "char *",
    ctypes.c_void_p: "void *",
}
_CONSTANT = re.compile(r"(NVML|nvml)[A-Za-z0-9_]*")


def write_header(pynvml: ModuleType, sources: str) -> str:
    """Return the header for ``sources``: each structure that they name (``nvmlMemory_v2_t``), and all constants."""
    classes = {_c_name(c): c for c in vars(pynvml).values() if _is_struct(c)}
    named = [classes[name] for name in dict.fromkeys(re.findall(r"\w+_t\b", sources)) if name in classes]
    structs = "".join(_define(c) for c in _with_members(named))
    constants = "".join(
        f"#define {name} {value}{'' if abs(value) < 1 << 31 else 'ULL'}\n"
        for name, value in sorted(vars(pynvml).items())
        if type(value) is int and _CONSTANT.fullmatch(name)
    )
    texts = "".join(
        f'    case {code}: return "{text}";\n' for code, text in pynvml.NVMLError._errcode_to_string.items()
    )
    error_text = f'switch (code) {{\n    case 0: return "Success";\n{texts}    default: return "Unknown Error";\n    }}'
    return (
        "#include <stddef.h>\n"
        f"{constants}{structs}"
        f"static inline const char *nvml_error_text(int code) {{\n    {error_text}\n}}\n"
    )


def struct_layout(struct: Any) -> dict[str, tuple[int, int]]:
    """Return by field its offset and size in bytes; the whole size is under the empty name."""
    fields = {name: getattr(struct, name) for name, *_ in struct._fields_}
    return {"": (0, ctypes.sizeof(struct)), **{name: (f.offset, f.size) for name, f in fields.items()}}


def _is_struct(value: Any) -> bool:
    return (
        isinstance(value, type) and issubclass(value, (ctypes.Structure, ctypes.Union)) and hasattr(value, "_fields_")
    )


def _c_name(struct: Any) -> str:
    return str(struct.__name__).removeprefix("c_")


def _with_members(structs: list[Any]) -> list[Any]:
    """Return the structures, each after those that it contains."""
    ordered: list[Any] = []
    for struct in structs:
        members = [_element(kind)[0] for _, kind, *_ in struct._fields_]
        ordered += [s for s in _with_members([m for m in members if _is_struct(m)]) if s not in ordered]
        if struct not in ordered:
            ordered.append(struct)
    return ordered


def _element(kind: Any) -> tuple[Any, str]:
    """Return the type of an array's elements and its dimensions in C."""
    dimensions = ""
    while isinstance(kind, type) and issubclass(kind, ctypes.Array):
        kind, dimensions = kind._type_, f"{dimensions}[{kind._length_}]"
    return kind, dimensions


def _define(struct: Any) -> str:
    name = _c_name(struct)
    keyword = "union" if issubclass(struct, ctypes.Union) else "struct"
    fields = ""
    for field, kind, *_ in struct._fields_:
        element, dimensions = _element(kind)
        c_type = _c_name(element) if _is_struct(element) else _NUMBERS.get(element, "void *")
        fields += f"    {c_type} {field}{dimensions};\n"
    checks = "".join(
        f"_Static_assert({f'offsetof({name}, {field}) == {offset}' if field else f'sizeof({name}) == {size}'}, "
        f'"{name}.{field}");\n'
        for field, (offset, size) in struct_layout(struct).items()
    )
    return f"typedef {keyword} {{\n{fields}}} {name};\n{checks}"
