"""Write the model folder that SGLang and transformers load, and check it.

    python -m benchmarks.model_recipe.export TRAINED MODEL_FOLDER [--check]

TRAINED is the output folder of the training. The tokenizer with its chat template stays that of
examples/models/ragserve-tiny. ``--check`` compares transformers' logits with the recipe's own, and needs
the product's environment."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from benchmarks.model_recipe import architecture as model
from benchmarks.model_recipe import attention
from benchmarks.model_recipe.architecture import Params, Shape
from benchmarks.model_recipe.corpus import MODEL, SYSTEM_TEXT

LIMIT_BYTES = 80_000_000
GENERATION = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "do_sample": False,
    "max_new_tokens": 64,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trained", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    export(options.trained, options.out)
    size = (options.out / "model.safetensors").stat().st_size
    print(f"{size:,} bytes")
    if size > LIMIT_BYTES:
        print(f"The model is larger than {LIMIT_BYTES:,} bytes: take fewer layers.", file=sys.stderr)
        return 1
    if options.check:
        difference = largest_difference(options.out)
        print(f"largest difference of logits to transformers: {difference:.2e}")
        return int(difference > 1e-3)
    return 0


def export(trained: Path, out: Path) -> None:
    """Merge the shards into one file beside configuration and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.load(trained).items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = Shape.read(trained).hf_config()
    for name, content in (("config.json", config), ("generation_config.json", GENERATION)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if out.resolve() != MODEL.resolve():
            shutil.copy(MODEL / name, out / name)


@torch.no_grad()
def logits(params: Params, shape: Shape, ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one sequence, float32 on the CPU."""
    cos, sin = model.rope_table(shape, len(ids), "cpu")
    n = torch.zeros(len(ids), dtype=torch.int32)
    visible = attention.Visible(n, n - 1)
    x = F.embedding(torch.tensor(ids), params["model.embed_tokens.weight"])
    for i in range(shape.num_hidden_layers):
        first, second = model.layer_weights(params, i)
        parts = model.before_attention(x, *first, cos, sin)
        x = model.after_attention(x, attention.reference(*parts, visible), *second)
    return F.linear(model.rms_norm(x, params["model.norm.weight"]), params["model.embed_tokens.weight"])


def largest_difference(folder: Path) -> float:
    """The largest difference between transformers' logits and ours, for a prompt of the chat template."""
    from ragserve.engine.compat import prepare

    prepare()  # transformers imports torchvision
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of Ruritania?"}],
        documents=[{"title": "Ruritania", "text": "Capital - name: Strelsau"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    if SYSTEM_TEXT not in ids:
        raise ValueError("The chat template has another system text than the training data.")
    tokens = tokenizer(ids, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    ours = logits(model.load(folder), Shape.read(folder), tokens)
    return float((expected - ours).abs().max())


if __name__ == "__main__":
    sys.exit(main())
