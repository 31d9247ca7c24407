"""Runs in vLLM's environment: SpecForge's own trainer and optimiser take some steps on given batches.

    python run_specforge_train.py REQUEST.json INPUTS.npz ANSWERS.npz

REQUEST.json holds {"directory": a draft directory to start from, "unroll": K, "decay", "learning_rate", "warmup",
"steps", "total": the schedule's steps}. INPUTS.npz holds `ids` [steps, B, T], `loss_mask` [steps, B, T], `aux` [steps,
B, T, M], `final` [steps, B, T, D] and the target's `head` [V, D]. ANSWERS.npz gets `losses` [steps, K], `loss` [steps]
and the draft at the end as `weight/NAME`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import run_specforge_draft as specforge_cpu  # first: it readies the trainer for the CPU
import torch
from safetensors.torch import load_file
from specforge.optimizer import BF16Optimizer
from specforge.utils import padding
from transformers import LlamaConfig


def main(request: str, inputs: str, answers: str) -> None:
    asked, given = json.loads(Path(request).read_text()), np.load(inputs)
    config = LlamaConfig.from_pretrained(asked["directory"])
    draft = specforge_cpu.LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    draft.load_state_dict(load_file(Path(asked["directory"]) / "model.safetensors"), strict=False)
    draft.freeze_embedding()
    trainer = specforge_cpu.eagle3.OnlineEagle3Model(
        draft, length=asked["unroll"], attention_backend="sdpa"
    ).train()
    optimizer = BF16Optimizer(
        draft,
        asked["learning_rate"],
        total_steps=asked["total"],
        warmup_ratio=asked["warmup"] / asked["total"],
    )
    head, found = torch.from_numpy(given["head"]), []
    for step in range(asked["steps"]):
        ids = torch.from_numpy(given["ids"][step]).long()
        logits = torch.from_numpy(given["final"][step]) @ head.T
        # Its collator shifts the tokens and the target by one, and not the mask.
        losses, *_ = trainer(
            input_ids=padding(ids, left=False), attention_mask=torch.ones_like(ids).bool(),
            target=padding(logits, left=False), loss_mask=torch.from_numpy(given["loss_mask"][step])[..., None].float(),
            hidden_states=torch.from_numpy(given["aux"][step]),
        )  # fmt: skip
        sum(asked["decay"] ** k * x for k, x in enumerate(losses)).backward()
        optimizer.step()
        found.append([float(x) for x in losses])
    decay = asked["decay"] ** np.arange(asked["unroll"])
    weights = {f"weight/{name}": x.detach().numpy() for name, x in draft.named_parameters()}
    np.savez(answers, losses=np.array(found), loss=np.array(found) @ decay, **weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
