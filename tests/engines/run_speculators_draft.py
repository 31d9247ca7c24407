"""Runs in vLLM's environment: speculators' own draft class, configured by its converter, unrolls draft directories.

    python run_speculators_draft.py REQUEST.json INPUTS.npz ANSWERS.npz

As run_specforge_draft.py; REQUEST.json also holds "target", the directory of a target for the class to read, and
ANSWERS.npz gets `i/dropped`, the tensors that the converter did not write. The class is given all of them.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}

import numpy as np
import torch
from safetensors.torch import load_file
from speculators.convert.eagle.eagle3_converter import Eagle3Converter
from speculators.models.eagle3 import Eagle3DraftModel


def answer(directory: str, target: str, ids, aux, steps: int) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as converted:
        Eagle3Converter().convert(directory, converted, target, validate=False)
        draft = Eagle3DraftModel.from_pretrained(converted, dtype=torch.float32)
        kept = load_file(Path(converted) / "model.safetensors")
    weights = load_file(Path(directory) / "model.safetensors")
    weights = {name.replace("midlayer.", "layers.0."): x for name, x in weights.items()}
    for parameter in draft.parameters():
        parameter.data.fill_(torch.nan)
    found = draft.load_state_dict(weights, strict=False)
    # The target's own head and norm serve training alone and are never in the file.
    unfilled = [
        name
        for name, x in draft.named_parameters()
        if torch.isnan(x).any() and not name.startswith("verifier_")
    ]
    logits = []
    draft.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out))
    ids, aux = torch.from_numpy(ids).long()[None], torch.from_numpy(aux)[None]
    draft(hidden_states=aux, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=steps + 1)
    out = {
        "unfilled": np.array(unfilled, "U"),
        "strange": np.array(found.unexpected_keys, "U"),
        "dropped": np.array(sorted(weights.keys() - kept.keys()), "U"),
    }
    return out | {f"logits/{k}": x[0].numpy() for k, x in enumerate(logits)}


@torch.no_grad()
def main(request: str, inputs: str, answers: str) -> None:
    asked, given, out = json.loads(Path(request).read_text()), np.load(inputs), {}
    for i, directory in enumerate(asked["cases"]):
        found = answer(directory, asked["target"], given[f"{i}/ids"], given[f"{i}/aux"], asked["steps"])
        out |= {f"{i}/{name}": x for name, x in found.items()}
    np.savez(answers, **out)


if __name__ == "__main__":
    main(*sys.argv[1:])
