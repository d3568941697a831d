"""An installed wheel works without the checkout and without a network: it brings the model, its gate and the
pins, and serves another model: another architecture, vocabulary layout, chat template and rotary positions.
Positions of that model cannot be shifted, so documents' KV is not composed; all else works. Its processes are
spawned, as users' are: what they load, hold and say.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import MODEL, REPO
from tests.integration.models import YARN

BUILT_FROM = (
    *("ragserve", "sglang_ext", "index", "kernels", "requirements", "examples/models"),
    *("pyproject.toml", "README.md", "LICENSE"),
)
WHERE = """
import json, pathlib, ragserve, ragserve_index, ragserve_kernels, sglang_ext
from ragserve.config import load
from ragserve.profiles.gate import FILE_NAME, Gate
from ragserve.profiles.samkv import place_of
settings = load()
brought = json.loads((pathlib.Path(settings.model) / FILE_NAME).read_text())
[(fingerprint, records)] = brought["models"].items()
[prefix] = {record["prefix"] for record in records.values()}
gate = Gate.of(settings, model=settings.model, fingerprint=fingerprint, dtype="float32", prefix=prefix)
paths = [m.__file__ for m in (ragserve, ragserve_index, ragserve_kernels, sglang_ext)] + [settings.model]
print(json.dumps({"paths": paths, "samkv": str(place_of(settings)),
                  "verified": gate.verified()}))
"""
CHATML = (
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']+'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; third-party packages come from this environment's folder.

    The ``.pth`` file adds that folder to ``sys.path`` only: its own ``.pth`` files, the editable install
    among them, are not read.
    """
    tmp = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in BUILT_FROM:
        source, target = REPO / name, tmp / "tree" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target, ignore=ignore) if source.is_dir() else shutil.copy(source, target)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp),
        str(tmp / "tree"),
    ]
    subprocess.run([*pip, *build], check=True)
    [wheel] = tmp.glob("ragserve-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp / "venv")], check=True)
    python = tmp / "venv" / "bin" / "python"
    install = ["install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run([*pip, "--python", str(python), *install], check=True)
    [site] = (tmp / "venv" / "lib").glob("python*/site-packages")
    (site / "third-party.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shutil.rmtree(tmp / "tree")
    return tmp / "venv"


@pytest.fixture
def clean(tmp_path: Path) -> dict[str, str]:
    """Nothing of this process's environment, such as PYTHONPATH or RAGSERVE_* variables."""
    threads = os.environ.get("OMP_NUM_THREADS", "2")
    return {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": threads}


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    """A random two-layer Qwen2 whose template takes messages only. Its answers mean nothing."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path / "other-model"
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, **YARN},
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    shutil.copy(MODEL / "tokenizer.json", folder)
    tokenizer = json.loads((MODEL / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"chat_template": CHATML, "model_max_length": 2048})
    )
    return folder


def test_a_wheel_has_all_it_needs(environment: Path, clean: dict[str, str], tmp_path: Path) -> None:
    python, ragserve = environment / "bin" / "python", environment / "bin" / "ragserve"
    found = json.loads(subprocess.check_output([python, "-c", WHERE], cwd=tmp_path, env=clean))
    assert all(Path(path).is_relative_to(environment) for path in found["paths"]), found
    assert found["samkv"] == "ragserve-data/ragserve-samkv.json", (
        "an installed model's folder is not written to"
    )
    assert "concat:recompute=sentences,share=0.3" in found["verified"]

    doctor = subprocess.run(
        [ragserve, "doctor", "--json", "--port", "0"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        check=False,
    )
    report = json.loads(doctor.stdout)
    assert doctor.returncode == 0, report
    checks = {check["name"]: check for check in report["checks"]}
    assert str(environment) in checks["model"]["found"]
    assert "pins" in checks["versions"]["found"]
    assert "no pins" not in checks["versions"]["found"]


def test_a_wheel_serves_without_checkout_and_network(
    environment: Path, clean: dict[str, str], tmp_path: Path, other_model: Path
) -> None:
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode
    ):
        pytest.skip("this machine does not let us make a network namespace")
    script = shutil.copy(REPO / "tests" / "integration" / "offline_main.py", tmp_path)
    command = ["unshare", "-rn", environment / "bin" / "python", script, tmp_path, other_model]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads(done.stdout)
    assert (out["ingested"], out["status"]) == ("done", 200)
    assert out["info"]["model"] == str(other_model)
    assert out["answer"]["usage"]["completion"] > 0
    assert out["answer"]["usage"]["prompt"] > 60, "our system text, the document and the question in ChatML"
    assert out["info"]["strategies"] == ["full", "prefix", "passages"]
    assert out["full"]["answer"] == out["answer"]["answer"]
    assert out["composed"]["status"] == out["raw"]["status"] == 400
    for refusal in (out["composed"], out["raw"]):
        assert "YaRNScalingRotaryEmbedding" in refusal["text"], "what the model has"
        assert "'prefix' or 'full'" in refusal["text"], "what to do"
    assert out["found"]["results"][0]["text"].startswith("The lighthouse of Orrin")
    assert out["processes"] >= 3, "the scheduler, the detokenizer and their template"
    assert out["with_torch"] == 3, "these only"
    assert out["with_sklearn"] == 0, "which they never use"
    assert out["resident_bytes"] < 5 * 2**30
    for noise in ("UserWarning", "Ignore import error", "init_cpu_threads_env", "RLIMIT_NOFILE"):
        assert noise not in out["log"]
    assert out["left"] == 0, "ten seconds after the server was killed"
