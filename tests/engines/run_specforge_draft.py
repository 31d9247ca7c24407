"""Runs in vLLM's environment: SpecForge's own draft class loads draft directories and is unrolled by its own trainer.

    python run_specforge_draft.py REQUEST.json INPUTS.npz ANSWERS.npz

REQUEST.json holds {"cases": [directory, ...], "steps": K}. INPUTS.npz holds per case i `i/ids` [T], the token after
each row, and `i/aux` [T, M]. ANSWERS.npz gets `i/unfilled` and `i/strange`, the names of parameters that loading left
untouched and of tensors that it had no place for, and `i/logits/k` [T, U] of unroll steps k = 0 .. K, where row t
reads token ids[t + k].
"""

import json
import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import numpy as np
import torch
from safetensors.torch import load_file
from specforge.algorithms.eagle3 import model as eagle3
from specforge.core import loss
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from transformers import LlamaConfig


class OnCPU:
    """In place of the trainer's Triton kernel: the reference for it that stands in the same module."""

    apply = staticmethod(loss._compute_loss)


eagle3.LogSoftmaxLoss = OnCPU


def answer(directory: str, ids, aux, steps: int) -> dict[str, np.ndarray]:
    config = LlamaConfig.from_pretrained(directory)
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    for parameter in draft.parameters():
        parameter.data.fill_(torch.nan)
    found = draft.load_state_dict(load_file(Path(directory) / "model.safetensors"), strict=False)
    out = {
        "unfilled": np.array([name for name, x in draft.named_parameters() if torch.isnan(x).any()], "U"),
        "strange": np.array(found.unexpected_keys, "U"),
    }
    steps_, compute = [], draft.compute_logits
    draft.compute_logits = lambda hidden: steps_.append(compute(hidden)) or steps_[-1]
    ids, aux = torch.from_numpy(ids).long()[None], torch.from_numpy(aux)[None]
    target = torch.zeros(*ids.shape, config.vocab_size)  # the loss is of no interest
    eagle3.OnlineEagle3Model(draft, length=steps + 1, attention_backend="sdpa")(
        input_ids=ids, attention_mask=torch.ones_like(ids).bool(), target=target,
        loss_mask=torch.ones(*ids.shape, 1), hidden_states=aux,
    )  # fmt: skip
    return out | {f"logits/{k}": x[0].numpy() for k, x in enumerate(steps_)}


@torch.no_grad()
def main(request: str, inputs: str, answers: str) -> None:
    asked, given, out = json.loads(Path(request).read_text()), np.load(inputs), {}
    for i, directory in enumerate(asked["cases"]):
        found = answer(directory, given[f"{i}/ids"], given[f"{i}/aux"], asked["steps"])
        out |= {f"{i}/{name}": x for name, x in found.items()}
    np.savez(answers, **out)


if __name__ == "__main__":
    main(*sys.argv[1:])
