"""Runs in SGLang's environment: its own draft class loads draft directories and computes with them.

    python run_sglang_draft.py REQUEST.json INPUTS.npz ANSWERS.npz

REQUEST.json holds {"cases": [directory, ...], "steps": K}. INPUTS.npz holds per case i `i/ids` [T], the token after
each row, and `i/aux` [T, M]. ANSWERS.npz gets `i/unfilled`, the names of parameters that loading left untouched;
where there are none, also `i/logits/k` [T or 1, U], `i/carried/k` [T or 1, D] and `i/token/k`, the proposal as a
target id, of the prefill (k = 0) and of K drafting steps.
"""

import json
import socket
import sys
from pathlib import Path

import numpy as np
import sglang  # noqa: F401  (first: it patches transformers)
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput


class Growing:
    """In place of an attention backend: one sequence, whose keys and values are kept."""

    def __init__(self):
        self.keys = self.values = None

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **options):
        q, k, v = (x.view(len(x), -1, layer.qk_head_dim) for x in (q, k, v))
        self.keys = k if self.keys is None else torch.cat([self.keys, k])
        self.values = v if self.values is None else torch.cat([self.values, v])
        rows, total = len(q), len(self.keys)
        group = layer.tp_q_head_num // layer.tp_k_head_num
        keys, values = (x.repeat_interleave(group, dim=1) for x in (self.keys, self.values))
        scores = torch.einsum("tnh,snh->nts", q, keys) * layer.scaling
        seen = torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("nts,snh->tnh", weights, values).flatten(1)


def prepare() -> None:
    """What SGLang wants to exist before it builds a model: server arguments and process groups of one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ServerArgs(
        model_path="dummy", device="cpu", dtype="float32", attention_backend="torch_native"
    )
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{port}"
    )
    initialize_model_parallel(backend="gloo")


def load(directory: str):
    """The draft as the engine builds and fills it, and the parameters that were not filled."""
    config = ModelConfig(directory, dtype="float32", is_draft_model=True)
    draft_class, _ = ModelRegistry.resolve_model_cls(config.hf_config.architectures)
    assert draft_class.__name__ == "LlamaForCausalLMEagle3", draft_class
    draft = draft_class(config.hf_config).float()
    for parameter in draft.parameters():
        parameter.data.fill_(torch.nan)
    files = sorted(str(path) for path in Path(directory).glob("*.safetensors"))
    draft.load_weights(safetensors_weights_iterator(files))
    return draft, [name for name, x in draft.named_parameters() if torch.isnan(x).any()]


def rows(draft, attention: Growing, ids, position: int, hidden):
    """Logits and carried states of consecutive rows, through the engine's forward and logits processor."""
    count = len(ids)
    positions = torch.arange(position, position + count)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2, batch_size=1, input_ids=ids,
        req_pool_indices=torch.zeros(1, dtype=torch.int64), seq_lens=torch.tensor([count]),
        out_cache_loc=torch.arange(count), seq_lens_sum=count,
    )  # fmt: skip
    batch.positions, batch.capture_hidden_mode = positions, CaptureHiddenMode.FULL
    batch.spec_info = EagleDraftExtendInput(hidden_states=hidden)
    with forward_context(ForwardContext(attn_backend=attention)):
        out = draft.forward(ids, positions, batch)
    return out.next_token_logits, out.hidden_states


def answer(directory: str, ids, aux, steps: int) -> dict[str, np.ndarray]:
    draft, unfilled = load(directory)
    out = {"unfilled": np.array(unfilled, "U")}
    if unfilled:
        return out
    attention, ids, hidden, position = Growing(), torch.from_numpy(ids).long(), torch.from_numpy(aux), 0
    for k in range(steps + 1):
        logits, carried = rows(draft, attention, ids, position, hidden)
        best = logits[-1:].argmax(-1)
        position += len(ids)
        ids, hidden = draft.hot_token_id[best].long(), carried[-1:]
        out |= {f"logits/{k}": logits.numpy(), f"carried/{k}": carried.numpy(), f"token/{k}": ids.numpy()}
    return out


@torch.no_grad()
def main(request: str, inputs: str, answers: str) -> None:
    prepare()
    asked, given, out = json.loads(Path(request).read_text()), np.load(inputs), {}
    for i, directory in enumerate(asked["cases"]):
        found = answer(directory, given[f"{i}/ids"], given[f"{i}/aux"], asked["steps"])
        out |= {f"{i}/{name}": x for name, x in found.items()}
    np.savez(answers, **out)


if __name__ == "__main__":
    main(*sys.argv[1:])
