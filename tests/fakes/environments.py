"""Virtual environments without a Python: the files that are packed, unpacked and changed."""

from __future__ import annotations

from pathlib import Path

VERSION = "python3.12"


def write(path: Path, text: str = "", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def make_environment(folder: Path) -> Path:
    """Write a virtual environment and its base interpreter into ``folder``; return the environment's folder."""
    base, prefix = folder / "python", folder / "venv"
    program = write(base / "bin" / VERSION, "#!/bin/sh\necho base\n", 0o755)
    (base / "bin" / "python3").symlink_to(VERSION)
    write(base / "lib" / "libpython3.12.so.1.0", "library")
    write(base / "lib" / VERSION / "os.py", "base os")
    write(base / "lib" / VERSION / "test" / "test_os.py", "of Python itself")
    write(base / "lib" / VERSION / "config" / "libpython3.12.a", "static")
    write(base / "lib" / VERSION / "site-packages" / "of_base.py")
    write(base / "include" / VERSION / "Python.h")
    write(prefix / "pyvenv.cfg", f"home = {program.parent}\ninclude-system-site-packages = false\n")
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python3").symlink_to(program.with_name("python3"))
    (prefix / "bin" / "python").symlink_to("python3")
    write(prefix / "bin" / "tool", f"#!{prefix}/bin/python3 -I\nprint()\n", 0o755)
    packages = prefix / "lib" / VERSION / "site-packages"
    write(packages / "pkg" / "__init__.py", "NAME = 1\n")
    write(packages / "pkg" / "__pycache__" / "__init__.cpython-312.pyc", "bytecode")
    (prefix / "lib64").symlink_to("lib")
    return prefix
