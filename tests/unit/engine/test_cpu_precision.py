"""What dtype=auto means without a GPU follows from the processor's instructions."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragserve.engine import cpu_precision
from ragserve.engine.cpu_precision import cpu_dtype

X86 = "processor\t: 0\nflags\t\t: fpu avx512f {}\n\nprocessor\t: 1\nflags\t\t: fpu\n"


@pytest.mark.parametrize(
    ("info", "dtype", "said"),
    [
        (X86.format("avx512_bf16 amx_bf16 amx_tile"), "bfloat16", "the CPU has amx_bf16, avx512_bf16"),
        (X86.format("avx512_vnni"), "float32", "no instructions for bfloat16"),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", "bfloat16", "the CPU has bf16"),
        ("vendor\n", "float32", "no instructions"),
    ],
    ids=["AMX", "AVX-512", "Arm", "nothing said"],
)
def test_bfloat16_where_there_are_instructions_for_it(
    tmp_path: Path, info: str, dtype: str, said: str
) -> None:
    (tmp_path / "cpuinfo").write_text(info)
    found, why = cpu_dtype(tmp_path / "cpuinfo")
    assert found == dtype
    assert said in why


def test_where_linux_says_nothing_it_is_float32(tmp_path: Path) -> None:
    assert cpu_dtype(tmp_path / "nothing")[0] == "float32"
    assert cpu_precision.half_instructions(tmp_path) == ()
