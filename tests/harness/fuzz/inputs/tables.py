"""Tables of configurations for `plan --table`."""

from __future__ import annotations

import csv
import io

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.harness.fuzz.inputs.damage import byte_changes, change
from tests.harness.fuzz.inputs.text import numbers, words
from tests.harness.fuzz.play import InputClass
from tests.harness.fuzz.sandbox import Sandbox

ROW = {
    "source": "a page, table 1", "model": "Llama-3.1-8B", "n_params_b": "8.03", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256", "seq": "8192", "gpu": "H100",
    "gpu_mem_gib": "96", "n_gpus": "8", "gpus_per_node": "8", "dp": "8", "fsdp_or_zero": "fsdp_full",
    "hsdp_replicate": "1", "tp": "1", "pp": "1", "vpp": "", "cp": "1", "ep": "", "micro_bs": "2",
    "global_bs_seqs": "16", "act_ckpt": "selective_op", "precision": "bf16", "compile": "no",
    "tokens_per_s_per_gpu": "5762", "tflops_per_gpu": "", "mfu_pct": "", "peak_mem_gib": "82.4", "fits": "yes",
    "note": "",
}  # fmt: skip


def tables() -> SearchStrategy[bytes]:
    cell = numbers().map(str) | words()
    row = st.dictionaries(st.sampled_from(sorted(ROW)), cell, max_size=3).map(lambda changes: {**ROW, **changes})
    whole = st.lists(row, min_size=1, max_size=3).map(_text)
    return st.one_of(whole, whole, st.builds(change, whole, byte_changes()))


def _text(rows: list[dict[str, str]]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(ROW))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def play(box: Sandbox, drawn: tuple[bytes, bool]) -> None:
    text, calibrate = drawn
    (box.site / "table.csv").write_bytes(box.arm_bytes(text))
    box.call(["plan", "--table", "table.csv", *(["--calibrate"] if calibrate else [])])


CLASSES = (InputClass("tables", lambda: st.tuples(tables(), st.booleans()), play, 10),)
