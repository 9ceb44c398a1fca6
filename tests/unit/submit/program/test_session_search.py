"""Which scripts use clustertrain, by their own text and by the modules that they import."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clustertrain.submit.program import session_search

USES = "from clustertrain import session\n"


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("import clustertrain as ct", None),
        ("import helper", "jobs/helper.py"),
        ("def main():\n    from lib.deep import part", "src/lib/deep/part.py"),
        ("import lib.deep.part", "src/lib/deep/__init__.py"),
        ("from lib import *", "src/lib/__init__.py"),
        ("import near", "src/lib/far.py"),  # which near.py imports
        ("from . import helper", "jobs/helper.py"),
        ("exec(open('helper.py').read())", "jobs/helper.py"),
    ],
)
def test_module_of_the_repository_that_uses_clustertrain_is_found(
    tmp_path: Path, script: str, module: str | None
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "src" / "lib" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "near.py").write_text("import lib.far\n")
    path = tmp_path / "jobs" / "train.py"
    path.write_text(script)
    assert module is None or session_search.find_use(path).path is None
    expected = path if module is None else tmp_path / module
    if module is not None:
        expected.write_text(USES)
    assert session_search.find_use(path).path == expected


def test_script_that_uses_none_is_plain(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import torch, train, missing.part\nopen('\\0.py')\nexec(open('config.py').read())\n")
    (tmp_path / "config.py").write_text("import train\nthis is no Python")
    (tmp_path / "other.py").write_text(USES)
    assert session_search.find_use(path).path is None


@pytest.mark.parametrize(
    ("text", "is_session"),
    [
        ("import clustertrain as ct\njob = ct.attach(save=s, load=l)\n", False),
        ("import clustertrain as ct\njob = ct.attach(save=s, load=l)  # not a session\n", False),
        ("try:\n import clustertrain as ct\nexcept ImportError:\n ct = None\nif ct:\n ct.attach(save=s)\n", False),
        ("from clustertrain import Job, attach\n", False),
        ("from clustertrain.integrations.transformers import Callback\n", False),
        ("import clustertrain.integrations.accelerate as cta\ncta.attach(a)\n", False),
        ("import importlib\nct = importlib.import_module('clustertrain')\nct.attach(save=s, load=l)\n", False),
        ("# once started with clustertrain submit, see its session\nimport torch\n", False),
        ("'clustertrain session'\nprint('import clustertrain')\n", False),
        ("import clustertrain_tools\nfrom . import clustertrain\n", False),
        ("import re\nre.compile('\\d')\n", False),
        ("import clustertrain as ct\nct.attach\nwith ct.session() as s: pass\n", True),
        ("from clustertrain import attach, session as open_session\n", True),
        ("import clustertrain as ct\ngetattr(ct, 'session')()\n", True),
        ("import importlib\nimportlib.import_module('clustertrain').session()\n", True),
        ("import importlib\nct = importlib.import_module('clustertrain')\nwith ct.session(): pass\n", True),
        ("from importlib import import_module\nimport_module('clustertrain.train.session')\n", True),
        ("from clustertrain import *\nattach\n", True),
    ],
)
def test_imported_names_decide_and_no_words(tmp_path: Path, text: str, is_session: bool) -> None:
    """``attach`` and the callbacks belong to commands."""
    path = tmp_path / "train.py"
    path.write_text(text)
    assert session_search.find_use(path).path == (path if is_session else None)


@pytest.mark.parametrize(
    ("text", "is_session"),
    [("import torch\nprint 'started'\n", False), ("from clustertrain import session\nprint 'started'\n", True)],
)
def test_file_that_cannot_be_parsed_is_searched_and_reported(tmp_path: Path, text: str, is_session: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    use = session_search.find_use(path)
    assert use.path == (path if is_session else None)
    assert use.unparsed.startswith(f"{path}, line 2 is not valid for Python 3.")
